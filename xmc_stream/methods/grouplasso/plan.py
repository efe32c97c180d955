"""Cutting the jobs of the group lasso to the memory limit."""

from __future__ import annotations

from dataclasses import dataclass

from xmc_stream.jobs.plan import MIB, MemoryPlan
from xmc_stream.kernels.lines import lanes
from xmc_stream.kernels.margins import LANES
from xmc_stream.methods.grouplasso.parameters import GroupLassoParameters
from xmc_stream.store.dataset import Dataset

LEAST_ENTRIES = 1 << 16  # of X in memory
_FEATURE_BYTES = 64  # flags, counts, orders and their sums
_FIXED = 12 * MIB  # windows, buffers of writers
_ENTRY_BYTES = 4 + 12  # beside the entry: checks, numbers of rows where the array is in a file


def width_of(n_labels: int) -> int:
    """Values of a line of W and of the array: whole cache lines."""
    return max(LANES, lanes(n_labels))


@dataclass(frozen=True)
class DescentPlan:
    """What a job of block coordinate descent may hold. entries: of X; window: lines of the array at a time, 0 for all of it

    in memory; weights: whether W is in memory.
    """

    entries: int
    window: int
    weights: bool


def descent_needs(dataset: Dataset, p: GroupLassoParameters) -> dict[str, int]:
    """Bytes by component of what is always in memory."""
    n, d = dataset.n_samples, dataset.n_features
    return {
        "labels": 8 * (n + 1) + 8 * dataset.Y_rows().nnz + 4 * n,
        "features": _FEATURE_BYTES * d,
        "rows met": 5 * n,
        "windows and writers": _FIXED,
    }


def parts_of(dataset: Dataset, p: GroupLassoParameters, sizes: DescentPlan) -> dict[str, int]:
    """Bytes by component of a plan."""
    width = width_of(dataset.n_labels)
    lines = sizes.window or dataset.n_samples
    entry = dataset.X_rows().entry_bytes + _ENTRY_BYTES
    return {
        **descent_needs(dataset, p),
        "N x K array" + (", a window" if sizes.window else ""): 4 * width * lines * (2 if sizes.window else 1),
        "W" + ("" if sizes.weights else ", a window"): 4 * width * (dataset.n_features if sizes.weights else _columns(sizes)),
        "entries of X": entry * sizes.entries,
    }


def _columns(sizes: DescentPlan) -> int:
    """Columns of a batch, at most, whose rows of W are copied."""
    return 2 * min(sizes.entries, 1 << 16)


def plan_descent(plan: MemoryPlan, dataset: Dataset, p: GroupLassoParameters) -> DescentPlan:
    """Take the array, then W, into memory where they fit, and as much of X as the rest holds.

    Raises MemoryLimitError where not even windows fit.
    """
    X, n, d = dataset.X_rows(), dataset.n_samples, dataset.n_features
    nnz = max(X.nnz, 1)
    line, least = 4 * width_of(dataset.n_labels), min(LEAST_ENTRIES, nnz)
    window = min(n, LEAST_ENTRIES, max(1, plan.budget // 8 // (2 * line)))
    smallest = DescentPlan(min(least, max(1, plan.budget // 16 // (2 * line))), window, False)
    plan.refuse_unless(parts_of(dataset, p, smallest), "the group lasso")

    def fits(sizes: DescentPlan) -> bool:
        return sum(parts_of(dataset, p, sizes).values()) <= plan.budget

    best = smallest
    for sizes in (DescentPlan(least, 0, True), DescentPlan(least, 0, False), DescentPlan(least, window, True)):
        if fits(sizes):
            best = sizes
            break
    left = plan.budget - sum(parts_of(dataset, p, best).values())
    if best.window:  # half of what is left for more lines of the array
        more = min(n - best.window, left // 2 // (2 * line))
        best = DescentPlan(best.entries, best.window + more, best.weights)
        left -= more * 2 * line
    entry = X.entry_bytes + _ENTRY_BYTES + (0 if best.weights else 0)
    return DescentPlan(min(nnz, best.entries + left // (2 * entry)), best.window, best.weights)
