"""Cutting work to the memory limit: how large a block, a batch, a tile cache may be, before anything is allocated.

Plans decide where work is cut and never what comes out of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from xmc_stream.memory import MemoryLimit

MIB = 2**20
ROW_BYTES = 80  # of an active row in a solve: its number, place, sign, alpha before and after, score, order, square
_WINDOWS = 4 * MIB  # what reading indptr and a gather's staging take, per thread


@dataclass(frozen=True)
class Cuts:
    """Upper bounds that only tests set, to cut small data into many pieces; 0 for none.

    classes, rows: of a block. solve_rows: active rows of a batch of classes that are solved together.
    """

    classes: int = 0
    rows: int = 0
    solve_rows: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """What the jobs of a run may hold in one process.

    limit: the memory limit, for messages. budget: bytes for all threads of the process together. processes: how many
    work beside each other. cuts: see Cuts.
    """

    limit: int
    budget: int
    threads: int
    processes: int = 1
    cuts: Cuts = Cuts()

    @property
    def per_thread(self) -> int:
        """Bytes for what one job holds by itself."""
        return self.budget // self.threads

    @property
    def row_block_bytes(self) -> int:
        """Of X in a row block of a search or a prediction, Y or the results apart."""
        return min(32 * MIB, max(MIB // 2, self.per_thread // 8))

    def refuse_unless(self, needs: dict[str, int], what: str) -> None:
        """Raise MemoryLimitError when the components do not fit the budget."""
        MemoryLimit(self.limit).check(needs, what, self.budget)


@dataclass(frozen=True)
class SolvePlan:
    """What a solve job may hold: active rows of a batch of classes, entries gathered for it, rows of one large class."""

    max_rows: int
    max_nnz: int
    max_class_rows: int


def plan_solve(plan: MemoryPlan, n_samples: int, n_features: int, writer_bytes: int) -> SolvePlan:
    """Share a thread's memory between rows and entries. Raises MemoryLimitError when too little is left for either."""
    fixed = {
        "features": plan.threads * (36 * n_features + 8 * MIB),  # scratch, weights, their counts
        "marks of rows": plan.threads * (n_samples // 8 + n_samples // 16),
        "writers and windows": plan.threads * (writer_bytes + _WINDOWS),
    }
    plan.refuse_unless({**fixed, "rows": plan.threads * 8 * MIB}, f"solving on {plan.threads} threads")
    left = (plan.budget - sum(fixed.values())) // plan.threads
    max_rows = left // 4 // ROW_BYTES
    return SolvePlan(min(max_rows, plan.cuts.solve_rows or max_rows), left // 2 // 16, max_rows)


@dataclass(frozen=True)
class UnitSize:
    """Exact sizes of what a search needs of one unit: its tile, places in heaps, active rows, weights."""

    unit: int
    tile: int
    heap_rows: int
    active_rows: int
    weights: int


def search_needs(plan: MemoryPlan, units: list[UnitSize], n_features: int, unit_classes: int) -> dict[str, int]:
    """Bytes by component that a search of these units takes in one process."""
    t = plan.threads
    return {
        "tiles": sum(unit.tile for unit in units),
        "heaps": t * 8 * sum(unit.heap_rows for unit in units),
        "active sets": t * 4 * sum(unit.active_rows for unit in units),
        "classes": t * 120 * unit_classes * len(units),
        "making tiles": t * (8 * max((unit.weights for unit in units), default=0) + 4 * n_features),
        "row blocks": t * (2 * plan.row_block_bytes + _WINDOWS),
    }


def class_blocks(
    plan: MemoryPlan, units: list[UnitSize], n_features: int, unit_classes: int
) -> list[list[UnitSize]]:
    """Runs of units, each as long as the budget allows. Raises MemoryLimitError for a unit that does not fit alone."""
    blocks: list[list[UnitSize]] = []
    for unit in units:
        plan.refuse_unless(
            search_needs(plan, [unit], n_features, unit_classes),
            f"the search for unit {unit.unit} on {plan.threads} threads",
        )
        if blocks and sum(search_needs(plan, [*blocks[-1], unit], n_features, unit_classes).values()) <= plan.budget:
            blocks[-1].append(unit)
        else:
            blocks.append([unit])
    return blocks


def even_ranges(n: int, parts: int) -> list[tuple[int, int]]:
    """0 .. n in `parts` runs of nearly equal length, without empty ones."""
    parts = max(1, min(parts, n))
    return [(n * p // parts, n * (p + 1) // parts) for p in range(parts)]
