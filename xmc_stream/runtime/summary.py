"""What the ledger and the event log of a run say in sum, for `info`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xmc_stream.runtime.events import MOST, read_events
from xmc_stream.runtime.ledger import IDENTITY, read_ledger


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
            phase["jobs"] += event["event"] == "job"
            phase["seconds"] += last - entered
            phase["job_seconds"] += event["seconds"]
            phase["bytes_read"] += event["bytes_read"]
            entered = last
            if event["event"] == "job":
                _count(workers, event)
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


def _count(workers: dict[str, dict[str, Any]], job: Mapping[str, Any]) -> None:
    """Add a job to what its process did."""
    name = str(job.get("process", ""))
    mine = workers.setdefault(
        name, {"process": name, "jobs": 0, "job_seconds": 0.0, "bytes_read": 0, "peak_resident": 0}
    )
    mine["jobs"] += 1
    mine["job_seconds"] += job["seconds"]
    mine["bytes_read"] += job["bytes_read"]
    mine["peak_resident"] = max(mine["peak_resident"], job["resident"])


def unfinished_run(path: Path) -> Path | None:
    """The folder of the run that is making, or was making, a model at `path`, if there is one."""
    for work in (path, path.with_name(path.name + ".partial")):
        if work.name.endswith(".partial") and (work / "ledger.jsonl").is_file():
            return work
    return None


def describe_unfinished(work: Path) -> dict[str, Any]:
    """How far a run is. running: whether a process is at it now.

    By the name of the method's unit (round, pass, alternation, iteration) which one it is in; nothing before the first.
    Raises StoreError where the ledger is damaged.
    """
    receipts, running = read_ledger(work / "ledger.jsonl")
    identity = receipts.get(IDENTITY, {})
    phase, jobs, done = "", 0, 0
    at: dict[str, int] = {}
    for event in read_events(work / "events.jsonl"):
        if event["event"] == "phase":
            phase, jobs, done = event["phase"], event["jobs"], event["done"]
            if event.get("unit"):
                at = {event["unit"]: event["number"]}
        elif event["event"] == "job":
            done += 1
    return {
        "kind": "unfinished model",
        **{name: identity.get(name) for name in ("solver", "params", "seed")},
        "running": running,
        **at,
        "phase": phase,
        "jobs_done": done,
        "jobs_in_phase": jobs,
        "next": "it is running now" if running else "give the same train command again: it goes on",
        "run": summarise_events(work / "events.jsonl"),
    }
