"""Trainings by command, longer than the small set needs, and their kills."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helpers.forked import forked_command, run_forked

# enough rounds and epochs to be caught in; seconds of work
SETTINGS = ["--set", "epochs=20", "--set", "last_epochs=40"]


def words(data: Path, model: Path, limit: str, threads: int, more: Sequence[Any] = ()) -> list[str]:
    """Of a command."""
    arguments = [data, model, "--memory-limit", limit, "--threads", threads, *SETTINGS, *more]
    return ["train", *map(str, arguments)]


def train(data: Path, model: Path, limit: str = "1GB", threads: int = 2, more: Sequence[Any] = ()) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads(run_forked(*words(data, model, limit, threads, more), "--json"))
    return figures


def kill_when(
    data: Path, model: Path, ready: str, delay: float, limit: str = "1GB", threads: int = 2, more: Sequence[Any] = ()
) -> bool:
    """Start training and kill it once `ready` stands in the ledger and `delay` seconds more; False if it ended first."""
    ledger = model.with_name(model.name + ".partial") / "ledger.jsonl"
    with forked_command(*words(data, model, limit, threads, more)) as run:
        run.wait_until(lambda: ledger.exists() and ready in ledger.read_text(errors="replace"))
        time.sleep(delay)
        if run.poll() is not None:
            return False
        run.kill()
    return not model.exists()
