"""Workers of a dask cluster that run jobs: the only module that knows dask."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any

import distributed
from distributed.comm.addressing import get_address_host
from distributed.core import Status

from xmc_stream import flags
from xmc_stream.errors import InputError, JobError
from xmc_stream.runtime.job import Done, Failed, Job, do_while, receipt_of, under_way
from xmc_stream.runtime.workers import (
    About,
    Folders,
    Terms,
    Unfit,
    about_this,
    common_environment,
    common_limit,
    environment_here,
    misfit,
    refuse_unfit,
)
from xmc_stream.system.memory import MemoryLimit
from xmc_stream.system.progress import LOG
from xmc_stream.system.stop import stop_if_unwanted

# they tell at length of a scheduler that is gone, and we in a line
_TELLING = ("client", "batched", "core", "comm.core", "comm.inproc", "comm.tcp", "comm.utils", "comm.ws")
_LOGS = [logging.getLogger(f"distributed.{name}") for name in _TELLING]

_SECONDS = 5  # that a scheduler has to answer
_ANSWER = 20.0  # seconds that a worker has to answer
_LOOK = 5.0  # seconds from one look for workers to the next, while a run waits for a job
_ALONE = 60.0  # seconds that a run without workers waits for one
_PAUSE = 0.1  # seconds from one look for an outcome to the next, at most: dask says when one is there
_LATE = 10.0  # seconds that a job must have taken, and so many times what others of its phase take, to be a straggler
_TIMES = 3.0
_SILENT = 15.0  # seconds without a heartbeat; they come once a second or two

_NONE = MemoryLimit(0)  # of workers that get no job
_NO_WORKERS = "the dask scheduler has no workers: start some, then run this again"

_ended: set[str] = set()  # runs that want none of their jobs any more, in a process that is client and worker
_GONE = (Status.closing, Status.closed, Status.failed)  # what a worker is that the scheduler does not count on any more


def _on_worker(job: Job, terms: Terms) -> Done | Failed | Unfit:
    """Run a job for as long as its run wants it: until it is cancelled, or whoever asked for it is gone."""
    worker, run = distributed.get_worker(), terms.run
    if why := misfit(terms, str(worker.name), worker.state.nthreads, _allowed(worker)):
        return Unfit(worker.address, why)
    terms.limit.give_back_freed()
    key = worker.get_current_task()

    def wanted() -> bool:
        task = worker.state.tasks.get(key)
        return run not in _ended and worker.status not in _GONE and task is not None and task.state == "executing"

    # a worker that was frozen or cut off may be at a job that another one has been given since, under the same key
    return do_while(wanted, job, run, copy=uuid.uuid4().hex[:8])


def _allowed(worker: Any) -> int:
    """Bytes at which dask's memory manager pauses a worker, 0 where nothing does."""
    memory = worker.memory_manager
    return int((memory.memory_limit or 0) * (memory.memory_pause_fraction or 1.0))


def _about(folders: Folders, dask_worker: Any) -> About:
    """What a worker says of itself."""
    return about_this(str(dask_worker.name), _allowed(dask_worker), folders)


def settled_limit(
    scheduler: Any, size: str | float | None, reads: Sequence[str | Path] = (), writes: Sequence[str | Path] = ()
) -> MemoryLimit:
    """The memory limit of every worker of a scheduler, when all of them can take part in a run.

    size: as of `MemoryLimit.of`. reads: stores that workers read; writes: folders that they write to. Nothing is left there.
    Raises InputError where no scheduler answers, it has no workers, or one of these does not fit (see `workers`).
    """
    with closing(Cluster(scheduler, limit=MemoryLimit.of(size))) as cluster, ExitStack() as files:
        seen = [files.enter_context(_file_in(_there(of))) for of in writes]
        told = cluster.ask(Folders(tuple(str(Path(of).absolute()) for of in reads), tuple(of.name for of in seen)))
    refuse_unfit(told)
    return common_limit(told, size)


def _file_in(folder: Path) -> Any:
    """A file that workers look for; it is removed when it is closed."""
    try:
        return tempfile.NamedTemporaryFile(prefix=".xmc_stream-", dir=folder)
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written ({error.strerror}), and workers write there: make it writable, or name another folder"
        ) from None


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


def _connected(address: Any) -> _Client:
    """A client of the scheduler at an address. Raises InputError where none answers, whatever dask says of it."""
    try:
        return _Client(str(address))
    except Exception as error:  # noqa: BLE001 - dask and what it uses raise of every kind for addresses that cannot be
        said = f"no dask scheduler answers at {address} ({' '.join(str(error).split())}): start one, or correct "
        raise InputError(said + flags.SCHEDULER) from None


