"""The engine: a bounded window of jobs on a dask client, receipts into the ledger, events and progress beside it.

This module covers: a client of its own (threads of this process) or one that is given; submitting, collecting, ending
on errors and near the memory limit. It does not cover: what jobs do, how they are cut, what their receipts mean.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import dask
import distributed
from tqdm import tqdm

from xmc_stream.engine.ledger import Receipt
from xmc_stream.errors import InputError, JobError, XmcStreamError
from xmc_stream.memory import Guard, MemoryLimit, peak_resident, resident


class Job(Protocol):
    """A picklable piece of work with a name of its own in the run."""

    @property
    def key(self) -> str: ...
    def run(self) -> Receipt: ...


class Phase(Protocol):
    """Jobs that may run in any order, beside each other."""

    @property
    def name(self) -> str: ...
    @property
    def jobs(self) -> Any: ...


class Book(Protocol):
    """A ledger, or anything that remembers receipts."""

    def get(self, key: str) -> Receipt | None: ...
    def add(self, key: str, receipt: Receipt) -> None: ...


@dataclass(frozen=True)
class Done:
    """What comes back from a worker: the receipt, and the worker's clock and memory."""

    receipt: Receipt
    seconds: float
    resident: int
    peak: int


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
    return Done(receipt, time.perf_counter() - began, resident(), peak_resident())


def _done(outcome: Done | Failed) -> Done:
    if isinstance(outcome, Failed):
        raise outcome.kind(outcome.message)
    return outcome


class Engine:
    """Runs loops of phases. A context manager.

    scheduler: a distributed.Client, an address, or None for threads of this process. threads: of this process, when
    there is no scheduler. events: a file that a JSON line a job is appended to. progress: bars on a terminal.
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
        self._guard = Guard(limit)

    def __enter__(self) -> Engine:
        self._cluster = None
        self._owned = not isinstance(self._scheduler, distributed.Client)
        if self._scheduler is None:
            # its own memory monitor counts mapped pages twice over, and its dashboard would load half of the web
            with dask.config.set({"distributed.worker.memory.terminate": False, "distributed.admin.log-length": 0}):
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
                self._client = distributed.Client(str(self._scheduler), timeout=30)
            except (OSError, ValueError) as error:
                raise InputError(f"no dask scheduler answers at {self._scheduler} ({error}): start one there") from None
        else:
            self._client = self._scheduler
        if self._scheduler is not None:
            workers = self._client.nthreads()
            if not workers:
                raise InputError("the dask scheduler has no workers: start some, then run this again")
            self.threads, self.processes = max(workers.values()), len(workers)
        self._guard.__enter__()
        self._events = open(self._events_path, "a", encoding="utf-8") if self._events_path else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._guard.__exit__(kind, error, traceback)
        if self._events:
            self._events.close()
        if self._owned:
            self._client.close()
        if self._cluster is not None:
            self._cluster.close()

    @property
    def in_process(self) -> bool:
        """Whether jobs run in this process, which the limit then bounds; else it bounds each worker."""
        return self._scheduler is None

    def warm(self, job: Job) -> int:
        """Run a job that loads libraries and kernels, in every process one after another; returns resident bytes.

        One after another, as two processes that compile into one cache at the same time can fail.
        """
        if self.in_process:
            return _done(_run(job)).resident
        sizes = []
        for worker in self._client.nthreads():
            sizes.append(self._result(job, self._client.submit(_run, job, workers=[worker], pure=False)).resident)
        return max(sizes)

    def once(self, job: Job) -> Receipt:
        """Run a job by itself, in this process or on a worker, and return its receipt."""
        if self.in_process:
            return _done(_run(job)).receipt
        return self._result(job, self._client.submit(_run, job, pure=False)).receipt

    def run(self, loop: Any, book: Book) -> Receipt:
        """Run a loop's phases to its end and return what it returns. Finished jobs are taken from the book."""
        receipts: list[Receipt] | None = None
        while True:
            try:
                phase: Phase = loop.send(receipts)
            except StopIteration as end:
                result: Receipt = end.value
                return result
            receipts = self._run_phase(phase, book)

    def _run_phase(self, phase: Phase, book: Book) -> list[Receipt]:
        todo = [job for job in phase.jobs if book.get(job.key) is None]
        bar = tqdm(
            total=len(phase.jobs), initial=len(phase.jobs) - len(todo), desc=phase.name, unit="job", delay=2,
            leave=False, disable=None if self._progress else True,
        )  # fmt: skip
        with bar:
            for job, done in self._as_completed(todo):
                book.add(job.key, done.receipt)
                self.peak = max(self.peak, done.peak, self._guard.peak if self.in_process else 0)
                self._log(phase, job, done)
                bar.update()
                if self.in_process:
                    self._guard.check()
        return [receipt for job in phase.jobs if (receipt := book.get(job.key)) is not None]

    def _as_completed(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Done]]:
        """Jobs as they end; two for each thread are under way at most, fewer when memory is crowded."""
        waiting = iter(jobs)
        running: dict[Any, Job] = {}
        completed = distributed.as_completed()

        def admit() -> None:
            room = 2 * self.threads * self.processes
            while len(running) < room and not (running and self.in_process and self._guard.crowded()):
                job = next(waiting, None)
                if job is None:
                    return
                future = self._client.submit(_run, job, pure=False)
                running[future] = job
                completed.add(future)

        try:
            admit()
            while running:
                future = next(completed)
                job = running.pop(future)
                yield job, self._result(job, future)
                admit()
        finally:
            if running:  # an error: what has not begun is withdrawn, what has begun comes to its end
                self._client.cancel(list(running))
                self._wait_for_threads()

    def _wait_for_threads(self) -> None:
        """Wait until no job runs in this process, so that no job of an ended run writes any more."""
        while self._cluster is not None and any(w.state.executing for w in self._cluster.workers.values()):
            time.sleep(0.02)

    @staticmethod
    def _result(job: Job, future: Any) -> Done:
        try:
            outcome: Done | Failed = future.result()
        except OSError as error:
            raise JobError(f"job {job.key}: {error}: mend that and run the same command again, it goes on") from error
        except distributed.KilledWorker as error:
            raise JobError(
                f"job {job.key}: its workers died ({error}): see their logs, then run again, it goes on"
            ) from error
        except Exception as error:
            raise JobError(f"job {job.key} failed: {type(error).__name__}: {error}") from error
        return _done(outcome)

    def _log(self, phase: Phase, job: Job, done: Done) -> None:
        if self._events:
            event = {
                "time": round(time.time(), 3),
                "phase": phase.name,
                "job": job.key,
                "seconds": round(done.seconds, 4),
                "resident": done.resident,
                "peak": done.peak,
                "limit": self.limit.limit,
                "process": os.getpid(),
                **{name: done.receipt[name] for name in ("bytes_read",) if name in done.receipt},
            }
            self._events.write(json.dumps(event) + "\n")
            self._events.flush()
