"""What a job of MEMOIR may hold."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from xmc_stream.memoir.draws import AHEAD, BLOCK, row_type
from xmc_stream.memoir.parameters import MEMOIRParameters
from xmc_stream.mips.exact import DenseExact, Exact
from xmc_stream.mips.lsh import SimpleLSH
from xmc_stream.mips.smallworld import SmallWorld
from xmc_stream.mips.vectors import CLASS_BYTES, ENTRY_BYTES
from xmc_stream.models.decisions import LEARNED_BYTES
from xmc_stream.runtime.plan import MIB, MemoryPlan
from xmc_stream.store.dataset import Dataset

HELD_OUT = 5000  # rows that are held out, at most
_LEAST_SCORED, _MOST_SCORED = 64, 512  # of these, at a time
_FORESEEN = 128 * MIB  # of sparse vectors that a plan asks for: the most that they come to says too much of a large set
_DRAW_BYTES = 64  # of a draw: its row, label, place, own score, best class and score
_ROW_ENTRY, _ENTRY_BYTES = 12, 8 + 12  # of an entry of a batch: in the order of vectors; when it is read, by feature
_MODEL_ENTRY = 40  # of an entry of a model that is written: itself, its class, and as it is chosen
ENTRIES = 1 << 18  # of W, that are written or read at a time, at most; a class at least
RANGE = 1 << 18  # rows that are looked at together
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


@lru_cache(64)  # a plan is made for each segment, and for many limits
def most_entries(path: Path, fingerprint: str, n: int) -> tuple[int, int, int]:
    """Of X, and of Y: entries of the n rows that have the most; entries of the longest row of X."""
    dataset, sums, longest = Dataset(path), [], []
    for matrix in (dataset.X_rows(), dataset.Y_rows()):
        best = np.zeros(1, np.int64)
        for first in range(0, matrix.n_lines, RANGE):
            lengths = np.diff(matrix.ends(first, min(first + RANGE, matrix.n_lines)))
            best = np.sort(np.concatenate([best, lengths]))[-n:]
        sums.append(int(best.sum()))
        longest.append(int(best[-1]))
    return sums[0], sums[1], longest[0]


def steps_needs(dataset: Dataset, p: MEMOIRParameters, threads: int) -> dict[str, int]:
    """Bytes by component, beside sparse vectors."""
    n, k, draws = dataset.n_samples, dataset.n_labels, p.draws
    at_a_time = max(draws, _LEAST_SCORED) if p.held_out else draws
    entries, labels, longest = most_entries(dataset.path, dataset.fingerprint, at_a_time)
    entries += at_a_time  # a bias
    taken = 0 if p.mask else draws * (longest + 1)  # without the mask a row is taken once for each draw
    item = np.dtype(row_type(dataset)).itemsize
    needs = {
        "copies of rows": item * dataset.Y_rows().nnz + 32 * k,
        "draws": draws * _DRAW_BYTES + 8 * (AHEAD + 2) * labels,
        "rows of batches": (AHEAD + 1) * _ROW_ENTRY * entries + _ENTRY_BYTES * entries + 2 * _ROW_ENTRY * taken,
        "held-out rows": 16 * HELD_OUT + 9 * min(RANGE, n) + LEARNED_BYTES,
        "numbers of classes": 40 * k,
        "windows": _FIXED + 2 * _MODEL_ENTRY * ENTRIES * threads + 8 * dataset.Y_columns().beyond(BLOCK),
    }
    if p.variant == "lsh":
        rank = min(p.rank, dataset.n_features, n)
        needs |= {
            "W": k * (4 * rank + 9), "codes": SimpleLSH.bytes_of(k, rank, threads, p.bits),
            "rows of batches": (AHEAD + 3) * 4 * rank * at_a_time, "scores": DenseExact.bytes_of(threads),
        }  # fmt: skip
        return needs
    if p.oracle == "sw-graph":
        needs["graph"] = SmallWorld.bytes_of(k, dataset.n_features + p.bias, threads, p.degree)
    # held-out rows are scored by all classes in any case
    needs["scores"] = Exact.bytes_of(dataset.n_features + p.bias, entries, threads)
    return needs


def scored_together(p: MEMOIRParameters) -> int:
    """Held-out rows: no more than the memory of a batch holds."""
    return max(_LEAST_SCORED, min(_MOST_SCORED, p.draws))


def most_vectors(dataset: Dataset, p: MEMOIRParameters) -> int:
    """Bytes that sparse vectors come to at most: a draw adds its row to two, and none has more entries than features."""
    passes = p.most_steps * p.draws / max(dataset.n_samples, 1)
    return int(ENTRY_BYTES * min(2 * passes * dataset.X_rows().nnz, dataset.n_labels * (dataset.n_features + 1)))


def plan_steps(plan: MemoryPlan, dataset: Dataset, p: MEMOIRParameters) -> StepsPlan:
    """Give what is left to the vectors.

    Raises MemoryLimitError where that is less than they come to, as far as this is foreseen.
    """
    threads = plan.threads
    needs = steps_needs(dataset, p, threads)
    least = 0 if p.variant == "lsh" else min(most_vectors(dataset, p), _FORESEEN) + CLASS_BYTES * dataset.n_labels
    plan.refuse_unless({**needs, "vectors": least}, "MEMOIR")
    return StepsPlan(needs.get("W", 0) + plan.budget - sum(needs.values()), threads)
