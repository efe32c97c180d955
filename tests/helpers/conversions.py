"""Small texts, what is in them, and what conversions of them are checked by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from xmc_stream.convert import convert
from xmc_stream.convert.formats.xmlrepo import XMLRepoText
from xmc_stream.convert.lines import files as text_module
from xmc_stream.convert.options import ConvertOptions
from xmc_stream.errors import InputError
from xmc_stream.store.dataset import Dataset

TEXT = b"5 4 3\n0,2 3:0.5 0:-2\n 1:3\n1\n\n2 0:1 1:2 2:2 3:0\n"


X = np.array([[-2, 0, 0, 0.5], [0, 3, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [1, 2, 2, 0]], np.float32)


Y = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 1]])


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def dense(dataset: Dataset) -> tuple[Any, Any]:
    """X and Y, by rows; Y by columns must agree."""
    n, (x, y) = dataset.n_samples, (dataset.X_rows(), dataset.Y_rows())
    a, b, c = x.block(0, n), y.block(0, n), dataset.Y_columns().block(0, dataset.n_labels)
    assert b.data is None
    X = sparse.csr_array((a.values, a.indices, a.indptr), shape=(n, dataset.n_features))
    Y = sparse.csr_array((np.ones(len(b.indices), int), b.indices, b.indptr), shape=(n, dataset.n_labels))
    columns = sparse.csc_array((np.ones(len(c.indices), int), c.indices, c.indptr), shape=Y.shape)
    assert (columns.toarray() == Y.toarray()).all()
    assert (dataset.feature_counts() == np.bincount(a.indices, minlength=dataset.n_features)).all()
    assert (dataset.label_counts() == Y.toarray().sum(0)).all()
    return X.toarray(), Y.toarray()


def opened(paths: list[Path], *labels: Path) -> XMLRepoText:
    """The source of these files, whose headers are read."""
    return XMLRepoText(paths, ConvertOptions(labels=labels), None)


def refused(target: Path, *args: Any, kind: type[Exception] = InputError, **options: Any) -> str:
    """The message of a conversion that fails; nothing is left of it."""
    before = sorted(target.parent.iterdir())
    with pytest.raises(kind) as caught:
        convert(*args, target, **options)
    assert sorted(target.parent.iterdir()) == before
    message = str(caught.value)
    assert message.isprintable(), "more than one line"
    return message


BOM = b"\xef\xbb\xbf"


def lines_of(n: int, base: int = 0) -> list[bytes]:
    """Rows of 40 features and 9 labels, some empty, some long."""
    rows = []
    for i in range(n):
        pairs = [b"%d:%d.%d" % (j + base, i, j) for j in range(0, 40, 1 + i % 17)] if i % 11 else []
        rows.append((b"%d,%d " % (i % 4 + base, 5 + i % 4 + base) if i % 7 else b" ") + b" ".join(pairs))
    return rows


INPUTS = {
    "xmlrepo": b"\n".join([b"60 40 9", *lines_of(60), b""]),
    "no last newline": b"\n".join([b"60 40 9", *lines_of(60)]),
    "windows": BOM + b"\r\n".join([b"60 40 9", *lines_of(60), b""]),
    "libsvm": BOM + b"\n".join([b"# made", *lines_of(60, 1), b"# end"]),
    "header alone": b"0 40 9",
    "no rows": b"0 40 9\r\n",
    "empty rows": b"30 4 2\n" + b"\n" * 30,
    "csv": b"text,labels\n"
    + b"".join(b'"w%d,\n""w%d"" %s",l%d\n' % (i % 5, i % 7, b"\nw" * (i % 9), i % 3) for i in range(60)),
    "jsonl": b"".join(
        json.dumps({"text": f"w{i % 5} w{i % 7} " * (i % 9 + 1), "labels": [f"l{i % 3}"]}).encode() + b"\n"
        for i in range(60)
    ),
}


def cut_into(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    """Cut files into parts of so many bytes."""
    monkeypatch.setattr(text_module, "_PART", part)
    monkeypatch.setattr(text_module, "_PARTS", 10**6)


def files_of(dataset: Path) -> dict[str, bytes]:
    """Every file under a dataset."""
    return {str(file.relative_to(dataset)): file.read_bytes() for file in dataset.rglob("*") if file.is_file()}
