"""What a job of MEMOIR may hold."""

from __future__ import annotations

from dataclasses import dataclass

from xmc_stream.jobs.plan import MIB, MemoryPlan
from xmc_stream.methods.memoir.draws import AHEAD
from xmc_stream.methods.memoir.parameters import MEMOIRParameters
from xmc_stream.mips.exact import DenseExact, Exact
from xmc_stream.mips.lsh import SimpleLSH
from xmc_stream.mips.smallworld import SmallWorld
from xmc_stream.mips.vectors import CLASS_BYTES
from xmc_stream.store.dataset import Dataset

HELD_OUT = 5000  # rows that are held out, at most
_LEAST_VECTORS = 4 * MIB
_DRAW_BYTES = 64  # of a draw: its row, label, place, own score, best class and score
_ENTRY_BYTES = 8 + 12 + 12  # of an entry of a batch: itself, in the order of vectors, by feature
_FIXED = 16 * MIB


@dataclass(frozen=True)
class StepsPlan:
    """What a segment may hold. vectors: bytes of the sparse vectors of classes; threads: that search beside each other."""

    vectors: int
    threads: int


def resolved(p: MEMOIRParameters, dataset: Dataset) -> MEMOIRParameters:
    """Parameters, with what rules decide for these data."""
    return p.resolved(dataset.n_labels, dataset.Y_rows().nnz)


def shares(dataset: Dataset, p: MEMOIRParameters) -> float:
    """Of the rows, those that are held out."""
    return min(p.held_out, HELD_OUT / max(dataset.n_samples, 1))


def steps_needs(dataset: Dataset, p: MEMOIRParameters, threads: int) -> dict[str, int]:
    """Bytes by component, beside sparse vectors."""
    n, k, X, Y = dataset.n_samples, dataset.n_labels, dataset.X_rows(), dataset.Y_rows()
    draws, mean = p.draws, X.nnz / max(n, 1)
    entries = int(draws * (min(2.0 * mean, dataset.n_features) + 1))
    labels = int(draws * Y.nnz / max(n, 1))
    needs = {
        "copies of rows": 4 * Y.nnz + 24 * k,
        "draws": draws * _DRAW_BYTES + 8 * labels,
        "rows of batches": (AHEAD + 1) * 8 * entries + _ENTRY_BYTES * entries,
        "numbers of classes": 40 * k,
        "windows": _FIXED,
    }
    if p.variant == "lsh":
        rank = min(p.rank, dataset.n_features, n)
        needs |= {
            "W": k * (4 * rank + 9), "codes": SimpleLSH.bytes_of(k, rank, threads, p.bits),
            "rows of batches": (AHEAD + 1) * 8 * entries + 2 * 4 * rank * draws, "scores": DenseExact.bytes_of(threads),
        }  # fmt: skip
        return needs
    if p.oracle == "sw-graph":
        needs["graph"] = SmallWorld.bytes_of(k, dataset.n_features + p.bias, threads, p.degree)
    # held-out rows are scored by all classes in any case
    needs["scores"] = Exact.bytes_of(dataset.n_features + p.bias, entries, threads)
    return needs


def plan_steps(plan: MemoryPlan, dataset: Dataset, p: MEMOIRParameters) -> StepsPlan:
    """Give what is left to the vectors.

    Raises MemoryLimitError where next to nothing is.
    """
    threads = plan.threads
    needs = steps_needs(dataset, p, threads)
    least = 0 if p.variant == "lsh" else _LEAST_VECTORS + CLASS_BYTES * dataset.n_labels
    plan.refuse_unless({**needs, "vectors": least}, "MEMOIR")
    return StepsPlan(needs.get("W", 0) + plan.budget - sum(needs.values()), threads)
