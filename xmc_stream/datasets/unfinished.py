"""What lies at a path that a command has not finished, or is making now: a model, predictions, a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xmc_stream.runtime.events import read_events, summarise_events
from xmc_stream.runtime.ledger import IDENTITY, read_ledger, unfinished_run
from xmc_stream.runtime.making import COMMAND
from xmc_stream.store.places import LOCK, work_folder

_KINDS = {
    **dict.fromkeys(("convert", "append", "split", "select-features"), "dataset"),
    **dict.fromkeys(("compact", "save"), "model"),
    "predict": "predictions",
    "export": "file",
}
_GOES_ON = ("convert", "append", "copy")


def unfinished(path: Path) -> dict[str, Any] | None:
    """kind, running (None where nothing tells), next (what to do) and more; None where nothing is under way.

    path: that of what is to be, or of the folder that it is made in. Raises StoreError where a ledger is damaged.
    """
    if path.exists() and not path.name.endswith(".partial"):
        return None
    if work := unfinished_run(path):
        return describe_unfinished(work)
    work = path if path.name.endswith(".partial") else work_folder(path)
    if (work / LOCK).is_file():  # see `runtime.making`
        receipts, running = read_ledger(work / LOCK)
        command = receipts.get(IDENTITY, {}).get(COMMAND, "convert")
        again = "it goes on" if command in _GOES_ON else "it begins anew"
        return {
            "kind": f"unfinished {_KINDS.get(command, 'store')}",
            "running": running,
            "jobs_done": max(len(receipts) - 1, 0),
            "next": "it is running now" if running else f"give the same {command} command again: {again}",
        }
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
