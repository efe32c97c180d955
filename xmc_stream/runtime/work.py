"""One job where it runs: what comes back from it, and how it learns that nobody wants it any more."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from xmc_stream.errors import JobError, XmcStreamError
from xmc_stream.runtime.events import this_process
from xmc_stream.runtime.job import Job, Receipt
from xmc_stream.system.memory import Usage, peak_resident
from xmc_stream.system.stop import StoppedError, wanted_while

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
