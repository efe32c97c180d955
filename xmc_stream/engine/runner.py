"""The engine: a bounded window of jobs on a dask client, receipts into the ledger, events and progress beside it.

This module covers: a client of its own (threads of this process) or one that is given; submitting, collecting, ending
on errors, near the memory limit and when it is interrupted. It does not cover: what jobs do, how they are cut, what
their receipts mean.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import dask
import distributed
from tqdm import tqdm

from xmc_stream.engine.events import EventLog, this_process
from xmc_stream.engine.ledger import Ledger
from xmc_stream.errors import NO_ROOM, InputError, JobError, XmcStreamError
from xmc_stream.jobs.job import Job, Phase, Receipt
from xmc_stream.jobs.job import Ledger as Notebook
from xmc_stream.memory import Guard, MemoryLimit, Usage, peak_resident, return_freed_memory
from xmc_stream.stop import StoppedError, wanted_while

# they tell at length of a scheduler that is gone, and we in a line
_CLIENT_LOGS = [logging.getLogger(f"distributed.{name}") for name in ("client", "batched", "comm", "core")]
UNKEPT = "unkept"  # in a receipt: sums over jobs right before it whose receipts are not kept
_SUMS = ("passes", "bytes_read", "bytes_gathered")
_GRACE = 1.5  # seconds that an interrupted run gives its jobs to come to a block boundary

_under_way: Counter[str] = Counter()  # jobs of each run on threads of this process
_under_way_lock = threading.Lock()
_ended: set[str] = set()  # runs of this process that want none of their jobs any more
_leaving: list[threading.Thread] = []  # each waits for the jobs of an interrupted run, then closes what it held


@dataclass(frozen=True)
class Done:
    """What comes back from a worker: the receipt, and the worker's clock and memory."""

    receipt: Receipt
    seconds: float
    usage: Usage
    peak: int
    process: str


@dataclass(frozen=True)
class Failed:
    """An error of the library's own kinds. Raised on a worker, it would be logged there, and not all kinds come back."""

    kind: type[XmcStreamError]
    message: str


def _run(job: Job) -> Done | Failed:
    began = time.perf_counter()
    try:
        receipt = job.run()
    except XmcStreamError as error:
        return Failed(type(error), str(error))
    return Done(receipt, time.perf_counter() - began, Usage.now(), peak_resident(), this_process())


def _run_on_worker(job: Job, run: str) -> Done | Failed:
    """Run a job for as long as its run wants it: until it is cancelled, or whoever asked for it is gone."""
    worker = distributed.get_worker()
    key = worker.get_current_task()

    def wanted() -> bool:
        task = worker.state.tasks.get(key)
        return run not in _ended and task is not None and task.state == "executing"

    with _under_way_lock:
        _under_way[run] += 1
    try:
        with wanted_while(wanted):
            return _run(job)
    except StoppedError:
        return Failed(JobError, f"job {job.key} was stopped")
    finally:
        with _under_way_lock:
            _under_way[run] -= 1


def _jobs_under_way(run: str) -> int:
    """Jobs on threads of this process, of a run or, without what follows #, of all sessions of it."""
    with _under_way_lock:
        return sum(n for name, n in _under_way.items() if run in (name, name.partition("#")[0]))


def wait_for_interrupted() -> None:
    """Wait until jobs of runs that were interrupted in this process have ended; they do at their next block."""
    while _leaving:
        _leaving[-1].join()
        _leaving.pop()


def _done(outcome: Done | Failed) -> Done:
    if isinstance(outcome, Failed):
        raise outcome.kind(outcome.message)
    return outcome