@dataclass(eq=False)
class _Task:
    """A job asked for at `began`. copies: its futures, more than one where it is a straggler. twice: whether that may be."""

    job: Job
    copies: list[Any]
    began: float
    twice: bool

    def ended(self) -> list[Any]:
        """The copies that have."""
        return [future for future in self.copies if future.done()]


class Cluster:
    """The workers of a scheduler, for one run, or to be asked what they are.

    scheduler: a distributed.Client, or an address. run: its name, see `Terms`; "" where no job is submitted. goes_on: whether
    the same command would go on, for messages. limit: of each worker. Raises InputError where no scheduler answers, or none
    has workers.
    """

    def __init__(
        self, scheduler: Any, run: str = "", goes_on: Callable[[], bool] = lambda: False, limit: MemoryLimit = _NONE
    ) -> None:
        self._run, self._goes_on, self._limit = run, goes_on, limit
        self._owned = not isinstance(scheduler, distributed.Client)
        if self._owned:
            self.client = _connected(getattr(scheduler, "scheduler_address", scheduler))
            self._silence = lambda record: record.levelno >= logging.CRITICAL  # of this cluster: others may be open
            for log in _LOGS:
                log.addFilter(self._silence)
        elif scheduler.asynchronous or scheduler.status != "running":
            raise InputError(
                f"the dask client given is {'asynchronous' if scheduler.asynchronous else scheduler.status}: give one that is "
                "connected and not asynchronous, or the scheduler's address"
            )
        else:
            self.client = scheduler
        rpc = self.client.scheduler
        self._address = rpc.address if rpc else ""
        self._tasks: list[_Task] = []  # under way, by `submit`
        self._took: list[float] = []  # seconds, of those of the phase that have ended
        self._homes: list[str] = []  # workers, where jobs of the phase have a home
        self._looked = 0.0  # for stragglers
        self._seen = 0.0  # when workers were counted at last
        self._there: dict[str, int] = {}  # threads of each worker then
        self._unfit: set[str] = set()  # workers that must not work for this run
        self._news = Event()  # a job has ended
        try:
            self._meet_workers()
        except BaseException:
            self.close()
            raise

    def _meet_workers(self) -> None:
        """Count workers; wait for jobs that a session of this run which is gone left there: they write what ours do."""
        run = self._run.partition("#")[0]
        workers = self._workers()
        if not workers:
            raise InputError(_NO_WORKERS)
        self.threads, self.processes = max(workers.values()), len(workers)
        if self._run:
            _ = self.terms  # before others join
        told = time.monotonic() + _LOOK
        while run and any(n for n in self._everyone(under_way, run).values() if isinstance(n, int)):
            if time.monotonic() > told:
                LOG.info("waiting for jobs that an earlier session of this run left on the workers")
                told = time.monotonic() + _ALONE
            time.sleep(0.2)

    @cached_property
    def terms(self) -> Terms:
        """What workers of this run keep to."""
        told = [of for of in self._everyone(environment_here).values() if isinstance(of, Mapping)]
        return Terms(self._run, self._limit, self.threads, common_environment(told))

    @property
    def slots(self) -> int:
        """Threads of all workers, as they were counted at last, seconds ago."""
        return sum(self._fit.values()) or 1

    @property
    def _fit(self) -> dict[str, int]:
        return {one: threads for one, threads in self._there.items() if one not in self._unfit}

    def _on(self) -> str:
        """What ends the advice to give the same command, where the run goes on then."""
        return ", it goes on" if self._goes_on() else ""

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Whatever is raised in the block because the scheduler is gone becomes a JobError that says so."""
        try:
            yield
        except Exception as error:
            connected = self.client.status == "running"  # it connects again by itself, but all its jobs are lost
            if connected and getattr(error, "reason", "") != "scheduler-connection-lost":
                raise
            advice = f"start it again, with workers, and give the same command{self._on()}"
            raise JobError(f"the dask scheduler at {self._address} is gone: {advice}") from None

    def _answer(self, question: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """What a coroutine that asks the scheduler returns. Raises JobError where no answer comes within a minute."""
        try:
            with self._asking():
                return self.client.sync(question, callback_timeout=_ALONE)
        except TimeoutError:
            raise JobError(
                f"the dask scheduler at {self._address} has given no answer for a minute: look at its log, and give the same "
                f"command{self._on()}"
            ) from None

    def _workers(self) -> dict[str, int]:
        """Threads of each worker, by address."""
        self._there = dict(self._answer(self.client.nthreads))
        self._seen = time.monotonic()
        return self._fit

    def _everyone(self, function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        """What a function says on each worker, by address; an exception where it fails, or no answer comes in time."""

        async def answers() -> dict[str, Any]:
            there = list(await self.client.nthreads())
            asked = [
                asyncio.wait_for(self.client.run(function, *arguments, workers=[one], on_error="return"), _ANSWER)
                for one in there
            ]
            told = await asyncio.gather(*asked, return_exceptions=True)
            return {
                one: said.get(one) if isinstance(said, dict) else said for one, said in zip(there, told, strict=True)
            }

        told: dict[str, Any] = self._answer(answers)
        return told

    def ask(self, folders: Folders) -> list[About]:
        """What every worker says of itself."""
        told, there = self._everyone(_about, folders), self._workers()
        told = {address: one for address, one in told.items() if address in there}  # without those that died meanwhile
        for address, one in told.items():
            if isinstance(one, TimeoutError):
                raise InputError(
                    f"worker {address} has given no answer for {_ANSWER:.0f} seconds: end it, or wait until the scheduler "
                    "drops it"
                )
            if isinstance(one, BaseException):
                raise InputError(
                    f"worker {address} cannot work for this process ({type(one).__name__}: {one}): install the same version "
                    "of xmc-stream there, and start it again"
                ) from None
        if not told:
            raise InputError(_NO_WORKERS)
        return list(told.values())

    def _begin(self, job: Job, **where: Any) -> Any:
        # dask's dashboard groups jobs by the words before the first number: "solve", "search"
        key = f"{job.key.partition('/')[0]}-{uuid.uuid4().hex[:8]}-{job.key}"
        news, terms = self._news, self.terms
        if self._unfit and not where:  # others only where none of these is left
            where = {"workers": list(self._fit), "allow_other_workers": True}
        with self._asking():
            future = self.client.submit(_on_worker, job, terms, key=key, pure=False, **where)
            future.add_done_callback(lambda _: news.set())
        return future

    def submit(self, job: Job, twice: bool, home: int | None = None, **where: Any) -> _Task:
        """Have a job run: `next_ended` gives what is returned, when it has. twice: whether two copies of it do no harm.

        home: jobs of one number go to one worker, as long as the workers are the same.
        """
        if not self._tasks:
            self._took.clear()  # another phase
            self._homes = [] if home is None else sorted(self._workers())
        if home is not None and self._homes:
            where = {"workers": [self._homes[home % len(self._homes)]], "allow_other_workers": True}
        task = _Task(job, [self._begin(job, **where)], time.monotonic(), twice)
        self._tasks.append(task)
        return task

    def next_ended(self) -> _Task:
        """A job, as it ends. Waits for one. Raises JobError where no worker is left, and none comes."""

        def ended() -> list[_Task]:
            self._copy_stragglers()
            return [task for task in self._tasks if task.ended()]

        task: _Task = self._wait_until(ended)[0]
        self._tasks.remove(task)
        return task

    def _copy_stragglers(self) -> None:
        """Begin jobs that take far longer than others of their phase once more, on idle workers.

        Theirs may be frozen or cut off, which a scheduler notices after minutes. Where no job of the phase has ended, those
        of workers that the scheduler has not heard of for a while.
        """
        now = time.monotonic()
        if now < self._looked + 1:
            return
        self._looked = now
        enough = max(_LATE, _TIMES * median(self._took)) if self._took else _LATE
        late = [task for task in self._tasks if task.twice and len(task.copies) == 1 and now > task.began + enough]
        if not late:
            return

        async def seen() -> tuple[Any, Any]:
            rpc: Any = self.client.scheduler
            return await self.client.processing(), await rpc.identity(n_workers=-1)

        at_work, identity = self._answer(seen)
        about = identity["workers"]
        newest = max((one["last_seen"] for one in about.values()), default=0.0)
        silent = {worker for worker, one in about.items() if one["last_seen"] < newest - _SILENT}
        idle = {one: about[one]["nthreads"] - len(keys) for one, keys in at_work.items() if one in about}
        room = {one: n for one, n in idle.items() if one not in silent | self._unfit}
        for task in late:
            there = {one for one, keys in at_work.items() if task.copies[0].key in keys}
            free = [one for one, n in room.items() if n > 0 and one not in there]
            if free and (self._took or there & silent):
                LOG.info("job %s takes long: once more, on %s", task.job.key, free[0])
                room[free[0]] -= 1
                task.copies.append(self._begin(task.job, workers=free[:1], allow_other_workers=True))

    def _wait_until(self, holds: Callable[[], Any]) -> Any:
        """Wait for something that workers bring about, and return it. Raises JobError where none is left, and none comes."""
        left = time.monotonic()  # when there were workers at last
        while not (found := holds()):
            stop_if_unwanted()
            self._news.wait(_PAUSE)
            self._news.clear()
            if time.monotonic() < self._seen + _LOOK:
                continue
            if self._workers():
                left = self._seen
            elif self._seen > left + _ALONE:
                raise JobError(
                    f"the dask scheduler at {self._address} has had no workers for a minute: start some and give the same "
                    f"command{self._on()}"
                )
            else:
                LOG.warning("no workers at %s: waiting for one", self._address)
        return found

    def outcome(self, job: Job, task: _Task) -> Done | Failed:
        """What a job ended with. Raises JobError where it cannot be had, and what it raised, if that is no error of ours."""
        while True:
            first = self._wait_until(task.ended)[0]
            task.copies.remove(first)
            try:
                outcome = self._outcome_of(job, first)
            except Exception:
                if task.copies and self.client.status == "running":
                    continue  # the other worker may do better
                raise
            if isinstance(outcome, Unfit):
                self._leave_out(outcome)
                if not task.copies:
                    task.copies.append(self._begin(job))
            elif isinstance(outcome, Done) or not task.copies:
                self._cancel(task.copies)
                if isinstance(outcome, Done):
                    self._took.append(outcome.seconds)
                return outcome

    def _leave_out(self, worker: Unfit) -> None:
        """Give a worker that joined late and does not fit no more jobs. Raises JobError where no other one is left."""
        if worker.address not in self._unfit:
            LOG.warning("%s; it gets no jobs of this run", worker.why)
        self._unfit.add(worker.address)
        if not self._workers():
            again = f"; give the same command again{self._on()}"
            raise JobError("no worker is left that can go on: " + worker.why + again)

    def _outcome_of(self, job: Job, future: Any) -> Done | Failed | Unfit:
        while True:
            self._wait_until(future.done)
            try:
                with self._asking():
                    outcome: Done | Failed | Unfit = future.result(timeout=_LOOK)
                return outcome
            except distributed.KilledWorker as error:
                raise JobError(
                    f"job {job.key}: all workers that did it died ({error.allowed_failures + 1}, the last one at "
                    f"{error.last_worker.address}): see their logs; give the same "
                    f"command again{self._on()}"
                ) from error
            except TimeoutError:
                if future.status == "error":
                    raise
                self._workers()  # raises where the scheduler has stopped answering
                # else the worker died before the outcome was fetched: another one does the job

    def warm(self, job: Job) -> Done:
        """Run a job that loads libraries and kernels on every worker; returns what the largest one said.

        On one worker of every host, then on the others, which find the kernels compiled. Where a worker dies, another one
        does it for that.
        """
        workers = list(self._workers())
        first = {get_address_host(worker): worker for worker in reversed(workers)}.values()
        done = []
        for group in (list(first), [worker for worker in workers if worker not in first]):
            for worker in group:
                self.submit(job, True, workers=[worker], allow_other_workers=True)
            done += [receipt_of(self.outcome(job, self.next_ended())) for _ in group]
        return max(done, key=lambda one: one.usage.resident)

    def once(self, job: Job) -> Done:
        """Run a job on a worker, by itself."""
        self.submit(job, True)
        return receipt_of(self.outcome(job, self.next_ended()))

    def jobs_here(self) -> int:
        """Jobs that are under way in this process: a worker's end with the worker."""
        return 0

    def withdraw(self, tasks: Iterable[_Task]) -> None:
        """Want no job any more: what has not begun does not begin, what has begun stops at its next block."""
        _ended.add(self._run)
        self._tasks.clear()
        self._cancel([future for task in tasks for future in task.copies])

    def _cancel(self, futures: list[Any]) -> None:
        if futures and self.client.status == "running":
            with suppress(OSError, TimeoutError):  # the scheduler is gone, which the next who asks it says
                self.client.cancel(futures)

    def close(self) -> None:
        """Leave the scheduler, if its address was given."""
        if self._owned:
            self.client.close()
            for log in _LOGS:
                log.removeFilter(self._silence)
