"""Cutting the jobs of the group lasso to the memory limit."""

from __future__ import annotations

from dataclasses import dataclass

from xmc_stream.grouplasso.kernels.margins import LANES
from xmc_stream.grouplasso.parameters import GroupLassoParameters
from xmc_stream.grouplasso.solver import MOST_VALUES, SWEEPS_BYTES
from xmc_stream.kernels.lines import lanes
from xmc_stream.runtime.plan import MIB, MemoryPlan, even_ranges, jobs_worth
from xmc_stream.store.dataset import Dataset

LEAST_ENTRIES = 1 << 16  # of X in memory
_FEATURE_BYTES = 64  # flags, counts, orders and their sums
_RUN_BYTES = MIB  # of a matrix's lines whose sums are made by themselves
_MOST_RUNS = 1024
_WINDOW = 3 * MIB // 4  # float32 of rows of W: of a batch, what it is made of, and staging
_SIGMA_BLOCKS = 6  # times a row block, that measuring the singular value makes of it
_SMALL = 1 << 28  # of a step, up to which sharing it out takes longer than doing it
_TEAM_ENTRIES = 8  # of a column, that each thread of a job needs, or it looks for them longer than it adds them up
_FIXED = 16 * MIB  # windows, buffers of writers
_ENTRY_BYTES = 4 + 12  # beside the entry: checks, numbers of rows where the array is in a file
_LINE_BYTES, _LABEL_BYTES = 80, 32  # beside a line of the array in a window: its row and labels, and how they are found


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

    @property
    def batch(self) -> int:
        """Entries of a batch of columns: no more than the window has lines."""
        return min(self.entries, self.window or self.entries)


def window_line(dataset: Dataset) -> int:
    """Bytes that a line of the array takes in a window."""
    labels = dataset.Y_rows().nnz / max(dataset.n_samples, 1)
    return 4 * width_of(dataset.n_labels) + _LINE_BYTES + int(_LABEL_BYTES * labels)


