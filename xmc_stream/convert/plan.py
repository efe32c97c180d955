"""The memory plan of a conversion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from xmc_stream.convert.pieces import WINDOW
from xmc_stream.errors import MemoryLimitError
from xmc_stream.system.memory import MemoryLimit, grown, least_limit, resident

if TYPE_CHECKING:
    from xmc_stream.convert.source import Source

_MAX_TRANSPOSITION = 2**28  # bytes of the buffers that make columns: beyond, more passes cost little
_MIN_TRANSPOSITION = 2**22
_WRITING = 2**20  # bytes of the files that a job writes
_LONGEST = 2**24  # bytes of a row's values, for which there is room at least


@dataclass(frozen=True)
class ConversionPlan:
    """budget: bytes there are; threads: jobs at a time; max_bytes: of the buffers that make columns; needs: bytes by
    component, at most."""

    budget: int
    threads: int
    max_bytes: int
    needs: dict[str, int]

    @property
    def need(self) -> int:
        """Bytes of all components."""
        return sum(self.needs.values())


def plan_memory(source: Source, budget: int, threads: int, fewer: bool = True) -> ConversionPlan:
    """Fit a conversion into a budget. fewer: with as many of the threads as can work, else with all of them.

    Stages follow each other: parts are read to pieces; pieces are put together, array by array; columns are made while
    rows are still written. Sizes that only reading tells count as nothing here: see `plan_writing`.
    """
    while True:
        plan = _plan(source, budget, threads)
        if threads == 1 or not fewer or plan.need <= budget:
            return plan
        threads -= 1


def least_of_conversion(source: Source, limit: MemoryLimit, plan: ConversionPlan, fewer: bool = True) -> int | None:
    """The least limit that works. plan: that of `limit`."""
    process = max(limit.limit - limit.reserve - plan.budget, grown(resident()))

    def works(size: int) -> bool:
        budget = MemoryLimit(size).budget(process)
        return plan_memory(source, budget, plan.threads, fewer).need <= budget

    return least_limit(works)


def refuse_unless_it_fits(source: Source, limit: MemoryLimit, plan: ConversionPlan, fewer: bool = True) -> None:
    """Raise MemoryLimitError, which names the least limit that works."""
    try:
        limit.check(plan.needs, "convert", plan.budget)
    except MemoryLimitError as error:
        raise MemoryLimitError(error.args[0], least_of_conversion(source, limit, plan, fewer)) from None


def _plan(source: Source, budget: int, threads: int) -> ConversionPlan:
    overhead = sum(source.overhead.values())
    readers = 1 if source.alone else threads
    taken = source.fit((budget - overhead) // readers - _WRITING)
    reading = {**source.overhead, "parts of the input": readers * (taken + _WRITING)}
    writing = plan_writing(
        budget, threads, source.n_features or 0, source.n_labels or 0, source.x_entries, source.y_entries
    )
    needs = max(reading, writing.needs, key=lambda stage: sum(stage.values()))
    return ConversionPlan(budget, threads, writing.max_bytes, needs)


def plan_writing(
    budget: int, threads: int, n_features: int, n_labels: int, x_entries: int | None, y_entries: int | None,
    longest: int = _LONGEST, x_columns: bool = False,
) -> ConversionPlan:  # fmt: skip
    """The stages behind the reading.

    x_entries, y_entries: at most, None for many; longest: bytes of the values of the longest row; x_columns: whether X is
    written by columns too.
    """
    window = WINDOW * 16  # lengths, their sums, indices or values, and a copy of them
    counts = {f"counts of {n_features} features and {n_labels} labels": 8 * (n_features + n_labels)}
    row = longest if x_entries is None else min(longest, 4 * x_entries)
    arrays = {"arrays being written": threads * (window + 2 * _WRITING) + row}
    # where each column begins and ends stands in four arrays, each as long as there are columns
    n_columns = max(n_labels, n_features if x_columns else 1)
    columns = {"columns being written": 4 * 8 * n_columns + 4 * _WRITING}
    free = budget - sum(sum(needs.values()) for needs in (counts, arrays, columns))
    max_bytes = max(_MIN_TRANSPOSITION, min(_MAX_TRANSPOSITION, free))
    entries = max_bytes if y_entries is None else min(max_bytes, 16 * y_entries + 2**16)
    return ConversionPlan(budget, threads, max_bytes, {**counts, **arrays, **columns, "labels by columns": entries})
