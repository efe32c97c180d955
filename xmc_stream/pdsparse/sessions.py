"""The tables of runs: in this process, where they stay from job to job, and on disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from xmc_stream import flags
from xmc_stream.errors import MemoryLimitError
from xmc_stream.pdsparse.kernels.tables import enter, list_entries, purge
from xmc_stream.pdsparse.plan import ENTRIES
from xmc_stream.pdsparse.rows import Data, Rows
from xmc_stream.pdsparse.solver import Stepper
from xmc_stream.pdsparse.state import new_tables, stored_tables
from xmc_stream.runtime.job import Receipt
from xmc_stream.system.memory import format_size


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


def write_tables(path: Path, stepper: Stepper, n_features: int) -> None:
    """Leave the tables on disk."""
    tables = stepper.tables
    per_feature = np.full(n_features, tables.n_labels, np.int64)
    if not tables.dense:
        per_feature = tables.v.n.reshape(n_features, -1).sum(axis=1, dtype=np.int64)
    ends = np.concatenate([[0], np.cumsum(per_feature)])
    with new_tables(path) as writer:
        first = 0
        while first < n_features:
            last = max(first + 1, int(np.searchsorted(ends, ends[first] + ENTRIES, side="right")) - 1)
            room = int(ends[last] - ends[first])
            counts, labels, values = np.empty(last - first, np.int32), np.empty(room, np.int32), np.empty(room)
            n = list_entries(first, last, tables, counts, labels, values)
            writer.append(counts, labels[:n], values[:n])
            first = last


def read_tables(path: Path, stepper: Stepper, n_features: int, above: float | None = None) -> None:
    """Take the tables from disk, or their entries |v| > above. Raises MemoryLimitError where they do not fit."""
    for first, counts, labels, values in stored_tables(path, n_features, stepper.tables.n_labels, ENTRIES):
        if above is not None:
            kept = np.abs(values) > above
            counts = np.diff(np.concatenate([[0], np.cumsum(kept)])[np.concatenate([[0], np.cumsum(counts)])])
            counts, labels, values = counts.astype(np.int32), labels[kept], values[kept]
        if not enter(first, stepper.tables, counts, labels, values):
            bound = format_size(stepper.tables.most_bytes)
            raise MemoryLimitError(
                f"{path}: these tables take more than the {bound} that the memory limit leaves them: go on with a larger "
                + flags.MEMORY_LIMIT
            )


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
            read_tables(Path(self.folder), stepper, d, begins)
        return stepper


def keep(data: Data, stepper: Stepper, folder: str) -> None:
    """Leave tables in this process for the next job: as they are on disk in a folder."""
    _sessions[data.work] = _Session(stepper, folder)
