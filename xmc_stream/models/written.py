"""Predictions as files: a .npz of arrays, or lines of text, to a file or to standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xmc_stream.errors import InputError
from xmc_stream.store.names import WINDOW, Names
from xmc_stream.store.predictions import Predictions

if TYPE_CHECKING:
    from xmc_stream.runtime.plan import Needs
    from xmc_stream.store.dataset import Dataset

STANDARD_OUTPUT = Path("-")
FILES = (".npz", ".txt", ".jsonl")
# of files of data that nothing here writes: a folder or a text of such a name would mislead
_OTHERS = frozenset(
    ".arff .arrow .avro .bin .bz2 .csv .dat .db .feather .gz .h5 .h5ad .hdf5 .html .ipc .joblib .json .libsvm .mat .md .mtx "
    ".ndjson .npy .ods .orc .parquet .pb .pkl .pickle .pq .pt .safetensors .sqlite .svm .tar .tsv .xls .xlsx .xml .xz .yaml "
    ".yml .zip .zst".split()
)
_ESCAPES = str.maketrans({"\\": r"\\", "\t": r"\t", "\n": r"\n", "\r": r"\r"})


def is_file(out: Path) -> bool:
    """Whether predictions of this name go to a file, and not to a store. Raises InputError for a file of another kind."""
    if out.suffix.lower() in _OTHERS:
        raise InputError(
            f"{out}: no {out.suffix} is written: predictions go to a name that ends in {', '.join(FILES)}, or to a folder of "
            "any other name"
        )
    return out.suffix.lower() in FILES


def file_needs(out: Path, dataset: Dataset, k: int) -> dict[str, Needs]:
    """What writing predictions of some samples as a file of that name needs, see `Together`."""
    if out.suffix.lower() != ".npz":
        return {}
    n, longest = dataset.n_samples, _longest(dataset.row_ids())
    return {f"writing {out.name}": lambda _: {"labels and scores": 24 * n * k, "ids of rows": 4 * n * longest}}


def _longest(ids: Names | None) -> int:
    return max((len(name) for window in ids.windows() for name in window), default=0) if ids else 0


def write_file(predictions: Predictions, out: Path, kind: str, names: Names | None) -> None:
    """Write predictions to a file. kind: one of FILES; names: of labels."""
    if kind == ".npz":
        _write_arrays(predictions, out)
    else:
        with open(out, "wb") as file:
            file.writelines(_objects(predictions, names) if kind == ".jsonl" else _lines(predictions))


def write_standard_output(predictions: Predictions, names: Names | None) -> None:
    """Write an object a row, as to a .jsonl file."""
    sys.stdout.buffer.writelines(_objects(predictions, names))
    sys.stdout.buffer.flush()


def _write_arrays(predictions: Predictions, out: Path) -> None:
    n, ids = predictions.n_samples, predictions.row_ids()
    labels, scores = predictions.rows(0, n)
    arrays: dict[str, Any] = {"labels": labels, "scores": scores}
    if ids is not None:
        arrays["ids"] = np.empty(n, f"U{max(_longest(ids), 1)}")
        for start in range(0, n, WINDOW):
            arrays["ids"][start : start + WINDOW] = ids.read(start, min(start + WINDOW, n))
    with open(out, "wb") as file:
        np.savez(file, **arrays)


def _blocks(predictions: Predictions) -> Iterator[tuple[Any, Any, list[str] | None]]:
    """Labels, scores and ids of some rows at a time."""
    ids = predictions.row_ids()
    for start, labels, scores in predictions.blocks():
        yield labels, scores, None if ids is None else ids.read(start, start + len(labels))


def _objects(predictions: Predictions, names: Names | None) -> Iterator[bytes]:
    """{"id": ..., "labels": [...], "scores": [...]} of each row; labels by their names, if they have any."""
    for labels, scores, ids in _blocks(predictions):
        found = np.unique(labels[labels >= 0]).astype(np.int64)
        called: dict[int, Any] = dict(zip(found.tolist(), names.take(found) if names else found.tolist(), strict=True))
        for row, values, name in zip(labels.tolist(), scores.tolist(), ids or repeat(None), strict=False):
            n = sum(label >= 0 for label in row)  # behind them are -1
            best = {"labels": [called[i] for i in row[:n]], "scores": [float(f"{v:.6g}") for v in values[:n]]}
            yield (json.dumps({"id": name, **best} if ids else best, ensure_ascii=False) + "\n").encode()


def _lines(predictions: Predictions) -> Iterator[bytes]:
    """`label:score label:score ...` of each row, behind `id TAB` if rows have ids."""
    for labels, scores, ids in _blocks(predictions):
        for row, values, name in zip(labels.tolist(), scores.tolist(), ids or repeat(None), strict=False):
            pairs = (f"{label}:{value:.6g}" for label, value in zip(row, values, strict=True) if label >= 0)
            before = "" if name is None else name.translate(_ESCAPES) + "\t"
            yield (before + " ".join(pairs) + "\n").encode()
