"""One job where it runs, and the threads of this process that run jobs when no cluster is given."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from xmc_stream.errors import JobError, XmcStreamError
from xmc_stream.runtime.events import this_process
from xmc_stream.runtime.job import Job, Receipt
from xmc_stream.system.memory import Usage, peak_resident
from xmc_stream.system.stop import StoppedError, stop_if_unwanted, wanted_while

_LOOK = 0.1  # seconds from one look for whether this thread is wanted to the next


_under_way: Counter[str] = Counter()  # jobs of each run in this process
_lock = threading.Lock()


@dataclass(frozen=True)
class Done:
    """What comes back of a job: the receipt, and clock and memory of the process that ran it."""

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


def do(job: Job) -> Done | Failed:
    """Run a job."""
    began = time.perf_counter()
    try:
        receipt = job.run()
    except XmcStreamError as error:
        return Failed(type(error), error.said)
    return Done(receipt, time.perf_counter() - began, Usage.now(), peak_resident(), this_process())


def do_while(wanted: Callable[[], bool], job: Job, run: str, copy: str = "") -> Done | Failed:
    """Run a job of a run for as long as it is wanted: it ends at its next block once wanted() is false. copy: see `stop`."""
    with _lock:
        _under_way[run] += 1
    try:
        with wanted_while(wanted, copy):
            return do(job)
    except StoppedError:
        return Failed(JobError, f"job {job.key} was stopped")
    finally:
        with _lock:
            _under_way[run] -= 1


def under_way(run: str) -> int:
    """Jobs in this process of a run or, without what follows #, of all sessions of it."""
    with _lock:
        return sum(n for name, n in _under_way.items() if run in (name, name.partition("#")[0]))


def receipt_of(outcome: Done | Failed) -> Done:
    """What a job gave. Raises the error that it ended with."""
    if isinstance(outcome, Failed):
        raise outcome.kind(outcome.message)
    return outcome


class Threads:
    """So many threads, of one run. They end with the process, whatever they are doing."""

    processes = 1

    def __init__(self, threads: int, run: str) -> None:
        self.threads = threads
        self._run = run
        self._withdrawn = False
        self._waiting: SimpleQueue[tuple[Job, Future[Done | Failed]] | None] = SimpleQueue()
        self._ended: SimpleQueue[Future[Done | Failed]] = SimpleQueue()
        self._started = 0

    @property
    def slots(self) -> int:
        """Jobs that may run beside each other."""
        return self.threads

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
