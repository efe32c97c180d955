"""Threads of this process that run jobs: as many at a time, errors as they were raised, nothing begun that is not wanted."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from xmc_stream.errors import InputError, JobError
from xmc_stream.runtime.engine import Engine, Threads
from xmc_stream.runtime.job import Done, Failed, Loop, Notes, Phase, Receipt
from xmc_stream.system.memory import MemoryLimit
from xmc_stream.system.stop import stop_if_unwanted


@dataclass
class Meeting:
    """How many are there at a time, and the most that ever were."""

    now: int = 0
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def come(self, by: int) -> None:
        with self.lock:
            self.now += by
            self.most = max(self.most, self.now)


@dataclass(frozen=True)
class Meets:
    key: str
    meeting: Meeting

    def run(self) -> Receipt:
        self.meeting.come(1)
        time.sleep(0.05)
        self.meeting.come(-1)
        return {"key": self.key}


@dataclass(frozen=True)
class Raises:
    error: BaseException
    key: str = "raises"

    def run(self) -> Receipt:
        raise self.error


@dataclass(frozen=True)
class Waits:
    """Runs until nobody wants it, or a second is over."""

    key: str
    begun: threading.Event

    def run(self) -> Receipt:
        self.begun.set()
        end = time.monotonic() + 20
        while time.monotonic() < end:
            stop_if_unwanted()
            time.sleep(0.005)
        return {}


@pytest.mark.parametrize("threads", [1, 3])
def test_as_many_jobs_as_threads_run_at_a_time(threads: int) -> None:
    meeting = Meeting()
    jobs = [Meets(str(i), meeting) for i in range(7)]

    def loop() -> Loop:
        receipts = yield Phase("meet", jobs)
        return {"keys": [receipt["key"] for receipt in receipts]}

    with Engine(MemoryLimit.of("3GB"), threads) as engine:
        assert engine.run(loop(), Notes()) == {"keys": [job.key for job in jobs]}  # in the order of the phase
    assert meeting.most == threads


def test_an_error_that_is_not_ours_names_the_job() -> None:
    def loop(error: BaseException) -> Loop:
        yield Phase("raise", [Raises(error)])
        return {}

    for error, said in (
        (ZeroDivisionError("by zero"), "job raises failed: ZeroDivisionError: by zero"),
        (OSError(5, "Input/output error"), "job raises: .*Input/output error: mend that"),
        (OSError(28, "No space left on device"), "job raises: .*make room there"),
    ):
        with pytest.raises(JobError, match=said), Engine(MemoryLimit.of("3GB"), 1) as engine:
            engine.run(loop(error), Notes())


def test_what_is_withdrawn_stops_and_what_waits_does_not_begin() -> None:
    threads, first, second = Threads(1, "a run"), threading.Event(), threading.Event()
    futures = [threads.submit(Waits("first", first)), threads.submit(Waits("second", second))]
    assert first.wait(10)
    assert threads.jobs_here() == 1
    threads.withdraw(futures)
    ended = [threads.next_ended(), threads.next_ended()]
    assert ended == futures
    for key, future in zip(("first", "second"), ended, strict=True):
        assert threads.outcome(Waits(key, first), future) == Failed(JobError, f"job {key} was stopped")
    assert not second.is_set()
    assert threads.jobs_here() == 0
    threads.close()


def test_threads_end_when_they_are_closed() -> None:
    def ours() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("xmc-stream-job")]

    threads = Threads(2, "another run")
    for i in range(2):
        threads.submit(Meets(str(i), Meeting()))
    assert all(isinstance(threads.next_ended().result(), Done) for _ in range(2))
    assert len(ours()) == 2
    threads.close()
    end = time.monotonic() + 10
    while ours() and time.monotonic() < end:
        time.sleep(0.01)
    assert not ours()


def test_an_error_of_ours_keeps_its_kind() -> None:
    threads = Threads(1, "a third run")
    with pytest.raises(InputError, match="what, where"):
        threads.once(Raises(InputError("what, where, what to do")))
    threads.close()


def test_a_run_in_this_process_loads_neither_dask_nor_zarr(tmp_path: Path) -> None:
    """They take half of a second, and 30 MB of the limit."""
    code = """
import sys
import numpy as np, scipy.sparse as sp, xmc_stream as xs
X = sp.csr_matrix(np.repeat(np.eye(3, dtype=np.float32), 10, axis=0))
data = xs.convert(X, sys.argv[1] + "/data.xmc", labels=X)
xs.PPDSparse(memory_limit="2GB").fit(data, model=sys.argv[1] + "/m")
print(sorted({"dask", "distributed", "zarr"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""
