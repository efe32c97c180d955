"""How work is done: memory, threads, a cluster. None of it changes a result."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xmc_stream.errors import InputError, renaming
from xmc_stream.store.remote import is_mirrored
from xmc_stream.system.memory import MemoryLimit, available_threads
from xmc_stream.system.progress import current

if TYPE_CHECKING:
    from xmc_stream.runtime.engine import Engine
    from xmc_stream.runtime.job import Job, Loop
    from xmc_stream.runtime.plan import Cuts, MemoryPlan


class Part(NamedTuple):
    """What a training beside others has of a process. of: so many share one; resident: bytes that it held before."""

    of: int
    resident: int


@dataclass(frozen=True)
class Execution:
    """How work is done: memory, threads, a cluster. None of it changes a result.

    Parameters
    ----------
    memory_limit : str, int or None, default None
        Peak resident memory of the process, as "4GB" or in bytes. On a cluster: of each worker. None: what it holds,
        and three quarters of what is free.
    threads : int or None, default None
        Threads of this process, from 1 on. None: as many as it has processors.
    scheduler : dask client, str or None, default None
        A client of dask.distributed, or the address of a scheduler, to run the jobs there. None: run them in this
        process.
    progress : bool, default False
        Show a bar on stderr, where that is a terminal.
    cuts : Cuts or None, default None
        Bounds that cut small data into many blocks, which no command or function of the library takes.
    part : Part or None, default None
        A training is one of several beside each other, and has such a part of a process. memory_limit is in bytes then, and
        its processes have loaded kernels.

    Examples
    --------
    >>> from xmc_stream.models import Execution
    >>> Execution(memory_limit="2GB", threads=2).limit().limit
    2000000000
    """

    memory_limit: str | int | None = None
    threads: int | None = None
    scheduler: Any = None
    progress: bool = False
    cuts: Cuts | None = None
    part: Part | None = None

    def limit(self, reads: Sequence[str | Path] = (), writes: Sequence[str | Path] = ()) -> MemoryLimit:
        """The memory limit in bytes; on a cluster that of each worker, if all of them can take part.

        Parameters
        ----------
        reads : sequence of str or Path, default ()
            Stores that workers read.
        writes : sequence of str or Path, default ()
            Folders that they write to.

        Returns
        -------
        MemoryLimit
            Its attribute `limit` is the number of bytes.

        Raises
        ------
        InputError
            memory_limit is not understood, or threads is below 1. No scheduler answers, or a worker does not fit: it has
            other versions, another processor, too little memory, or does not see what it has to read or write.
        """
        from xmc_stream.runtime.engine import limit_of

        if self.threads is not None and self.threads < 1:
            raise InputError(f"threads must be 1 or more. Got {self.threads}.")
        if self.part is not None:  # whoever began them has asked
            return MemoryLimit.of(self.memory_limit)
        return limit_of(self.memory_limit, self.scheduler, reads, writes)

    def scratch(self, *stores: Path) -> Path | None:
        """The folder for temporary files that workers see too; None: there are none, and the system's will do.

        The first that can be written to: beside a store, which workers read, unless that is behind a URL; the current one.
        Raises InputError where none can.
        """
        if self.scheduler is None:
            return None
        folders = [*(store.absolute().parent for store in stores if not is_mirrored(store)), Path.cwd()]
        for folder in folders:
            with suppress(OSError), tempfile.TemporaryFile(dir=folder):
                return folder
        raise InputError(
            f"no temporary files can be written to {' or '.join(map(str, dict.fromkeys(folders)))}: run this in a folder that "
            "can be written to, on a file system that all workers share"
        )


def advising(folder: Path, instead: str) -> AbstractContextManager[None]:
    """Refusals of workers that do not see a temporary folder say what to do. instead: what does without the folder."""
    unseen = f"{folder}, or cannot write there: "
    advice = f"{instead}, or before Python starts set TMPDIR to a folder"
    return renaming({f"{unseen}name a folder": f"{unseen}{advice}"})


@contextmanager
def shared(execution: Execution) -> Iterator[Execution]:
    """The same, with one client of the scheduler for several runs beside each other."""
    if execution.scheduler is None:
        yield execution
        return
    from xmc_stream.runtime.cluster import Cluster

    with closing(Cluster(execution.scheduler)) as cluster:
        yield replace(execution, scheduler=cluster.client)


def behind(name: str, checks: Sequence[Job], words: str, share: float, loop: Loop) -> Loop:
    """A loop, behind a phase that compares what it reads with its checksums, from which nothing goes on. share: of the bar."""
    from xmc_stream.runtime.job import Phase

    yield Phase(name, checks, words, (0.0, share), twice=True, kept=False)
    with current().part(share, 1.0):
        return (yield from loop)


@contextmanager
def planned(
    execution: Execution, limit: MemoryLimit, *warm: Job, processes: int | None = None, log: Path | None = None
) -> Iterator[tuple[Engine, MemoryPlan]]:
    """An engine whose processes have loaded what `warm` loads, and the plan of the memory that is left.

    processes: workers that there will be; None: those that there are. log: the file for events of the run.
    """
    from xmc_stream.runtime.engine import Engine
    from xmc_stream.runtime.plan import Cuts, MemoryPlan

    with Engine(limit, execution.threads or available_threads(), execution.scheduler, log) as engine:
        parts, held = execution.part or (1, max(engine.warm(job) for job in warm))
        budget, cuts = limit.budget(held) // parts, execution.cuts or Cuts()
        yield engine, MemoryPlan(limit.limit, budget, engine.threads, processes or engine.processes, cuts, parts, held)
