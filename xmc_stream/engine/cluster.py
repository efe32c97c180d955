"""Workers of a dask cluster that run jobs: the only module that knows dask."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import distributed

from xmc_stream.engine.work import Done, Failed, do_while, receipt_of, under_way
from xmc_stream.errors import InputError, JobError
from xmc_stream.jobs.job import Job, Receipt

# they tell at length of a scheduler that is gone, and we in a line
_LOGS = [logging.getLogger(f"distributed.{name}") for name in ("client", "batched", "comm", "core")]

_SECONDS = 5  # that a scheduler has to answer

_ended: set[str] = set()  # runs that want none of their jobs any more, in a process that is client and worker


def _on_worker(job: Job, run: str) -> Done | Failed:
    """Run a job for as long as its run wants it: until it is cancelled, or whoever asked for it is gone."""
    worker = distributed.get_worker()
    key = worker.get_current_task()

    def wanted() -> bool:
        task = worker.state.tasks.get(key)
        return run not in _ended and task is not None and task.state == "executing"

    return do_while(wanted, job, run)


class Cluster:
    """The workers of a scheduler, for one run.

    scheduler: a distributed.Client, or an address. goes_on: whether the same command would go on, for messages. Raises
    InputError where no scheduler answers, or none has workers.
    """

    def __init__(self, scheduler: Any, run: str, goes_on: Callable[[], bool]) -> None:
        self._run, self._goes_on = run, goes_on
        self._owned = not isinstance(scheduler, distributed.Client)
        self._levels = [log.level for log in _LOGS]
        if self._owned:
            try:
                self._client = distributed.Client(str(scheduler), timeout=_SECONDS)
            except (OSError, ValueError, MemoryError) as error:  # the last where something else answers
                why = " ".join(str(error).split())
                raise InputError(
                    f"no dask scheduler answers at {scheduler} ({why}): start one, or correct --scheduler"
                ) from None
            for log in _LOGS:
                log.setLevel(logging.CRITICAL)
        else:
            self._client = scheduler
        rpc = self._client.scheduler
        self._address = rpc.address if rpc else ""
        self._completed = distributed.as_completed()
        try:
            self._meet_workers()
        except BaseException:
            self.close()
            raise

    def _meet_workers(self) -> None:
        """Count workers; wait for jobs that a session of this run which is gone left there: they write what ours do."""
        run = self._run.partition("#")[0]
        with self._asking():
            workers = self._client.nthreads()
            if not workers:
                raise InputError("the dask scheduler has no workers: start some, then run this again")
            self.threads, self.processes = max(workers.values()), len(workers)
            while run and any(self._client.run(under_way, run).values()):
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
                ", it goes on" if self._goes_on() else ""
            )
            raise JobError(f"the dask scheduler at {self._address} is gone: {advice}") from None

    def _begin(self, job: Job, **where: Any) -> Any:
        with self._asking():
            return self._client.submit(_on_worker, job, self._run, pure=False, **where)

    def submit(self, job: Job) -> Any:
        """Have a job run: `next_ended` gives its future when it has."""
        future = self._begin(job)
        self._completed.add(future)
        return future

    def next_ended(self) -> Any:
        """A job's future, as it ends. Waits for one."""
        return next(self._completed)

    def outcome(self, job: Job, future: Any) -> Done | Failed:
        """What a job ended with. Raises JobError where it cannot be had, and what it raised, if that is no error of ours."""
        try:
            with self._asking():
                outcome: Done | Failed = future.result()
        except distributed.KilledWorker as error:
            raise JobError(
                f"job {job.key}: its workers died ({error}): see their logs, then run again, it goes on"
            ) from error
        return outcome

    def warm(self, job: Job) -> Done:
        """Run a job that loads libraries and kernels on every worker; returns what the largest one said.

        One after another, as two processes that compile into one cache at the same time can fail.
        """
        with self._asking():
            workers = self._client.nthreads()
        done = [receipt_of(self.outcome(job, self._begin(job, workers=[worker]))) for worker in workers]
        return max(done, key=lambda one: one.usage.resident)

    def once(self, job: Job) -> Receipt:
        """Run a job on a worker, by itself."""
        return receipt_of(self.outcome(job, self._begin(job))).receipt

    def jobs_here(self) -> int:
        """Jobs that are under way in this process: a worker's end with the worker."""
        return 0

    def withdraw(self, futures: Iterable[Any]) -> None:
        """Want no job any more: what has not begun does not begin, what has begun stops at its next block."""
        _ended.add(self._run)
        if self._client.status == "running":
            self._client.cancel(list(futures))

    def close(self) -> None:
        """Leave the scheduler, if its address was given."""
        if self._owned:
            self._client.close()
            for log, level in zip(_LOGS, self._levels, strict=True):
                log.setLevel(level)
