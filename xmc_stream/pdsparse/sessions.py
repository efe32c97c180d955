"""The tables of runs: in this process, where they stay from job to job, and on disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from threading import Lock
from typing import Any

from xmc_stream.pdsparse.kernels.tables import purge
from xmc_stream.pdsparse.rows import Data, Rows
from xmc_stream.pdsparse.solver import Stepper
from xmc_stream.pdsparse.state import read_tables
from xmc_stream.runtime.job import Receipt


@dataclass
class _Session:
    """The tables in this process, and after which segment they are so."""

    stepper: Stepper
    after: str

    def fits(self, lam: float, most_bytes: int) -> bool:
        """Whether a segment may go on with them: of another stage, or under another limit, it may not."""
        return self.stepper.tables.lam == lam and self.stepper.tables.most_bytes == most_bytes


_sessions: dict[str, _Session] = {}  # by the run's folder
_at_work: set[str] = set()  # runs that have a job here
_lock = Lock()


def drop_session(work: str | None = None) -> None:
    """Let go of tables that an earlier job left in this process, of the run of a folder or of all."""
    with _lock:
        for one in list(_sessions) if work is None else [work]:
            _sessions.pop(one, None)


def at_work_alone(run: Callable[[Any], Receipt]) -> Callable[[Any], Receipt]:
    """`run` of a job: tables that others left here go, as far as these and runs at work are more than are planned."""

    @wraps(run)
    def run_alone(job: Any) -> Receipt:
        data: Data = job.data
        with _lock:
            _at_work.add(data.work)
            left = [work for work in _sessions if work not in _at_work]
            for work in left[: max(0, len(_at_work) + len(left) - data.plan.parts)]:
                del _sessions[work]
        try:
            return run(job)
        finally:
            with _lock:
                _at_work.discard(data.work)

    return run_alone


@dataclass(frozen=True)
class TablesOf:
    """Tables on disk, and how steps with them are taken. folder: "" for v = 0; fixed: whether the support stays as it is."""

    folder: str
    lam: float
    rate: int
    fixed: bool = False

    def open(self, data: Data, rows: Rows, begins: float | None = None) -> Stepper:
        """Those in this process, if they are these; else they are read. begins: without entries |v| up to here.

        They leave the process until `keep` gives them back, as who changes them may fail.
        """
        session = _sessions.pop(data.work, None)
        most_bytes, d = data.plan.most_bytes(self.fixed), rows.dataset.n_features
        if session is not None and session.after == self.folder and session.fits(self.lam, most_bytes):
            if begins is not None:
                purge(begins, session.stepper.tables)
            return session.stepper
        del session
        stepper = Stepper(d, rows.n_labels, data.parameters, self.lam, self.rate, most_bytes)
        if self.folder:
            read_tables(Path(self.folder), stepper.tables, d, begins)
        return stepper


def keep(data: Data, stepper: Stepper, folder: str) -> None:
    """Leave tables in this process for the next job: as they are on disk in a folder."""
    _sessions[data.work] = _Session(stepper, folder)
