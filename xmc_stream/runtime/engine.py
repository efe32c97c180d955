"""The engine: a bounded window of jobs, receipts into the ledger, events and progress beside it.

This module covers: the threads of this process, submitting to these or to a cluster, collecting, ending on errors, near the
memory limit and when it is interrupted. It does not cover: what jobs do, how they are cut, what their receipts mean.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any

from xmc_stream.errors import NO_ROOM, JobError, XmcStreamError
from xmc_stream.runtime.check import CheckedJob
from xmc_stream.runtime.events import EventLog
from xmc_stream.runtime.job import Done, Failed, Job, Phase, Receipt, do, do_while, receipt_of, run_phases, under_way
from xmc_stream.runtime.job import Ledger as Notebook
from xmc_stream.runtime.ledger import Ledger, environment
from xmc_stream.store.chunks import comparing
from xmc_stream.system.memory import Guard, MemoryLimit, make_room, peak_resident, return_freed_memory
from xmc_stream.system.progress import current
from xmc_stream.system.stop import stop_if_unwanted

if TYPE_CHECKING:
    from xmc_stream.runtime.cluster import Cluster

UNKEPT = "unkept"  # in a receipt: sums over jobs right before it whose receipts are not kept
_SUMS = ("passes", "bytes_read", "bytes_gathered")
_LOOK = 0.1  # seconds from one look for whether this thread is wanted to the next
_GRACE = 1.5  # seconds that an interrupted run gives its jobs to come to a block boundary

_leaving: list[threading.Thread] = []  # each waits for the jobs of an interrupted run, then closes what it held


def wait_for_interrupted() -> None:
    """Wait until jobs of runs that were interrupted in this process have ended; they do at their next block."""
    while _leaving:
        _leaving[-1].join()
        _leaving.pop()


def limit_of(
    size: str | float | None, scheduler: Any = None, reads: Sequence[str | Path] = (), writes: Sequence[str | Path] = ()
) -> MemoryLimit:
    """The memory limit of a run: of this process or, with a scheduler, of each of its workers, if all can take part.

    size: as of `MemoryLimit.of`. reads: stores that workers read; writes: folders that they write to. Raises InputError as
    `MemoryLimit.kept` does, and where no scheduler answers or a worker does not fit.
    """
    if scheduler is None:
        return MemoryLimit.kept(size)
    from xmc_stream.runtime.cluster import settled_limit

    return settled_limit(scheduler, size, reads, writes)


def environment_of(scheduler: Any) -> Mapping[str, str]:
    """What the last bits of a run depend on: of this process or, with a scheduler, with the processor of its workers."""
    if scheduler is None:
        return environment()
    from xmc_stream.runtime.cluster import Cluster

    with closing(Cluster(scheduler)) as cluster:
        return {name: cluster.terms.environment[name] for name in environment()}


class Threads:
    """So many threads, of one run, which are slots for jobs. They end with the process, whatever they are doing."""

    processes = 1

    def __init__(self, threads: int, run: str) -> None:
        self.threads = self.slots = threads
        self._run = run
        self._withdrawn = False
        self._waiting: SimpleQueue[tuple[Job, Future[Done | Failed]] | None] = SimpleQueue()
        self._ended: SimpleQueue[Future[Done | Failed]] = SimpleQueue()
        self._started = 0

    def submit(self, job: Job, twice: bool = False, home: int | None = None) -> Future[Done | Failed]:
        """Have a job run: `next_ended` gives its future when it has. twice, home: of no use here."""
        future: Future[Done | Failed] = Future()
        future.add_done_callback(self._ended.put)
        self._waiting.put((job, future))
        if self._started < self.threads:  # not before there is work: a phase of one job needs one
            self._started += 1
            threading.Thread(target=self._work, name=f"xmc-stream-job-{self._started}", daemon=True).start()
        return future

    def next_ended(self) -> Future[Done | Failed]:
        """A job's future, as it ends. Waits for one, for as long as this thread is wanted."""
        while True:
            stop_if_unwanted()
            with suppress(Empty):
                return self._ended.get(timeout=_LOOK)

    def outcome(self, job: Job, future: Future[Done | Failed]) -> Done | Failed:
        """What a job ended with. Raises what it raised, if that is no error of the library's own."""
        return future.result()

    def once(self, job: Job) -> Done:
        """Run a job in this thread."""
        return receipt_of(do(job))

    warm = once  # libraries and kernels, which the process needs once

    def jobs_here(self) -> int:
        """Jobs that are under way in this process."""
        return under_way(self._run)

    def withdraw(self, futures: Iterable[Future[Done | Failed]]) -> None:
        """Want no job any more: what has not begun does not begin, what has begun stops at its next block."""
        self._withdrawn = True

    def close(self) -> None:
        """Let the threads go, each when its job has ended."""
        for _ in range(self._started):
            self._waiting.put(None)

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            job, future = item
            try:
                future.set_result(do_while(lambda: not self._withdrawn, job, self._run))
            except BaseException as error:  # noqa: BLE001 (whoever asks for the outcome is told)
                future.set_exception(error)
            del item, job, future  # or what they hold would live until the next job comes


