"""What lies at a path: a dataset or a model, in numbers that cost no pass over it, or what a command has not finished."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.models.model import Model
from xmc_stream.runtime.events import read_events, summarise_events
from xmc_stream.runtime.ledger import IDENTITY, read_ledger, unfinished_run
from xmc_stream.runtime.making import COMMAND
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import folder_bytes
from xmc_stream.store.inventory import LOGS, SEAL
from xmc_stream.store.model import KIND
from xmc_stream.store.places import LOCK, work_folder
from xmc_stream.system.memory import format_size

_ALL = 1 << 20  # rows up to which the numbers a row are of all rows
_WINDOWS, _WINDOW = 128, 1 << 12  # ranges of rows that are looked at where there are more, and rows of one
_QUANTILES = {"min": 0.0, "10%": 0.1, "25%": 0.25, "median": 0.5, "75%": 0.75, "90%": 0.9, "99%": 0.99, "max": 1.0}
_HEAD = 100  # the head is one label in so many, at least one
_KINDS = {
    **dict.fromkeys(("convert", "append", "split", "select-features"), "dataset"),
    **dict.fromkeys(("compact", "save"), "model"),
    "predict": "predictions",
    "export": "file",
}
_GOES_ON = ("convert", "append", "copy")


def summarise(dataset: Dataset) -> dict[str, Any]:
    """Numbers of a dataset, beside its attributes; shares are of one.

    density of X; features_per_row, labels_per_row and mean_row_norm of rows_read rows: of all up to 2^20, beyond that of
    2^19 in 128 evenly spaced windows; label_frequency: positives of a label; head_labels: the most frequent 1 % of labels;
    head_share: their share of the positives; labels_without, labels_once, labels_up_to_5: how many labels have so many.
    """
    n, d = dataset.n_samples, dataset.n_features
    starts = [(n - _WINDOW) * i // (_WINDOWS - 1) for i in range(_WINDOWS)]
    runs = [(0, n)] if n <= _ALL else [(start, start + _WINDOW) for start in starts]
    x, y = dataset.X_rows(), dataset.Y_rows()
    features = np.concatenate([np.diff(x.ends(a, b)) for a, b in runs])
    labels = np.concatenate([np.diff(y.ends(a, b)) for a, b in runs])
    norms = [dataset.row_norms(a, b) for a, b in runs]
    counts = np.sort(dataset.label_counts())
    head = max(1, len(counts) // _HEAD)
    return {
        "density": x.nnz / (n * d) if n and d else 0.0,
        "rows_read": len(features),
        "features_per_row": _spread(features),
        "labels_per_row": _spread(labels),
        "rows_without_features": int((features == 0).sum()),
        "rows_without_labels": int((labels == 0).sum()),
        "mean_row_norm": float(np.concatenate(norms).mean(dtype=np.float64)) if n else 0.0,
        "label_frequency": _spread(counts),
        "head_labels": min(head, len(counts)),
        "head_share": float(counts[-head:].sum() / counts.sum()) if y.nnz else 0.0,
        "labels_without": int((counts == 0).sum()),
        "labels_once": int((counts == 1).sum()),
        "labels_up_to_5": int((counts <= 5).sum()),
        "bytes_on_disk": folder_bytes(dataset.path),
        "bytes_by_part": {name: folder_bytes(part) for name, part in _parts(dataset.path)},
    }


def describe(model: Model) -> dict[str, Any]:
    """Sizes and report of a model, for `info`; run: what its event log says in sum (see `summarise_events`), and totals."""
    n_bytes = folder_bytes(model.path)
    hidden = ("tiles", "units", "identity", KIND, LOGS, SEAL)
    shown = {name: value for name, value in model.attributes.items() if name not in hidden}
    run = {**shown.pop("run", {}), "rounds": shown.get("rounds"), **summarise_events(model.path / "events.jsonl")}
    return {**shown, "bytes_on_disk": n_bytes, "size": format_size(n_bytes), "run": run}


def _spread(numbers: NDArray[np.int64]) -> dict[str, float]:
    """Mean and quantiles: numbers that occur."""
    if not len(numbers):
        return {"mean": 0.0, **dict.fromkeys(_QUANTILES, 0)}
    quantiles = np.quantile(numbers, list(_QUANTILES.values()), method="lower")
    return {"mean": float(numbers.mean()), **{name: int(q) for name, q in zip(_QUANTILES, quantiles, strict=True)}}


def _parts(path: Path) -> list[tuple[str, Path]]:
    """Matrices and what else lies in a dataset."""
    sides = [part for side in ("X", "Y") for part in sorted((path / side).iterdir()) if part.is_dir()]
    others = [part for part in sorted(path.iterdir()) if part.is_dir() and part.name not in ("X", "Y")]
    return [(str(part.relative_to(path)), part) for part in [*sides, *others]]


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
