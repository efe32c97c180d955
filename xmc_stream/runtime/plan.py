"""Cutting work to the memory limit and to some seconds: how large a block, a batch, a tile cache may be, how long a job.

Plans decide where work is cut and never what comes out of it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import MemoryLimitError
from xmc_stream.system.memory import MemoryLimit, grown, least_limit

MIB = 2**20
_MANY_THREADS = 4  # of a process: from so many on, jobs that get and give back their memory make each other wait
# that a job works before it leaves what it has done: of the clock, or of the processor in all threads. A stop costs no more
SECONDS = 10.0


@dataclass(frozen=True)
class Cuts:
    """Upper bounds that only tests and warm-ups set, to cut small data into many pieces; 0 for none.

    classes, rows: of a block. solve_rows: active rows of a batch of classes that are solved together. interval: rows of
    an interval of a search job. shares: that units are solved in, together.
    """

    classes: int = 0
    rows: int = 0
    solve_rows: int = 0
    interval: int = 0
    shares: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """What the jobs of a run may hold in one process.

    limit: the memory limit, for messages. budget: bytes for all threads of the process together. processes: how many
    work beside each other. cuts: see Cuts. parts: trainings beside each other that share a process; budget is of one of them.
    process: bytes that a process held before it was planned. longest: bytes of a line of X or Y that has most.
    """

    limit: int
    budget: int
    threads: int
    processes: int = 1
    cuts: Cuts = Cuts()
    parts: int = 1
    process: int = 0
    longest: int = 0

    def under(self, limit: int) -> MemoryPlan:
        """The plan that another limit would give, when it is given to this process or another one like it."""
        budget = MemoryLimit(limit).budget(grown(self.process)) // self.parts
        return replace(self, limit=limit, budget=budget)

    @property
    def per_thread(self) -> int:
        """Bytes for what one job holds by itself."""
        return self.budget // self.threads

    @property
    def job_seconds(self) -> float:
        """Of a job, about: a stop loses what the jobs of all threads were doing, and a thread may wait for another's."""
        return SECONDS / (self.threads * self.processes)

    @property
    def row_block_bytes(self) -> int:
        """Of X in a row block, Y or the results apart."""
        return max(self.longest, min(32 * MIB, max(MIB // 2, self.per_thread // 16)))

    def keeps_freed(self, needs: Mapping[str, int]) -> bool:
        """Whether what jobs free may stay in memory for the next ones: there is room for twice the needs, at their largest."""
        return self.threads >= _MANY_THREADS and self.processes == 1 and 2 * sum(needs.values()) <= self.budget

    def refuse_unless(self, needs: dict[str, int], what: str) -> None:
        """Raise MemoryLimitError when the components do not fit the budget."""
        MemoryLimit(self.limit).check(needs, what, self.budget)


class Forecaster(ABC):
    """What some work would do under a memory plan, said before it is begun."""

    @abstractmethod
    def check(self, plan: MemoryPlan) -> None:
        """Raises MemoryLimitError where the plan cannot work."""

    def reads_least(self, plan: MemoryPlan) -> bool:
        """Whether more memory would save no pass over the data. Called where the plan works."""
        return True

    @abstractmethod
    def forecast(self, plan: MemoryPlan) -> dict[str, Any]:
        """passes, bytes_read, seconds, peak_phase, peak_parts (bytes by component, beside the bare process), and more.

        disk_bytes: that the work folder takes, where a method foresees it.

        Keys are those of `plan --json`. Raises MemoryLimitError.
        """


Needs = Callable[[MemoryPlan], dict[str, int]]  # bytes by component


@dataclass(frozen=True)
class Together(Forecaster):
    """Some work, and steps before or after it. steps: what each needs, by what it is called."""

    work: Forecaster
    steps: Mapping[str, Needs]

    def check(self, plan: MemoryPlan) -> None:
        """Whether all of it fits."""
        self.work.check(plan)
        for what, needs in self.steps.items():
            plan.refuse_unless(needs(plan), what)

    def reads_least(self, plan: MemoryPlan) -> bool:
        """As the work."""
        return self.work.reads_least(plan)

    def forecast(self, plan: MemoryPlan) -> dict[str, Any]:
        """As the work, with the step that needs most where that is more."""
        self.check(plan)
        foreseen = self.work.forecast(plan)
        for what, needs in self.steps.items():
            parts = needs(plan)
            if sum(parts.values()) > sum(foreseen["peak_parts"].values()):
                foreseen |= {"peak_phase": what, "peak_parts": parts}
        return foreseen


Forecasters = Callable[
    [MemoryPlan], Forecaster
]  # foresees, by what a probe within the plan says. Raises MemoryLimitError


def least_that_works(forecasters: Forecasters, plan: MemoryPlan, forecaster: Forecaster | None = None) -> int | None:
    """The least limit under which some work fits, by what is foreseen under that very limit; None where none does.

    forecaster: one for some other limit, if there is one.
    """

    def fits(size: int) -> bool:
        nonlocal forecaster
        there = plan.under(size)
        try:
            forecaster = forecaster or forecasters(there)
            forecaster.check(there)
        except MemoryLimitError:
            return False
        return True

    least = least_limit(fits)
    while least is not None:
        forecaster = None
        if fits(least):
            break
        least = least_limit(fits, least)
    return least


@contextmanager
def least_named(forecasters: Forecasters, plan: MemoryPlan) -> Iterator[None]:
    """A block whose refusals name the least limit that works."""
    try:
        yield
    except MemoryLimitError as error:
        raise MemoryLimitError(error.args[0], least_that_works(forecasters, plan)) from None


def refuse_unless_it_fits(forecaster: Forecaster, plan: MemoryPlan) -> None:
    """Raise MemoryLimitError, which names the least limit that works."""
    with least_named(lambda _: forecaster, plan):
        forecaster.check(plan)


_OWN = 8  # times what each job does over again
_BEGINNING = 1 << 20  # multiply-adds, about, that take as long as to begin a job


def jobs_worth(at_once: int, work: float, again: float) -> int:
    """A job a thread, but no more than the work is worth: multiply-adds in all, and what each job reads or does again."""
    return max(1, min(at_once, int(work / (_OWN * (again + _BEGINNING)))))


def even_ranges(n: int, parts: int) -> list[tuple[int, int]]:
    """0 .. n in `parts` ranges of nearly equal length, without empty ones."""
    parts = max(1, min(parts, n))
    return [(n * p // parts, n * (p + 1) // parts) for p in range(parts)]


def fitting_ranges(sizes: NDArray[np.int64] | Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """0 .. n in ranges, each as long as its sizes are at most so much together, or one long."""
    ends, first = np.cumsum(sizes), 0
    while first < len(sizes):
        before = ends[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + most, side="right")))
        yield first, last
        first = last


class Portion:
    """A share of a long piece of work that may end anywhere: a job, or a loop of jobs, asks after each bit whether to end.

    Made when the first bit begins: what is read before is not a bit. Seconds are those of the clock or, where they are more,
    of the processor in the whole process: jobs beside each other take SECONDS together, and so does a loop whose jobs are
    done by many threads; jobs on dask workers count by the clock alone.
    """

    def __init__(self) -> None:
        self._began = time.monotonic(), time.process_time()
        self._last = self._longest = 0.0

    def done(self) -> bool:
        """Whether another bit, as long as the longest so far, would take longer than a job should."""
        now = max(time.monotonic() - self._began[0], time.process_time() - self._began[1])
        self._longest, self._last = max(self._longest, now - self._last), now
        return now + self._longest > SECONDS