class Engine:
    """Runs loops of phases. A context manager.

    scheduler: a distributed.Client, an address, or None for threads of this process. threads: of this process, when
    there is no scheduler. events: a file that a JSON line an event is appended to (see `events`), which also names the
    run on a cluster. progress: bars on a terminal.
    """

    def __init__(
        self,
        limit: MemoryLimit,
        threads: int,
        scheduler: Any = None,
        events: Path | None = None,
        progress: bool = False,
    ) -> None:
        self.limit = limit
        self.threads = threads
        self.processes = 1
        self.peak = 0
        self._scheduler = scheduler
        self._events_path = events
        self._progress = progress
        self._name = f"{events or ''}#{uuid.uuid4().hex}"
        self._running: dict[Any, Job] = {}
        self._goes_on = False
        self._release: Callable[[], None] = lambda: None

    def __enter__(self) -> Engine:
        wait_for_interrupted()
        self._cluster = None
        self._owned = not isinstance(self._scheduler, distributed.Client)
        self._log_levels = [log.level for log in _CLIENT_LOGS]
        if self._scheduler is None:
            # its own memory monitor counts mapped pages twice over, and its dashboard would load half of the web; a
            # process that was stopped for minutes (a laptop that slept) would give its own worker up for dead; its profiler
            # walks the stacks of threads at work, which crashes Python 3.11 once in a while
            settings = {
                "distributed.worker.memory.terminate": False,
                "distributed.admin.log-length": 0,
                "distributed.worker.profile.enabled": False,
                "distributed.scheduler.worker-ttl": None,
            }
            with dask.config.set(settings), warnings.catch_warnings():
                # dask says so where a disk is slow for a second; nobody can do anything about it
                warnings.filterwarnings("ignore", "Creating scratch directories", UserWarning)
                self._cluster = distributed.LocalCluster(
                    n_workers=1,
                    threads_per_worker=self.threads,
                    processes=False,
                    memory_limit=0,
                    dashboard_address=None,
                    # what is left of its web server: on a free port and for this machine only
                    scheduler_kwargs={"dashboard_address": "127.0.0.1:0"},
                    silence_logs=logging.CRITICAL,  # what a job raises is said by who runs it
                )
            self._client = distributed.Client(self._cluster)
        elif self._owned:
            try:
                self._client = distributed.Client(str(self._scheduler))
            except (OSError, ValueError) as error:
                raise InputError(f"no dask scheduler answers at {self._scheduler} ({error}): start one there") from None
        else:
            self._client = self._scheduler
        if self._owned:
            for log in _CLIENT_LOGS:
                log.setLevel(logging.CRITICAL)
        rpc = self._client.scheduler
        self._address = rpc.address if rpc else ""
        if self._scheduler is not None:
            try:
                self._meet_workers()
            except BaseException:
                self._close()
                raise
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
        if self._jobs_here():  # in kernels that nothing can interrupt: the process goes on without them
            _leaving.append(threading.Thread(target=self._close_later, name="xmc-stream-leaving", daemon=True))
            _leaving[-1].start()
        else:
            self._close()

    def _close(self) -> None:
        if self._owned:
            self._client.close()
            for log, level in zip(_CLIENT_LOGS, self._log_levels, strict=True):
                log.setLevel(level)
        if self._cluster is not None:
            self._cluster.close()

    def _close_later(self) -> None:
        while self._jobs_here():
            time.sleep(0.05)
        self._close()
        self._release()

    def _jobs_here(self) -> int:
        """Jobs of this run that are under way on threads of this process."""
        return _jobs_under_way(self._name) if self._cluster is not None else 0

    def _meet_workers(self) -> None:
        """Count workers; wait for jobs that a session of this run which is gone left there: they write what ours do."""
        run = self._name.partition("#")[0]
        with self._asking():
            workers = self._client.nthreads()
            if not workers:
                raise InputError("the dask scheduler has no workers: start some, then run this again")
            self.threads, self.processes = max(workers.values()), len(workers)
            while run and any(self._client.run(_jobs_under_way, run).values()):
                time.sleep(0.2)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Whatever is raised in the block because the scheduler is gone becomes a JobError that says so."""
        try:
            yield
        except Exception as error:
            connected = self._client.status == "running"  # it connects again by itself, but all its jobs are lost
            if connected and getattr(error, "reason", "") != "scheduler-connection-lost":
                raise
            advice = "start it again, with workers, and give the same command" + (
                ", it goes on" if self._goes_on else ""
            )
            raise JobError(f"the dask scheduler at {self._address} is gone: {advice}") from None

    @property
    def in_process(self) -> bool:
        """Whether jobs run in this process, which the limit then bounds; else it bounds each worker."""
        return self._scheduler is None

    def warm(self, job: Job) -> int:
        """Run a job that loads libraries and kernels, in every process one after another; returns resident bytes.

        One after another, as two processes that compile into one cache at the same time can fail.
        """
        if self.in_process:
            return _done(_run(job)).usage.resident
        with self._asking():
            workers = self._client.nthreads()
        return max(self._result(job, self._submit(job, workers=[worker])).usage.resident for worker in workers)

    def note_again(self, key: str) -> None:
        """Put into the log that a finished job is done again."""
        self._events.add("again", job=key)

    def once(self, job: Job) -> Receipt:
        """Run a job by itself, in this process or on a worker, and return its receipt."""
        if self.in_process:
            return _done(_run(job)).receipt
        return self._result(job, self._submit(job)).receipt

    def _submit(self, job: Job, **where: Any) -> Any:
        with self._asking():
            return self._client.submit(_run_on_worker, job, self._name, pure=False, **where)

    def run(self, loop: Any, book: Notebook) -> Receipt:
        """Run a loop's phases to its end and return what it returns. Finished jobs are taken from the book."""
        receipts: list[Receipt] | None = None
        self._goes_on = isinstance(book, Ledger)
        unkept: Counter[str] = Counter()
        while True:
            try:
                phase: Phase = loop.send(receipts)
            except StopIteration as end:
                result: Receipt = end.value
                return result
            receipts = self._run_phase(phase, book, unkept)

    def _run_phase(self, phase: Phase, book: Notebook, unkept: Counter[str]) -> list[Receipt]:
        """unkept: sums over jobs whose receipts the book does not get, which it gets with the next one that it does."""
        receipts = {job.key: book.get(job.key) if phase.kept else None for job in phase.jobs}
        todo = [job for job in phase.jobs if receipts[job.key] is None]
        before = phase.done + len(phase.jobs) - len(todo)
        bar = tqdm(
            total=phase.total or len(phase.jobs), initial=before, desc=phase.name + phase.note, unit="job", delay=2,
            leave=False, disable=None if self._progress else True,
        )  # fmt: skip
        if self.in_process:
            return_freed_memory()  # buffers of another phase have other sizes
        if todo:
            self._events.phase(phase.name, len(phase.jobs), len(phase.jobs) - len(todo), phase.unit, phase.number)
        with bar:
            try:
                for job, done in self._as_completed(todo):
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
                    self._log(job, done)
                    bar.update()
                    if self.in_process:
                        self._guard.check()
            except BaseException as error:
                self._withdraw(book, math.inf if isinstance(error, Exception) else _GRACE)
                raise
        return [receipt for receipt in receipts.values() if receipt is not None]

    def _as_completed(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Done]]:
        """Jobs as they end; two for each thread are under way at most, fewer when memory is crowded."""
        waiting = iter(jobs)
        running = self._running
        completed = distributed.as_completed()

        def admit() -> None:
            room = 2 * self.threads * self.processes
            while len(running) < room and not (running and self.in_process and self._guard.crowded()):
                job = next(waiting, None)
                if job is None:
                    return
                future = self._submit(job)
                running[future] = job
                completed.add(future)

        admit()
        while running:
            future = next(completed)
            job = running.pop(future)
            yield job, self._result(job, future)
            admit()

    def _withdraw(self, book: Notebook, seconds: float) -> None:
        """Want no job any more: what has not begun does not begin, what has begun stops at its next block.

        Waits so long for those of this process; with those that are in a kernel still the lock of the run stays.
        """
        _ended.add(self._name)
        if self._client.status == "running":
            self._client.cancel(list(self._running))
        self._running.clear()
        end = time.monotonic() + seconds
        while self._jobs_here() and time.monotonic() < end:
            time.sleep(0.02)
        if self._jobs_here() and isinstance(book, Ledger):
            self._release = book.hold()

    def _result(self, job: Job, future: Any) -> Done:
        try:
            with self._asking():
                outcome: Done | Failed = future.result()
        except XmcStreamError:
            raise
        except OSError as error:
            advice = "make room there" if error.errno in NO_ROOM else "mend that"
            raise JobError(f"job {job.key}: {error}: {advice} and give the same command again") from error
        except distributed.KilledWorker as error:
            raise JobError(
                f"job {job.key}: its workers died ({error}): see their logs, then run again, it goes on"
            ) from error
        except Exception as error:
            raise JobError(f"job {job.key} failed: {type(error).__name__}: {error}") from error
        return _done(outcome)

    def _log(self, job: Job, done: Done) -> None:
        self._events.add(
            "job", done.usage, done.process, job=job.key, seconds=round(done.seconds, 4), peak=done.peak,
            bytes_read=done.receipt.get("bytes_read", done.receipt.get("checked_bytes", 0)),
        )  # fmt: skip
