"""LEML's plan: columns of a job, W steps by columns or by rows, what may stay in memory.

A plan decides where work is cut, never what comes out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from xmc_stream.factors.factors import LINES, ColumnRange
from xmc_stream.factors.products import BLOCK, LEAST_COLUMNS, column_ranges, job_width
from xmc_stream.factors.rowblocks import LARGE_ROW_BYTES, ROW_BYTES, Parts, held_bytes, lines_of, range_bits
from xmc_stream.kernels.lines import CACHE_LINE, lanes
from xmc_stream.lowrank.parameters import LEMLParameters
from xmc_stream.lowrank.ridge import RidgeJob, Ridges, row_parts
from xmc_stream.runtime.plan import MIB, MemoryPlan, even_ranges, jobs_worth
from xmc_stream.store.dataset import Dataset

# of what is left of a plan, that rows may take which jobs by rows leave in memory: near its limit a run waits
_HELD = 0.75
_LABELS = 128  # that the H step solves for at a time where all pairs count: fixed, as `BLOCK` is
_VECTORS = 8  # of D x r, in a W step over pairs: w, the next one, g, s, residual, direction, image, one on the way
_SOLVED = 1 << 36  # multiply-adds of a job that solves for labels of given pairs: some seven seconds
_SMALL = 1 << 28  # multiply-adds of a product, up to which sharing it out takes longer than doing it


@dataclass(frozen=True)
class LowRankPlan:
    """How a training is cut into jobs, and what it keeps in memory.

    col_ranges: of columns, a job each; rows, labels: of a job over pairs; small: whether a W step is one job. parts: of the
    rows, which sums over all pairs are taken in; products: see `solve_ridges`; row_bytes: of X in a row block of a W step;
    held: bytes of a part, and of a process, see `Holding`.
    """

    col_ranges: tuple[ColumnRange, ...]
    rows: Parts
    labels: tuple[tuple[int, int], ...]
    small: bool
    parts: Parts
    products: tuple[ColumnRange, ...]
    row_bytes: int = ROW_BYTES
    held: tuple[int, int] = (0, 0)

    def ridges(self, whole: Ridges, name: str, p: LEMLParameters, out: Path) -> list[RidgeJob]:
        """The jobs of a W step."""
        return [
            RidgeJob(
                replace(whole, cols=cols, values=whole.values[slice(*cols)]), name, p.cg, p.cg_tol,
                str(out / f"{cols[0]}-{cols[1]}"),
            )
            for cols in self.col_ranges
        ]  # fmt: skip

    @property
    def widest(self) -> tuple[int, int, int]:
        """Columns of a job at most, and of one by rows; bytes of a row block."""
        return _widest(self.col_ranges), _widest(self.products), self.row_bytes


def _widest(col_ranges: Sequence[ColumnRange]) -> int:
    return max((last - first for first, last in col_ranges), default=0)


def lowrank_needs(
    plan: MemoryPlan, dataset: Dataset, p: LEMLParameters, columns: int, by_rows: int = 0, row_bytes: int = ROW_BYTES
) -> dict[str, int]:
    """Bytes by component where a job has so many columns.

    by_rows: columns of one that has a part of the rows. row_bytes: of X in a row block of a W step. "rows" is what is left
    for blocks that stay in memory.
    """
    d, k, r, t, width = dataset.n_features + 1, dataset.n_labels, p.rank, plan.threads, lanes(columns)
    wide, parts = lanes(by_rows) if by_rows else 0, len(row_parts(dataset))
    of_columns = t if p.direct else min(t, -(-r // columns))  # jobs beside each other; of X^T X there are more
    of_rows = min(t, parts * -(-r // by_rows)) if by_rows else 0
    beside, widest = max(of_columns, of_rows), max(width, wide)
    needs = {
        "row blocks": beside
        * (dataset.Y_rows().block_bytes(ROW_BYTES) + _row_block(dataset, widest, row_bytes) + 2 * MIB),
        "systems of equations": 6 * 8 * r * r + t * (8 * r * r + 16 * BLOCK * r) + 32 * LINES * r,
        "writers": beside * 8 * MIB,
    }
    if p.lam is None:
        needs["scale of lam"] = 24 * d + 64 * k
    if p.closed:
        lines = max(2 * of_rows * wide, of_columns * width) if by_rows else of_columns * (4 + (parts > 1)) * width
        needs |= {"columns of W": 4 * d * lines, "columns of H": 4 * k * max(of_columns * width, of_rows * wide)}
        if p.direct:
            needs["normal equations"] = _normal_bytes(d, r)
            needs["columns of H"] *= 3
    else:
        given = p.observed == "given"
        needs |= {
            "vectors of W": 4 * _VECTORS * d * r,
            "columns of W": of_columns * 4 * d * width,
            "H": t * 4 * k * r if given else t * 4 * BLOCK * r,
            "pairs": t
            * (8 * dataset.observed_rows().block_bytes(ROW_BYTES) if given else 40 * BLOCK * BLOCK + 16 * BLOCK * r),
        }
    left = plan.budget - sum(needs.values())
    if p.closed and range_bits(dataset.n_features):  # larger row blocks come first
        left -= beside * (_row_block(dataset, widest, LARGE_ROW_BYTES) - _row_block(dataset, widest, row_bytes))
    return {**needs, "rows": max(0, min(held_bytes(dataset), int(_HELD * left)))}


def _normal_bytes(n_inputs: int, columns: int) -> int:
    """What solving takes, of so many columns: X^T X, its factor, and what is added; right sides and solutions."""
    return 8 * (4 * n_inputs**2 + 3 * n_inputs * columns)


def _row_block(dataset: Dataset, width: int, row_bytes: int) -> int:
    """Bytes of a row block of X, of the same by ranges of features, and of lines of a dense matrix for it."""
    X = dataset.X_rows()
    block_bytes = X.block_bytes(row_bytes)
    return block_bytes + 8 * block_bytes // X.entry_bytes + 3 * 4 * lines_of(row_bytes) * width


def _row_bytes(plan: MemoryPlan, dataset: Dataset, width: int, needs: dict[str, int]) -> int:
    """Of X in a row block of a W step: more than ROW_BYTES where X has many features and the plan leaves room."""
    if not range_bits(dataset.n_features):
        return ROW_BYTES
    each = (plan.budget - sum(needs.values())) // plan.threads
    more = each * ROW_BYTES // _row_block(dataset, width, ROW_BYTES)
    return min(LARGE_ROW_BYTES, ROW_BYTES + max(0, more))


def plan_lowrank(plan: MemoryPlan, dataset: Dataset, p: LEMLParameters) -> LowRankPlan:
    """Cut the columns into few ranges: see `_width`. Raises MemoryLimitError where not even single columns fit."""
    r, at_once, kept = p.rank, plan.threads * plan.processes, held_bytes(dataset)
    width = _width(plan, dataset, p, kept)
    if (n_ranges := -(-r // width)) > at_once:  # none waits for the last
        width = -(-r // (-(-n_ranges // at_once) * at_once))
    n, k = dataset.n_samples, dataset.n_labels
    n_blocks, pairs = -(-n // BLOCK), dataset.observed_rows().nnz if p.observed == "given" else n * k
    labels = tuple((first, min(first + _LABELS, k)) for first in range(0, k, _LABELS))
    if p.observed == "given":  # each reads A
        labels = _given_labels(plan, dataset, jobs_worth(4 * at_once, pairs * r, n * r), r)
    rows = tuple((a * BLOCK, min(b * BLOCK, n)) for a, b in even_ranges(n_blocks, 4 * at_once))
    small = (2 * dataset.X_rows().nnz + 2 * pairs) * r <= _SMALL
    small = small and sum(lowrank_needs(plan, dataset, p, r).values()) <= plan.budget
    col_ranges = column_ranges(r, r if small and not p.closed else width)
    width, of_rows = _widest(col_ranges), row_parts(dataset)
    products = _products(plan, dataset, p, col_ranges, kept) if p.closed else ()
    wide = _widest(products)
    needs = lowrank_needs(plan, dataset, p, width, wide)
    row_bytes = _row_bytes(plan, dataset, lanes(max(width, wide)), needs) if p.closed else ROW_BYTES
    room, parts = needs["rows"], len(of_rows)
    held = room if room == kept else room // (-(-parts // plan.processes) if products else parts), room
    return LowRankPlan(col_ranges, rows, labels, small, of_rows, products, row_bytes, held)


def _width(plan: MemoryPlan, dataset: Dataset, p: LEMLParameters, kept: int) -> int:
    """Columns of a job, at most.

    Jobs share the rows that stay in memory. Where all do, there is a job a thread, as far as jobs have LEAST_COLUMNS. Where
    not, each job reads X anew: there are as few as fit, and one a process. kept: bytes of all rows.
    """
    r, needs = p.rank, {}
    most = max(1, min(plan.threads * plan.processes, r // LEAST_COLUMNS))
    few = min(plan.processes, most)
    wide = [job_width(r, n) for n in range(few, most + 1)]
    narrow = [w for w in (*range(wide[-1] // CACHE_LINE * CACHE_LINE, 0, -CACHE_LINE), 8, 4, 2, 1) if w < wide[-1]]
    for widths, all_stay in ((wide[::-1], True), ([*wide, *narrow], False)):
        for width in widths:
            if width not in needs:
                needs[width] = lowrank_needs(plan, dataset, p, width)
            if sum(needs[width].values()) <= plan.budget and (needs[width]["rows"] == kept or not all_stay):
                return width
    least = min(needs, key=lambda width: sum(needs[width].values()))
    plan.refuse_unless(needs[least], f"LEML of rank {r} on {plan.threads} threads")
    return least


def _products(
    plan: MemoryPlan, dataset: Dataset, p: LEMLParameters, col_ranges: Sequence[ColumnRange], kept: int
) -> tuple[ColumnRange, ...]:
    """Columns of a job of a W step's product by rows (see `solve_ridges`): all of them, or where all rows stay in memory, as

    few ranges as leave no thread without a job. None where the step is better done by columns: on one thread, on small data.
    """
    at_once, parts = plan.threads * plan.processes, len(row_parts(dataset))
    if parts == 1 or at_once == 1:
        return ()
    for n in (-(-at_once // parts), 1):
        runs = even_ranges(len(col_ranges), n)
        products = tuple((col_ranges[first][0], col_ranges[last - 1][1]) for first, last in runs)
        needs = lowrank_needs(plan, dataset, p, _widest(col_ranges), _widest(products))
        if sum(needs.values()) <= plan.budget and (needs["rows"] == kept or n == 1):
            return products
    return ()


def _given_labels(plan: MemoryPlan, dataset: Dataset, parts: int, r: int) -> tuple[tuple[int, int], ...]:
    """Ranges of labels whose given pairs take an eighth of a thread's memory at most, some seconds, and a part of all."""
    mask = dataset.observed_columns()
    ends = mask.ends(0, mask.n_lines)
    most = max(1, min(plan.per_thread // 8 // 32, _SOLVED // (r * r), mask.nnz // parts))
    col_ranges, first = [], 0
    while first < dataset.n_labels:
        last = int(ends.searchsorted(ends[first] + most, side="right")) - 1
        last = min(max(last, first + 1), dataset.n_labels)
        col_ranges.append((first, last))
        first = last
    return tuple(col_ranges)
