"""Cutting work to the memory limit: how large a block, a batch, a tile cache may be, before anything is allocated.

Plans decide where work is cut and never what comes out of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from xmc_stream.memory import MemoryLimit

MIB = 2**20


@dataclass(frozen=True)
class Cuts:
    """Upper bounds that only tests set, to cut small data into many pieces; 0 for none.

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
    """

    limit: int
    budget: int
    threads: int
    processes: int = 1
    cuts: Cuts = Cuts()
    parts: int = 1

    @property
    def per_thread(self) -> int:
        """Bytes for what one job holds by itself."""
        return self.budget // self.threads

    @property
    def row_block_bytes(self) -> int:
        """Of X in a row block of a search or a prediction, Y or the results apart."""
        return min(32 * MIB, max(MIB // 2, self.per_thread // 16))

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

        Keys are those of `plan --json`. Raises MemoryLimitError.
        """


def even_ranges(n: int, parts: int) -> list[tuple[int, int]]:
    """0 .. n in `parts` ranges of nearly equal length, without empty ones."""
    parts = max(1, min(parts, n))
    return [(n * p // parts, n * (p + 1) // parts) for p in range(parts)]
