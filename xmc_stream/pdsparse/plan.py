"""The rows that PD-Sparse learns from, for one job, and what a job may hold."""

from __future__ import annotations

from dataclasses import dataclass

from xmc_stream.kernels.order import GROUP
from xmc_stream.models.decisions import LEARNED_BYTES, labels_ranked
from xmc_stream.pdsparse.kernels.tables import most_bytes_of
from xmc_stream.pdsparse.parameters import PDSparseParameters
from xmc_stream.pdsparse.solver import PLACES, strip_bits
from xmc_stream.pdsparse.state import ENTRIES, SEGMENT_BYTES
from xmc_stream.runtime.plan import MIB, MemoryPlan
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.model import UNIT

STRETCH = 2048  # rows that are gathered and visited at a time, at most
_LABEL_BYTES = 3 * 12  # of an active label of a row of a group: before, after, and put in order
_ACTIVE, _ACTIVE_SHARE = 32, 6  # active labels of a row of a group on average; times as many as it has itself
_X_BYTES = 16 * MIB  # of rows gathered at a time
_LEAST_TABLES = 4 * MIB
MOST_FORESEEN = 128 * MIB  # of tables that a probe may ask for: it says too much of a large set


@dataclass(frozen=True)
class PassPlan:
    """What a segment may hold. nnz: entries of X at a time; dual: bytes of the dual variables of a group; tables: bytes of the
    tables; dense: vectors of all labels instead.

    A post-solve has tables in any case: they tell what is in the support.
    """

    nnz: int
    dual: int
    tables: int
    dense: bool = False

    def most_bytes(self, fixed: bool = False) -> int:
        """Of the tables; 0 for dense vectors."""
        return 0 if self.dense and not fixed else self.tables


def group_rows(dataset: Dataset) -> int:
    """Rows of a group, at most."""
    return min(dataset.n_samples, GROUP << strip_bits(dataset.n_samples, dataset.X_rows().nnz))


def gathered(dataset: Dataset) -> int:
    """Entries of X that are gathered at a time: of the longest row at least."""
    X = dataset.X_rows()
    return min(X.nnz, X.block_bytes(_X_BYTES) // X.entry_bytes)


def pass_needs(dataset: Dataset, parameters: PDSparseParameters) -> dict[str, int]:
    """What a segment holds beside the tables."""
    d, k, n, X = dataset.n_features, dataset.n_labels, dataset.n_samples, dataset.X_rows()
    parts, rows = min(parameters.parts, k), group_rows(dataset)
    nnz, most = gathered(dataset), min(parameters.most, k)
    active = min(k, max(_ACTIVE, _ACTIVE_SHARE * dataset.Y_rows().nnz // max(n, 1)))
    return {
        "features": 28 * d * parts + 24 * d,
        "labels": 36 * k,
        "rows": X.entry_bytes * nnz + 100 * rows + 8 * MIB,
        "a row": 8 * min(PLACES, min(d, nnz) * k),
        "labels that searches bring in": (12 * min(rows, STRETCH) + 48) * most,
        "dual variables": _LABEL_BYTES * rows * active + 24 * -(-n >> strip_bits(n, X.nnz)),
        "held-out rows": (LEARNED_BYTES + 32 * labels_ranked(dataset) * min(n, STRETCH)) * (parameters.held_out > 0),
        "writers and windows": SEGMENT_BYTES + 24 * ENTRIES + 4 * MIB,
    }


def most_tables(dataset: Dataset, parameters: PDSparseParameters) -> int:
    """Bytes that tables cannot outgrow."""
    return most_bytes_of(dataset.n_features, dataset.n_labels, min(parameters.parts, dataset.n_labels))


def plan_pass(plan: MemoryPlan, dataset: Dataset, parameters: PDSparseParameters) -> PassPlan:
    """Share the budget: dense vectors of all labels where they take no more than half of what is left, else tables.

    Raises MemoryLimitError where there is no room for either.
    """
    needs = pass_needs(dataset, parameters)
    dense = 8 * dataset.n_features * dataset.n_labels
    plan.refuse_unless({**needs, "tables": min(dense, _LEAST_TABLES)}, "PD-Sparse")
    left = plan.budget - sum(needs.values())
    # rows may come to have more active labels, all at most
    more = min(left // 8, _LABEL_BYTES * group_rows(dataset) * dataset.n_labels)
    left -= more
    fits = dense <= left // 2 and dataset.n_labels <= UNIT
    return PassPlan(
        gathered(dataset), needs["dual variables"] + more, min(left, most_tables(dataset, parameters)), fits
    )
