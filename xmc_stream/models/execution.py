"""How work is done: memory, threads, a cluster. None of it changes a result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xmc_stream.errors import InputError
from xmc_stream.memory import MemoryLimit, available_threads, return_freed_memory

if TYPE_CHECKING:
    from xmc_stream.engine.runner import Engine
    from xmc_stream.jobs.job import Job
    from xmc_stream.jobs.plan import Cuts, MemoryPlan


@dataclass(frozen=True)
class Execution:
    """How work is done, none of which changes its results.

    memory_limit: of the process, or of each worker of a cluster; None for three quarters of what is free. threads: of
    this process, None for all processors. scheduler: a dask client or address, None for this process. progress: bars on
    a terminal. cuts: smaller blocks, for tests.
    """

    memory_limit: str | int | None = None
    threads: int | None = None
    scheduler: Any = None
    progress: bool = False
    cuts: Cuts | None = None

    def limit(self) -> MemoryLimit:
        """The memory limit in bytes. Raises InputError for a size that is none, and for threads below one."""
        if self.threads is not None and self.threads < 1:
            raise InputError(f"threads must be 1 or more. Got {self.threads}.")
        return_freed_memory()
        return MemoryLimit.of(self.memory_limit)


def memory_plan(engine: Engine, limit: MemoryLimit, held: int, cuts: Cuts | None = None) -> MemoryPlan:
    """What jobs may hold when libraries and kernels hold so many bytes."""
    from xmc_stream.jobs.plan import Cuts, MemoryPlan

    return MemoryPlan(limit.limit, limit.beside(held), engine.threads, engine.processes, cuts or Cuts())


@contextmanager
def planned(execution: Execution, limit: MemoryLimit, warm: Job) -> Iterator[tuple[Engine, MemoryPlan]]:
    """An engine whose processes have loaded what `warm` loads, and the plan of the memory that is left."""
    from xmc_stream.engine.runner import Engine

    threads = execution.threads or available_threads()
    with Engine(limit, threads, execution.scheduler, None, execution.progress) as engine:
        yield engine, memory_plan(engine, limit, engine.warm(warm), execution.cuts)