def parts_of(dataset: Dataset, p: GroupLassoParameters, sizes: DescentPlan) -> dict[str, int]:
    """Bytes by component of a plan."""
    width, n, d = width_of(dataset.n_labels), dataset.n_samples, dataset.n_features
    array = window_line(dataset) * sizes.window if sizes.window else 4 * width * n
    entry = dataset.X_rows().entry_bytes + _ENTRY_BYTES
    return {
        "labels": 8 * (n + 1) + 8 * dataset.Y_rows().nnz + 4 * n,
        "features": _FEATURE_BYTES * d,
        "rows met": 5 * n,
        "windows and writers": _FIXED,
        "extrapolation": min(SWEEPS_BYTES, SWEEPS_BYTES // MOST_VALUES * width * d) * p.extrapolates,
        "N x K array" + (", a window" if sizes.window else ""): array,
        "W" + ("" if sizes.weights else ", a window"): 4 * width * (d if sizes.weights else _WINDOW // width),
        "entries of X": entry * sizes.entries,
    }


def plan_descent(plan: MemoryPlan, dataset: Dataset, p: GroupLassoParameters) -> DescentPlan:
    """Take the array, then W, into memory where they fit, and as much of X as the rest holds.

    Raises MemoryLimitError where not even windows fit.
    """
    X, n = dataset.X_rows(), dataset.n_samples
    nnz = max(X.nnz, 1)
    line, least = window_line(dataset), min(LEAST_ENTRIES, nnz)
    window = min(n, LEAST_ENTRIES, max(1, plan.budget // 8 // line))
    smallest = DescentPlan(min(least, window), window, False)
    plan.refuse_unless(parts_of(dataset, p, smallest), "the group lasso")

    def total(sizes: DescentPlan) -> int:
        return sum(parts_of(dataset, p, sizes).values())

    wished = DescentPlan(least, 0, True), DescentPlan(least, 0, False), DescentPlan(least, window, True)
    best = next((sizes for sizes in wished if total(sizes) <= plan.budget), smallest)
    left = plan.budget - total(best)
    entry = X.entry_bytes + _ENTRY_BYTES
    if best.window:  # a batch of columns has no more entries than the window has lines
        window = min(n, best.window + left // (line + entry))
        return DescentPlan(min(nnz, max(best.entries, window)), window, best.weights)
    return DescentPlan(min(nnz, best.entries + left // (2 * entry)), 0, best.weights)


@dataclass(frozen=True)
class GradientPlan:
    """What a job of a full-gradient algorithm may hold. entries: of X; rows: lines of the array; columns: rows of W at a time.

    row_cuts, feature_cuts: of the jobs of a phase. team: threads of a job that has rows.
    """

    entries: int
    rows: int
    columns: int
    row_cuts: tuple[tuple[int, int], ...]
    feature_cuts: tuple[tuple[int, int], ...]
    team: int = 1


def step_work(dataset: Dataset) -> int:
    """Multiply-adds of a product with X."""
    return max(1, dataset.X_rows().nnz * width_of(dataset.n_labels))


def is_small(dataset: Dataset) -> bool:
    """Whether a step is one job."""
    return step_work(dataset) <= _SMALL


def row_run(dataset: Dataset) -> int:
    """Rows whose losses are summed by themselves: this depends on the data alone."""
    return max(64, _RUN_BYTES // (4 * width_of(dataset.n_labels)), -(-dataset.n_samples // _MOST_RUNS))


def feature_run(dataset: Dataset) -> int:
    """Features whose sums are made by themselves."""
    return max(16, _RUN_BYTES // (4 * width_of(dataset.n_labels)), -(-dataset.n_features // _MOST_RUNS))


def gradient_parts(dataset: Dataset, sizes: GradientPlan, threads: int) -> dict[str, int]:
    """Bytes by component of all threads."""
    width, n_rows = width_of(dataset.n_labels), min(sizes.rows, dataset.n_samples)
    labels = dataset.Y_rows().nnz / max(dataset.n_samples, 1)
    return {
        "features": threads * 48 * dataset.n_features,
        "lines of the array": threads * int(n_rows * (4 * width + 16 + 24 * labels)),
        "rows of W": threads * (24 * width * sizes.columns + 56 * width * feature_run(dataset)),
        "entries of X": threads * 28 * sizes.entries,
        "windows": threads * _FIXED,
        "long rows": _SIGMA_BLOCKS * dataset.X_rows().beyond(MIB // 2),
    }


def plan_gradient(plan: MemoryPlan, dataset: Dataset) -> GradientPlan:
    """Cut features into as many jobs as there is work for, and rows into one a process, or more where less fits.

    Scores of any rows need all of X: the threads of a job share what it reads. A gradient needs its own columns of X and the
    whole array. Raises MemoryLimitError where too little fits.
    """
    n, d, small = dataset.n_samples, dataset.n_features, is_small(dataset)
    run, width = row_run(dataset), width_of(dataset.n_labels)
    longest = max(1, int(dataset.feature_counts().max(initial=0)))
    columns = max(1, min(d, 2 * _RUN_BYTES // (4 * width)))
    least = GradientPlan(max(longest, min(LEAST_ENTRIES, dataset.X_rows().nnz)), min(run, n), columns, (), ())
    needs = gradient_parts(dataset, least, plan.threads)
    plan.refuse_unless(needs, f"steps along the gradient on {plan.threads} threads")
    left = (plan.budget - sum(needs.values())) // plan.threads
    line = max(1, needs["lines of the array"] // plan.threads // max(least.rows, 1))
    rows = min(n, least.rows + left // 2 // line // run * run)
    left -= (rows - least.rows) * line
    entries = min(max(dataset.X_rows().nnz, 1), least.entries + max(left, 0) // 2 // 28)
    runs, processes, threads = -(-n // run), 1 if small else plan.processes, 1 if small else plan.threads
    parts, team = -(-n // rows), 1
    if parts <= plan.threads * processes:  # a job has the memory of all threads
        parts, team = processes, max(1, min(threads, dataset.X_rows().nnz // (_TEAM_ENTRIES * max(d, 1))))
    row_cuts = tuple((a * run, min(b * run, n)) for a, b in even_ranges(runs, min(parts, runs)))
    step, jobs = feature_run(dataset), jobs_worth(threads * processes, step_work(dataset), n * width)
    feature_cuts = tuple((a * step, min(b * step, d)) for a, b in even_ranges(-(-d // step), jobs))
    return GradientPlan(entries, rows, columns, row_cuts, feature_cuts, team)