class Engine:
    """Runs loops of phases. A context manager.

    scheduler: a distributed.Client, an address, or None for threads of this process. threads: of this process, when
    there is no scheduler. events: a file that a JSON line an event is appended to (see `events`), which also names the
    run on a cluster.

    loading, compiling: seconds that `warm` took to load kernels, and to compile them where that was never done.
    """

    def __init__(
        self,
        limit: MemoryLimit,
        threads: int,
        scheduler: Any = None,
        events: Path | None = None,
    ) -> None:
        self.limit = limit
        self.threads = threads
        self.peak = 0
        self.loading = self.compiling = 0.0
        self._scheduler = scheduler
        self._events_path = events
        self._name = f"{events.absolute() if events else ''}#{uuid.uuid4().hex}"
        self._running: dict[Any, Job] = {}
        self._goes_on = self._keeps = False
        self._release: Callable[[], None] = lambda: None
        self._workers: Threads | Cluster

    def __enter__(self) -> Engine:
        wait_for_interrupted()
        if self._scheduler is None:
            self._workers = Threads(self.threads, self._name)
        else:  # who has no cluster does not load dask, which takes a quarter of a second and 25 MB
            from xmc_stream.runtime.cluster import Cluster

            self._workers = Cluster(self._scheduler, self._name, lambda: self._goes_on, self.limit)
        self.threads, self.processes = self._workers.threads, self._workers.processes
        self._events = EventLog(self._events_path, self.limit.limit)
        self._guard = Guard(self.limit, watch=self._events.sample)
        self._guard.__enter__()
        self._events.add("start", peak=peak_resident())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._guard.__exit__(kind, error, traceback)
        how = "end" if kind is None else "error" if issubclass(kind, Exception) else "interrupted"
        self._events.add(how, peak=peak_resident())
        self._events.close()
        if self.in_process:
            make_room()  # what its jobs left in memory
        if self._keeps:
            self.limit.give_back_freed()
            return_freed_memory()
        if self._workers.jobs_here():  # in kernels that nothing can interrupt: the process goes on without them
            _leaving.append(threading.Thread(target=self._close_later, name="xmc-stream-leaving", daemon=True))
            _leaving[-1].start()
        else:
            self._workers.close()

    def _close_later(self) -> None:
        while self._workers.jobs_here():
            time.sleep(0.05)
        self._workers.close()
        self._release()

    @property
    def in_process(self) -> bool:
        """Whether jobs run in this process, which the limit then bounds; else it bounds each worker."""
        return self._scheduler is None

    def warm(self, job: Job) -> int:
        """Run a job that loads libraries and kernels in every process; returns the most resident bytes of one."""
        current().phase("loading kernels" if self.in_process else "loading kernels on the workers", (0.0, 0.0))
        done = self._workers.warm(job)
        self.loading, self.compiling = (float(done.receipt.get(name, 0.0)) for name in ("loading", "compiling"))
        return done.usage.resident

    def keep_freed(self) -> None:
        """Let memory that jobs free stay for the next ones, to the end: see `MemoryPlan.keeps_freed`."""
        self._keeps = self.in_process
        if self._keeps:
            self.limit.keep_freed()

    def note_again(self, key: str) -> None:
        """Put into the log that a finished job is done again."""
        self._events.add("again", job=key)

    def once(self, job: Job) -> Receipt:
        """Run a job by itself, in this process or on a worker, and return its receipt."""
        return self._workers.once(job).receipt

    def run(self, loop: Any, book: Notebook) -> Receipt:
        """Run a loop's phases to its end and return what it returns. Finished jobs are taken from the book.

        In a block of `checked_reading` jobs compare what they read.
        """
        self._goes_on = isinstance(book, Ledger)
        unkept: Counter[str] = Counter()
        return run_phases(loop, lambda phase: self._run_phase(phase, book, unkept))

    def _run_phase(self, phase: Phase, book: Notebook, unkept: Counter[str]) -> list[Receipt]:
        """unkept: sums over jobs whose receipts the book does not get, which it gets with the next one that it does."""
        receipts = {job.key: book.get(job.key) if phase.kept else None for job in phase.jobs}
        todo = [job for job in phase.jobs if receipts[job.key] is None]
        if (what := comparing()) is not None:
            todo = [CheckedJob(job, what) for job in todo]
        n_done, progress = len(phase.jobs) - len(todo), current()
        if self.in_process and not self._keeps:
            return_freed_memory()  # buffers of another phase have other sizes
        try:
            if todo and phase.loads is not None:
                self._workers.warm(phase.loads)
            if todo:
                self._events.phase(phase.name, len(phase.jobs), n_done, phase.unit, phase.number)
                progress.phase(phase.words or phase.name, phase.span)
                progress.advance(n_done / len(phase.jobs))
            for job, done in self._as_completed(todo, phase.twice, phase.at_home):
                receipt = done.receipt
                if phase.gathers:
                    receipt = {**receipt, "bytes_gathered": receipt.get("bytes_read", 0)}
                receipts[job.key] = receipt
                if phase.kept:
                    book.add(job.key, receipt | ({UNKEPT: dict(unkept)} if unkept else {}))
                    unkept.clear()
                else:
                    unkept.update({name: receipt[name] for name in _SUMS if name in receipt})
                self.peak = max(self.peak, done.peak, self._guard.peak if self.in_process else 0)
                self._events.add(
                    "job", done.usage, done.process, job=job.key, seconds=round(done.seconds, 4), peak=done.peak,
                    bytes_read=receipt.get("bytes_read", receipt.get("checked_bytes", 0)),
                )  # fmt: skip
                n_done += 1
                progress.advance(n_done / len(phase.jobs))
                if self.in_process:
                    self._guard.check()
        except BaseException as error:
            self._withdraw(book, math.inf if isinstance(error, Exception) else _GRACE)
            raise
        return [receipt for receipt in receipts.values() if receipt is not None]

    def _as_completed(self, jobs: Iterable[Job], twice: bool, at_home: bool) -> Iterator[tuple[Job, Done]]:
        """Jobs as they end; two for each thread that there is now are under way at most, fewer when memory is crowded."""
        waiting = enumerate(jobs)
        running = self._running

        def admit() -> None:
            room = 2 * self._workers.slots
            while len(running) < room and not (running and self.in_process and self._guard.crowded()):
                following = next(waiting, None)
                if following is None:
                    return
                place, job = following
                running[self._workers.submit(job, twice, place if at_home else None)] = job

        admit()
        while running:
            future = self._workers.next_ended()
            job = running.pop(future)
            yield job, self._result(job, future)
            admit()

    def _withdraw(self, book: Notebook, seconds: float) -> None:
        """Want no job any more: what has not begun does not begin, what has begun stops at its next block.

        Waits so long for those of this process; with those that are in a kernel still the lock of the run stays.
        """
        self._workers.withdraw(self._running)
        self._running.clear()
        end = time.monotonic() + seconds
        while self._workers.jobs_here() and time.monotonic() < end:
            time.sleep(0.02)
        if self._workers.jobs_here() and isinstance(book, Ledger):
            self._release = book.hold()

    def _result(self, job: Job, future: Any) -> Done:
        try:
            outcome = self._workers.outcome(job, future)
        except XmcStreamError:
            raise
        except OSError as error:
            advice = "make room there" if error.errno in NO_ROOM else "mend that"
            raise JobError(f"job {job.key}: {error}: {advice} and give the same command again") from error
        except Exception as error:
            raise JobError(f"job {job.key} failed: {type(error).__name__}: {error}") from error
        return receipt_of(outcome)
