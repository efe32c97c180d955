"""What the engine and the jobs agree on: a job has a key and runs; a phase is a list of jobs; a loop yields phases.

And one job where it runs, on a thread of this process or on a worker: what comes back of it, and how it is stopped.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from xmc_stream.errors import JobError, XmcStreamError
from xmc_stream.system.memory import Usage, peak_resident
from xmc_stream.system.progress import Progress
from xmc_stream.system.stop import StoppedError, wanted_while

Receipt = dict[str, Any]  # small and plain: it goes through the scheduler and into the ledger as JSON

_under_way: Counter[str] = Counter()  # jobs of each run in this process
_lock = threading.Lock()


class Job(Protocol):
    """A picklable piece of work."""

    @property
    def key(self) -> str:
        """Names the job in its run: the same work has the same key."""
        ...

    def run(self) -> Receipt:
        """Do the work: everything large is on disk, durable, when this returns."""
        ...


@dataclass(frozen=True)
class Phase:
    """Jobs that may run in any order, beside each other.

    words: what it does, for those who watch; "" for its name. span: from where to where it takes the whole run, from 0 to
    1, as far as that can be foreseen; None where it cannot. kept: receipts go into the ledger; else the jobs are done again
    in every session, as what they leave on disk is not durable. unit, number: how far the run is in its method's own
    terms, for instance ("pass", 3); "" where that stays as it was. gathers: jobs read scattered rows, no stream. twice: two
    copies of a job may run beside each other, as what it leaves gets its name when it is whole: a straggler is begun again.
    at_home: each job goes to the process that the one in its place went to before, if it can: something stayed in memory there.
    loads: a job that loads kernels which no phase before has called: every process does it first.
    """

    name: str
    jobs: Sequence[Job]
    words: str = ""
    span: tuple[float, float] | None = None
    kept: bool = True
    unit: str = ""
    number: int = 0
    gathers: bool = False
    twice: bool = False
    at_home: bool = False
    loads: Job | None = None

    def part(self, begin: float, end: float) -> tuple[float, float] | None:
        """The span of a part of it."""
        if self.span is None:
            return None
        first, length = self.span[0], self.span[1] - self.span[0]
        return first + begin * length, first + end * length


Loop = Generator[Phase, list[Receipt], Receipt]


class Ledger(Protocol):
    """What a run has done so far, by key."""

    def get(self, key: str) -> Receipt | None:
        """The receipt of a job, or a note, if there is one."""
        ...

    def add(self, key: str, receipt: Receipt) -> None:
        """Note it down, durably."""
        ...


class Notes(dict[str, Receipt]):
    """A ledger for runs that are not resumed: it is forgotten with the process."""

    def add(self, key: str, receipt: Receipt) -> None:
        """Remember a receipt."""
        self[key] = receipt


def run_phases(loop: Loop, run: Callable[[Phase], list[Receipt]]) -> Receipt:
    """Run each phase of a loop in turn; returns what the loop returns. run: gives the receipts of a phase's jobs."""
    receipts: list[Receipt] | None = None
    while True:
        try:
            phase = loop.send(receipts)  # type: ignore[arg-type]
        except StopIteration as end:
            result: Receipt = end.value
            return result
        receipts = run(phase)


def run_here(loop: Loop, ledger: Ledger, progress: Progress | None = None) -> Receipt:
    """Run a loop's jobs one after another in this thread; returns what the loop returns. Finished jobs are not redone.

    progress: is told of the phases.
    """

    def run(phase: Phase) -> list[Receipt]:
        receipts = []
        if progress:
            progress.phase(phase.words or phase.name, phase.span)
        for n_done, job in enumerate(phase.jobs, 1):
            receipt = ledger.get(job.key) if phase.kept else None
            if receipt is None:
                receipt = job.run()
                if phase.kept:
                    ledger.add(job.key, receipt)
            receipts.append(receipt)
            if progress:
                progress.advance(n_done / len(phase.jobs))
        return receipts

    return run_phases(loop, run)


def this_process() -> str:
    """Host and number of this process."""
    return f"{platform.node()}:{os.getpid()}"


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
