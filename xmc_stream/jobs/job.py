"""What the engine and the jobs agree on: a job has a key and runs; a phase is a list of jobs; a loop yields phases."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Receipt = dict[str, Any]  # small and plain: it goes through the scheduler and into the ledger as JSON


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

    done, total: where they stand in a longer row of phases, if so. note: for those who watch. kept: receipts go into the
    ledger; else the jobs are done again in every session, as what they leave on disk is not durable. unit, number: how
    far the run is in its method's own terms, for instance ("pass", 3); "" where that stays as it was. gathers: jobs read
    scattered rows, no stream.
    """

    name: str
    jobs: Sequence[Job]
    done: int = 0
    total: int = 0
    note: str = ""
    kept: bool = True
    unit: str = ""
    number: int = 0
    gathers: bool = False


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


def run_here(loop: Loop, ledger: Ledger) -> Receipt:
    """Run a loop's jobs one after another in this thread; returns what the loop returns. Finished jobs are not redone."""
    receipts = None
    while True:
        try:
            phase = loop.send(receipts)  # type: ignore[arg-type]
        except StopIteration as end:
            result: Receipt = end.value
            return result
        receipts = []
        for job in phase.jobs:
            receipt = ledger.get(job.key) if phase.kept else None
            if receipt is None:
                receipt = job.run()
                if phase.kept:
                    ledger.add(job.key, receipt)
            receipts.append(receipt)
