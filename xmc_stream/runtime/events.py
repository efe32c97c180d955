"""The event log of a run: a JSON line an event, for `info` and pictures.

event: start, phase (jobs: how many it has; done: how many of them an earlier session did; unit, number: how far the run is
in its method's own terms, for instance "pass" and 3, or ""), job, again (job: is made again,
as what it left is damaged; of PD-Sparse a pass, and all that follow), memory (the most since the line before), end, error
or interrupted (of a session; one that was killed has none). Every line has all keys.
bytes_read and seconds are a job's; resident, private (anonymous) and mapped (file-backed) bytes those of `process`, peak
its largest resident size so far, limit that of the session.

The log is no part of what a run needs: where it cannot be written, lines are lost and the run goes on.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xmc_stream.runtime.job import this_process
from xmc_stream.system.files import regular
from xmc_stream.system.memory import Usage

_SAMPLES = 1000  # memory is noted once a second so often, then at intervals of such a part of the time gone by
MOST = ("resident", "private", "mapped")
_LONGEST = 1 << 16  # bytes of a line
_KINDS = {
    "event": str, "phase": str,
    **dict.fromkeys(("time", "seconds", "bytes_read", "jobs", "done", "limit", *MOST), int | float),
}  # fmt: skip


class EventLog:
    """Appends events. path: None for no log. limit: bytes. A context manager."""

    def __init__(self, path: Path | None, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._phase = ""
        self._most = Usage(0, 0, 0)
        self._broken = False  # the last line may not be whole
        self._began = self._last_sample = time.monotonic()
        self._file = None
        if path is not None:
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 (closed by close)
            if self._file.seek(0, os.SEEK_END):
                self._file.seek(-1, os.SEEK_END)
                self._broken = self._file.read(1) != b"\n"

    def close(self) -> None:
        """Write no more."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def phase(self, name: str, jobs: int, done: int, unit: str = "", number: int = 0) -> None:
        """A phase of so many jobs begins, some of which were done before."""
        self._phase = name
        self.add("phase", jobs=jobs, done=done, unit=unit, number=number)

    def sample(self, usage: Usage) -> None:
        """Memory of this process now; noted now and then, at its largest since the last line."""
        with self._lock:
            self._most = self._most.largest(usage)
        now = time.monotonic()
        if now - self._last_sample >= max(1.0, (now - self._began) / _SAMPLES):
            self._last_sample = now
            self.add("memory")

    def add(self, event: str, usage: Usage | None = None, process: str = "", **more: Any) -> None:
        """Note an event. usage: of another process; else the largest of this one since the last line."""
        with self._lock:
            if self._file is None:
                return
            if usage is None or process == this_process():
                usage = self._most.largest(usage or Usage.now())
                self._most = Usage(0, 0, 0)
            line = {
                "time": round(time.time(), 3), "event": event, "phase": self._phase, "job": "", "jobs": 0, "done": 0,
                "unit": "", "number": 0, "seconds": 0.0, "bytes_read": 0, "resident": usage.resident,
                "private": usage.private, "mapped": usage.mapped, "peak": 0, "limit": self._limit,
                "process": process or this_process(), **more,
            }  # fmt: skip
            text = b"\n" * self._broken + json.dumps(line).encode() + b"\n"
            try:
                self._broken = self._file.write(text) != len(text)
            except OSError:
                self._broken = True


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a log; a line that is damaged, or not whole, is passed over."""
    try:
        with open(path, "rb", opener=regular) as file:
            while line := file.readline(_LONGEST):
                try:
                    event = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(event, dict) and all(isinstance(event.get(name), kind) for name, kind in _KINDS.items()):
                    yield event
    except FileNotFoundError:
        return


def summarise_events(path: Path) -> dict[str, Any]:
    """What a log says in sum.

    sessions, resumed, seconds (of all sessions), limits, peak_resident, peak_private, peak_mapped, phases: in their
    order, each phase, jobs, jobs_in_all, seconds (from its beginning to its last event), job_seconds (of all its jobs),
    bytes_read, bytes_per_second and peaks. workers: processes that ran jobs (host and number), each with jobs, job_seconds,
    bytes_read and peak_resident.
    """
    phases: dict[str, dict[str, Any]] = {}
    workers: dict[str, dict[str, Any]] = {}
    limits: list[int] = []
    sessions, seconds = 0, 0.0
    began = last = entered = 0.0
    peaks = dict.fromkeys(MOST, 0)
    for event in read_events(path):
        if event["event"] == "start":
            seconds += last - began
            sessions, began = sessions + 1, event["time"]
        last = event["time"]
        if event["limit"] not in limits:
            limits.append(event["limit"])
        for name in MOST:
            peaks[name] = max(peaks[name], event[name])
        if not event["phase"]:
            continue
        phase = phases.setdefault(
            event["phase"],
            {"phase": event["phase"], "jobs": 0, "jobs_in_all": 0, "seconds": 0.0, "job_seconds": 0.0, "bytes_read": 0,
             **{f"peak_{name}": 0 for name in MOST}},
        )  # fmt: skip
        if event["event"] == "phase":
            phase["jobs_in_all"], entered = event["jobs"], last
        elif event["event"] in ("job", "memory"):
            phase["seconds"] += last - entered
            entered = last
            if event["event"] == "job":
                name = str(event.get("process", ""))
                mine = workers.setdefault(
                    name, {"process": name, "jobs": 0, "job_seconds": 0.0, "bytes_read": 0, "peak_resident": 0}
                )
                mine["peak_resident"] = max(mine["peak_resident"], event["resident"])
                for of in (phase, mine):
                    of["jobs"] += 1
                    of["job_seconds"] += event["seconds"]
                    of["bytes_read"] += event["bytes_read"]
            for name in MOST:
                phase[f"peak_{name}"] = max(phase[f"peak_{name}"], event[name])
    for phase in phases.values():
        phase["bytes_per_second"] = round(phase["bytes_read"] / phase["seconds"]) if phase["seconds"] > 0 else 0
        phase["seconds"], phase["job_seconds"] = round(phase["seconds"], 3), round(phase["job_seconds"], 3)
    return {
        "sessions": sessions,
        "resumed": sessions > 1,
        "seconds": round(seconds + last - began, 3),
        "limits": limits,
        **{f"peak_{name}": value for name, value in peaks.items()},
        "phases": list(phases.values()),
        "workers": [{**of, "job_seconds": round(of["job_seconds"], 3)} for of in workers.values()],
    }
