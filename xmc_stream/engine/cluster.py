"""Workers of a dask cluster that run jobs: the only module that knows dask."""

from __future__ import annotations

import logging
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import distributed
from distributed.comm.addressing import get_address_host

from xmc_stream.engine.work import Done, Failed, do_while, receipt_of, under_way
from xmc_stream.engine.workers import About, Folders, about_this, common_limit, refuse_unfit
from xmc_stream.errors import InputError, JobError
from xmc_stream.jobs.job import Job, Receipt
from xmc_stream.memory import MemoryLimit
from xmc_stream.progress import LOG

# they tell at length of a scheduler that is gone, and we in a line
_LOGS = [logging.getLogger(f"distributed.{name}") for name in ("client", "batched", "comm", "core")]

_SECONDS = 5  # that a scheduler has to answer
_LOOK = 5.0  # seconds from one look for workers to the next, while a run waits for a job
_ALONE = 60.0  # seconds that a run without workers waits for one
_PAUSE = 0.02  # seconds from one look for an outcome to the next, at most

_NO_WORKERS = "the dask scheduler has no workers: start some, then run this again"

_ended: set[str] = set()  # runs that want none of their jobs any more, in a process that is client and worker


def _on_worker(job: Job, run: str, limit: MemoryLimit) -> Done | Failed:
    """Run a job for as long as its run wants it: until it is cancelled, or whoever asked for it is gone."""
    limit.give_back_freed()
    worker = distributed.get_worker()
    key = worker.get_current_task()

    def wanted() -> bool:
        task = worker.state.tasks.get(key)
        return run not in _ended and task is not None and task.state == "executing"

    return do_while(wanted, job, run)


def _about(folders: Folders, dask_worker: Any) -> About:
    """What a worker says of itself."""
    memory = dask_worker.memory_manager
    paused = memory.memory_pause_fraction or 1.0
    return about_this(str(dask_worker.name), int((memory.memory_limit or 0) * paused), folders)


def settled_limit(
    scheduler: Any, size: str | float | None, reads: Sequence[str | Path] = (), writes: Sequence[str | Path] = ()
) -> MemoryLimit:
    """The memory limit of every worker of a scheduler, when all of them can take part in a run.

    size: as of `MemoryLimit.of`. reads: stores that workers read; writes: folders that they write to. Nothing is left there.
    Raises InputError where no scheduler answers, it has no workers, or one of these does not fit (see `workers`).
    """
    cluster = Cluster(scheduler, "", lambda: False, MemoryLimit.of(size))
    try:
        with ExitStack() as files:
            seen = [
                files.enter_context(tempfile.NamedTemporaryFile(prefix=".xmc_stream-", dir=_there(of))) for of in writes
            ]
            told = cluster.ask(Folders(tuple(str(Path(of).absolute()) for of in reads), tuple(of.name for of in seen)))
        refuse_unfit(told)
        return common_limit(told, size)
    finally:
        cluster.close()


def _there(folder: str | Path) -> Path:
    """A folder or, where it is not made yet, the one that it will be in."""
    folder = Path(folder).absolute()
    return next(of for of in (folder, *folder.parents) if of.is_dir())


class _Client(distributed.Client):
    """A client that is closed where it cannot be made.

    Left to the garbage collector it closes itself in whatever thread that runs in. In one that starts the loop of another
    client, it waits for a lock that is held until that loop runs: for ever.
    """

    def __init__(self, address: str) -> None:
        try:
            super().__init__(address, timeout=_SECONDS)
        except BaseException:
            self.close()
            raise


class Cluster:
    """The workers of a scheduler, for one run.

    scheduler: a distributed.Client, or an address. goes_on: whether the same command would go on, for messages. limit: of
    each worker. Raises InputError where no scheduler answers, or none has workers.
    """

    def __init__(self, scheduler: Any, run: str, goes_on: Callable[[], bool], limit: MemoryLimit) -> None:
        self._run, self._goes_on, self._limit = run, goes_on, limit
        self._owned = not isinstance(scheduler, distributed.Client)
        self._levels = [log.level for log in _LOGS]
        if self._owned:
            try:
                self._client = _Client(str(scheduler))
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
        self._completed = distributed.as_completed(loop=self._client.loop)  # else the loop of the client made last
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
                raise InputError(_NO_WORKERS)
            self.threads, self.processes = max(workers.values()), len(workers)
            while run and any(self._client.run(under_way, run, on_error="ignore").values()):
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

    def ask(self, folders: Folders) -> list[About]:
        """What every worker says of itself."""
        with self._asking():
            told = self._client.run(_about, folders, on_error="return")
            there = self._client.nthreads()
        told = {address: one for address, one in told.items() if address in there}  # without those that died meanwhile
        for address, one in told.items():
            if isinstance(one, BaseException):
                raise InputError(
                    f"worker {address} cannot work for this process ({type(one).__name__}: {one}): install the same version "
                    "of xmc-stream there, and start it again"
                ) from None
        if not told:
            raise InputError(_NO_WORKERS)
        return list(told.values())

    def _begin(self, job: Job, **where: Any) -> Any:
        # dask's dashboard groups jobs by what comes before the first number: "solve", "search"
        key = f"{job.key.partition('/')[0]}-{job.key}-{uuid.uuid4().hex[:8]}"
        with self._asking():
            return self._client.submit(_on_worker, job, self._run, self._limit, key=key, pure=False, **where)

    def submit(self, job: Job) -> Any:
        """Have a job run: `next_ended` gives its future when it has."""
        future = self._begin(job)
        self._completed.add(future)
        return future

    def next_ended(self) -> Any:
        """A job's future, as it ends. Waits for one. Raises JobError where no worker is left, and none comes."""
        self._wait_until(self._completed.has_ready)
        return next(self._completed)

    def _wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait for something that workers bring about. Raises JobError where none is left, and none comes."""
        pause, looked, left = 0.001, time.monotonic(), time.monotonic()  # when there were workers at last
        while not holds():
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE)
            if time.monotonic() < looked + _LOOK:
                continue
            with self._asking():
                some = bool(self._client.nthreads())
            looked = time.monotonic()
            if some:
                left = looked
            elif looked > left + _ALONE:
                raise JobError(
                    f"the dask scheduler at {self._address} has had no workers for a minute: start some and give the same "
                    "command" + (", it goes on" if self._goes_on() else "")
                )
            else:
                LOG.warning("no workers at %s: waiting for one", self._address)

    def outcome(self, job: Job, future: Any) -> Done | Failed:
        """What a job ended with. Raises JobError where it cannot be had, and what it raised, if that is no error of ours."""
        self._wait_until(future.done)
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

        On one worker of every host, then on the others, which find the kernels compiled. Where a worker dies, another one
        does it for that.
        """
        with self._asking():
            workers = list(self._client.nthreads())
        first = {get_address_host(worker): worker for worker in reversed(workers)}.values()
        done = []
        for group in (list(first), [worker for worker in workers if worker not in first]):
            begun = [self._begin(job, workers=[worker], allow_other_workers=True) for worker in group]
            done += [receipt_of(self.outcome(job, future)) for future in begun]
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
