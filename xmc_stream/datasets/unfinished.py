"""What lies at a path that a command has not finished, or is making now: a model, predictions, a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xmc_stream.engine.ledger import IDENTITY, read_ledger
from xmc_stream.engine.making import COMMAND
from xmc_stream.engine.summary import describe_unfinished, unfinished_run


def unfinished(path: Path) -> dict[str, Any] | None:
    """kind, running (None where nothing tells), next (what to do) and more; None where nothing is under way.

    path: that of what is to be, or of the folder that it is made in. Raises StoreError where a ledger is damaged.
    """
    if path.exists() and not path.name.endswith(".partial"):
        return None
    if work := unfinished_run(path):
        return describe_unfinished(work)
    work = path if path.name.endswith(".partial") else path.with_name(path.name + ".partial")
    if (work / "ledger").is_file():  # see `engine.making`
        receipts, running = read_ledger(work / "ledger")
        command = receipts.get(IDENTITY, {}).get(COMMAND, "convert")
        return {
            "kind": "unfinished dataset",
            "running": running,
            "jobs_done": max(len(receipts) - 1, 0),
            "next": "it is running now" if running else f"give the same {command} command again: it goes on",
        }
    if all((work / name / "zarr.json").is_file() for name in ("labels", "scores")):
        said = "it is running now, or was killed: the same predict command begins anew"
        return {"kind": "unfinished predictions", "running": None, "next": said}
    return None
