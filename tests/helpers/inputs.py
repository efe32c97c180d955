"""A small input of every format that `convert` reads, by the names of the registry."""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from helpers.anndata_files import annotated

Row = dict[str, Any]
N, D, K = 30, 8, 4


def write_jsonl(path: Path, rows: Sequence[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_table(path: Path, rows: Sequence[Row], delimiter: str = ",") -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(path: Path, rows: Sequence[Row]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)


# how rows of text are written, by format, and another name for CSV's tabs
TEXTS: dict[str, Callable[[Path, Sequence[Row]], None]] = {
    "jsonl": write_jsonl,
    "csv": write_table,
    "tsv": lambda path, rows: write_table(path, rows, "\t"),
    "parquet": write_parquet,
}


def rows_of_text(labels: Callable[[int], Any] = lambda i: f"label {i % K}") -> list[Row]:
    return [{"nr": f"row {i}", "text": f"some words of row{i}", "tags": labels(i)} for i in range(N)]


def matrices() -> tuple[Any, Any]:
    """X (N x D) and the class of each row."""
    rng = np.random.default_rng(0)
    return np.abs(rng.normal(size=(N, D))).astype(np.float32) + 1, rng.integers(0, K, N)


def _lines(X: Any) -> list[str]:
    return [" ".join(f"{j}:{value}" for j, value in enumerate(row)) for row in X]


def an_input(form: str, folder: Path) -> tuple[Path, dict[str, Any], list[Path]]:
    """What is converted, the options of that, and all files that are read for it."""
    from xmc_stream.convert.options import TextOptions

    X, y = matrices()
    path = folder / f"in.{form}"
    if form in TEXTS:
        TEXTS[form](path, rows_of_text())
        return path, {"text": TextOptions(label_field="tags")}, [path]
    lines = [f"{label} {line}\n" for label, line in zip(y, _lines(X), strict=True)]
    if form in ("xmlrepo", "libsvm"):
        path.write_text((f"{N} {D} {K}\n" if form == "xmlrepo" else "") + "".join(lines))
        return path, {}, [path]
    labels = folder / "labels.npy"
    if form == "npz":
        sparse.save_npz(path, sparse.csr_matrix(X))
        np.save(labels, y)
        return path, {"labels": labels}, [path, labels]
    if form == "npy":
        np.save(path, X)
        np.save(labels, y)
        return path, {"labels": labels}, [path, labels]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import anndata

        annotated(anndata, sparse.csr_matrix(X), y).write_h5ad(path)
    return path, {"label_key": "kind"}, [path]
