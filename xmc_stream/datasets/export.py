"""Datasets as XMLRepo or libsvm text or scipy matrices, models as scipy matrices: streamed, in bounded memory."""

from __future__ import annotations

import gzip
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.arguments import native_arguments
from xmc_stream.datasets.kernels.format import VALUE_BYTES, write_rows
from xmc_stream.datasets.passes import block_bytes
from xmc_stream.errors import InputError
from xmc_stream.kernels.calibration import CAP, SHIFT, SLOPE, TOP
from xmc_stream.models.calibration import Calibration
from xmc_stream.models.kind import Beside
from xmc_stream.models.model import Model, compare, load_model
from xmc_stream.runtime.check import checked_reading
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.making import COMMAND, STORE, make
from xmc_stream.runtime.plan import MIB
from xmc_stream.store.dataset import SIZES, Dataset, as_dataset
from xmc_stream.store.encoding import index_dtype
from xmc_stream.store.inventory import SEAL
from xmc_stream.store.matrix import SparseMatrix, stream
from xmc_stream.store.model import is_model
from xmc_stream.store.places import target_path, target_paths, work_folder
from xmc_stream.store.remote import as_path
from xmc_stream.system.memory import MemoryLimit, peak_resident
from xmc_stream.system.progress import current, working

STANDARD_OUTPUT = Path("-")
_FORMATS = ("xmlrepo", "libsvm", "npz")
_WINDOW = 1 << 19  # items of an array that are passed on at a time
_BLOCKS = 16  # one in so many bytes is for X in a block of rows
_FIRST_ZIP_TIME = (1980, 1, 1, 0, 0, 0)  # equal data make equal files

Values = Iterator[NDArray[Any]]


@native_arguments
def export(
    data: str | Path | Dataset,
    out: str | Path,
    *,
    format: str | None = None,
    base: int | None = None,
    labels: str | Path | None = None,
    check: bool = True,
    memory_limit: str | float | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    """Write a dataset as text or scipy matrices, or the weights of a model as a scipy matrix.

    A name that ends in .npz takes matrices as scipy.sparse.save_npz writes them. Of a dataset these are X (N x D, csr)
    and, in a file beside it, Y (N x K, csr of ones). Of a model with weights by class it is W (D x K, csc), with a
    member `bias` (K,). Of label trees the columns are nodes and labels, and docs/tree.md says how to score by what stands
    beside them. A calibrated model has members `slope`, `shift`, `cap` and `top` (K,) too. With s = w.x + bias
    and z = slope s + shift, the score is z, or top + (z - cap) / 100 where z > cap. Any other name takes text.

    Parameters
    ----------
    data : Dataset, str or Path
        The dataset, its path, or the path of a model.
    out : str or Path
        The file to write. Text is compressed where the name ends in .gz. "-" is standard output, for text.
    format : {"xmlrepo", "libsvm", "npz"} or None, default None
        "xmlrepo": text with a header, ids from 0. "libsvm": text without a header. None: "npz" where `out` ends in
        .npz, else "xmlrepo".
    base : {0, 1} or None, default None
        The first id of libsvm text, 1 by default. With 0, a reader that finds no id 0 would take 1 for the first id.
        XMLRepo text and matrices count from 0.
    labels : str, Path or None, default None
        Of a dataset as matrices: the file of Y. None: NAME-labels.npz beside NAME.npz.
    check : bool, default True
        Compare a model with its checksums first, and a dataset as it is read. False saves a little time, and damage may go
        unseen into what is written.
    memory_limit : str, int, float or None, default None
        Peak resident memory of the process, as "512MB" or in bytes. None: what it holds, and three quarters of what is
        free.
    overwrite : bool, default False
        Replace files at these names.
    progress : bool, default False
        Show a bar on stderr, where that is a terminal.

    Returns
    -------
    dict
        exported (the path), format, labels (the path, if there is one), the sizes of what was written, bytes_out (of
        files), seconds and peak_rss (bytes).

    Raises
    ------
    InputError
        An argument is out of range, something stands at `out`, or the model has no weights by class.
    StoreError
        The dataset or the model cannot be opened, or is damaged.
    MemoryLimitError
        The memory limit cannot work.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
    >>> X = sp.csr_matrix(np.repeat(np.eye(3, dtype=np.float32), 10, axis=0))  # row i has label i // 10
    >>> data = xs.convert(X, "export.xmc", labels=X)
    >>> report = xs.export(data, "export.npz")
    >>> report["labels"], sp.load_npz("export.npz").shape
    ('export-labels.npz', (30, 3))
    """
    began = time.perf_counter()
    limit, to_stdout = MemoryLimit.kept(memory_limit), str(out) == str(STANDARD_OUTPUT)
    out = STANDARD_OUTPUT if to_stdout else target_path(out)
    format = format or ("npz" if out.suffix == ".npz" else "xmlrepo")
    base = int(format == "libsvm") if base is None else base
    data = data if isinstance(data, Dataset) else as_path(data)
    of_model = not isinstance(data, Dataset) and is_model(data)
    targets = _targets(out, labels, format, base, of_model)
    source = load_model(data) if of_model else as_dataset(data)  # type: ignore[arg-type]

    def refuse(target: Path) -> None:
        if target.exists() and not (overwrite and target.is_file()):
            raise InputError(f"{target} exists: give another name, or " + flags.OVERWRITE + " to replace a file")

    def write(files: Sequence[Path]) -> Receipt:
        if isinstance(source, Model):
            return _model_npz(source, files[0], limit)
        if format == "npz":
            return _matrices(source, files, limit)
        return _text(source, files[0], out.suffix == ".gz", format, base, limit)

    if check and isinstance(source, Model):
        compare(source)
    with working("export", progress), checked_reading(*([] if of_model else [source.path]), check=check):
        current().phase(f"writing {out.name}")
        if to_stdout:
            report = write([out])
        else:
            targets = target_paths(targets)
            identity = {
                COMMAND: "export", "of": source.attributes.get(SEAL), "format": format, "base": base,
                "to": [str(target.absolute()) for target in targets],
            }  # fmt: skip
            files = [work_folder(target) / STORE for target in targets]
            report = make(targets, identity, lambda work, ledger: write(files), refuse, anew=True)
            del report["resumed"]
            report["bytes_out"] = sum(target.stat().st_size for target in targets)
    return {
        "exported": str(out),
        "format": format,
        **({"labels": str(targets[1])} if len(targets) > 1 else {}),
        **report,
        "seconds": round(time.perf_counter() - began, 3),
        "peak_rss": peak_resident(),
    }


def _targets(out: Path, labels: str | Path | None, format: str, base: int, of_model: bool) -> list[Path]:
    """The files that are written. Raises InputError where what is asked for does not go together."""
    of_matrices = format == "npz"
    for wrong, why in (
        (format not in _FORMATS, f"format must be one of {', '.join(_FORMATS)}. Got {format!r}."),
        (
            base not in (0, 1) or (base == 1 and format != "libsvm"),
            f"ids from {base} are not of the format {format}: give " + flags.FORMAT + " libsvm for ids from 1",
        ),
        (
            of_matrices != (out.suffix == ".npz") or (of_model and not of_matrices),
            f"{out}: scipy matrices, and models, go to a name that ends in .npz, text to any other",
        ),
        (
            labels is not None and (of_model or not of_matrices),
            flags.LABELS + " names the file of Y beside an X in .npz: leave it out",
        ),
    ):
        if wrong:
            raise InputError(why)
    if not of_matrices or of_model:
        return [out]
    return [out, out.with_name(out.stem + "-labels.npz") if labels is None else Path(labels)]


def _sizes(dataset: Dataset) -> dict[str, Any]:
    return {name: dataset.attributes[name] for name in SIZES}


def _matrices(dataset: Dataset, files: Sequence[Path], limit: MemoryLimit) -> dict[str, Any]:
    """X and Y, a file each."""
    limit.check({"windows": 4 * 8 * _WINDOW}, "export")
    matrices, done = (dataset.X_rows(), dataset.Y_rows()), 0
    whole = max(sum(of.nnz for of in matrices), 1)
    for matrix, file in zip(matrices, files, strict=True):
        before, done = done, done + matrix.nnz
        with current().part(before / whole, done / whole):
            _matrix_npz(matrix, file)
    return _sizes(dataset)


def _text(dataset: Dataset, out: Path, compressed: bool, format: str, base: int, limit: MemoryLimit) -> dict[str, Any]:
    """Write the rows; blank_lines are those with neither labels nor features."""
    X, Y = dataset.X_rows(), dataset.Y_rows()
    none = np.zeros(1, np.int64), np.empty(0, X.indices.dtype), np.empty(0, np.float32)
    write_rows(*none, none[0], np.empty(0, Y.indices.dtype), 0, np.empty(0, np.uint8))  # loaded before the plan
    budget = limit.budget()

    def needs(budget: int) -> dict[str, int]:
        x, y = block_bytes(budget // _BLOCKS, X, Y)
        text = text_bytes(y // 8, x // X.entry_bytes, y // Y.entry_bytes, X.shape[1], Y.shape[1])
        return {"rows": 2 * (x + y) + 8 * MIB, "text": text}

    limit.check(needs, "export", budget)
    blank, bar, buffer = 0, current(), np.empty(0, np.uint8)
    with _text_file(out, compressed) as file:
        if format == "xmlrepo":
            file.write(f"{dataset.n_samples} {X.shape[1]} {Y.shape[1]}\n".encode())
        for x, y in stream((X, Y), block_bytes(budget // _BLOCKS, X, Y), 0, dataset.n_samples):
            need = text_bytes(x.n, len(x.indices), len(y.indices), X.shape[1], Y.shape[1])
            buffer = buffer if need <= len(buffer) else np.empty(need, np.uint8)
            n = write_rows(x.indptr, x.indices, x.values, y.indptr, y.indices, base, buffer)
            file.write(buffer[:n].data)
            blank += int(((np.diff(x.indptr) == 0) & (np.diff(y.indptr) == 0)).sum())
            bar.advance((x.start + x.n) / dataset.n_samples)
    return {**_sizes(dataset), "blank_lines": blank}


@contextmanager
def _text_file(path: Path, compressed: bool) -> Iterator[Any]:
    """Where bytes of a text go. compressed: by gzip, with no name or time inside."""
    if path == STANDARD_OUTPUT:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with open(path, "wb") as raw, ExitStack() as stack:
        yield stack.enter_context(gzip.GzipFile("", "wb", 4, raw, mtime=0)) if compressed else raw


def text_bytes(n_rows: int, n_values: int, n_positives: int, n_features: int, n_labels: int) -> int:
    """Bytes of so many rows as text, at most."""
    feature, label = len(str(n_features + 1)), len(str(n_labels + 1))
    return 2 * n_rows + (feature + VALUE_BYTES + 2) * n_values + (label + 1) * n_positives


def _matrix_npz(matrix: SparseMatrix, out: Path) -> None:
    """A matrix as scipy.sparse.save_npz writes it, uncompressed."""

    nnz, n_lines = matrix.nnz, matrix.n_lines
    ones = (np.ones(min(_WINDOW, nnz - start), np.float32) for start in range(0, nnz, _WINDOW))
    ends = (matrix.ends(start, min(start + _WINDOW, n_lines))[1:] for start in range(0, n_lines, _WINDOW))
    indices = matrix.index_windows(0, n_lines, _WINDOW)
    data = ones if matrix.data is None else matrix.data.windows()
    _npz(out, matrix.encoding[:3], matrix.shape, nnz, chain([np.zeros(1, np.int64)], ends), indices, data, {})


def _model_npz(model: Model, out: Path, limit: MemoryLimit) -> dict[str, Any]:
    """An array at a time."""
    weights = model.weight_arrays()
    limit.check({"windows": 4 * 8 * _WINDOW, "weights": weights.needs}, "export")
    f4, columns = np.dtype(np.float32), weights.columns or model.n_labels
    beside: dict[str, Beside] = {"bias": (columns, f4, weights.bias), **weights.beside}
    calibration = Calibration.of(model.path, model.attributes)
    if calibration is not None:
        for row, name in {SLOPE: "slope", SHIFT: "shift", CAP: "cap", TOP: "top"}.items():
            beside[name] = (model.n_labels, f4, _rows_of(calibration, model, row))
    _npz(out, "csc", (model.n_features, columns), weights.nnz, weights.indptr, weights.indices, weights.data, beside)
    return {"n_features": model.n_features, "n_labels": model.n_labels, "nnz": weights.nnz}


def _rows_of(calibration: Calibration, model: Model, row: int) -> Values:
    """One of the four rows that scores are calibrated by."""
    for first in range(0, model.n_labels, _WINDOW):
        yield calibration.by(model.label_counts(first, min(first + _WINDOW, model.n_labels)))[row]


def _npz(
    out: Path, kind: str, shape: tuple[int, int], nnz: int, indptr: Values, indices: Values, data: Values,
    others: Mapping[str, Beside],
) -> None:  # fmt: skip
    """Write a zip of .npy members, an array at a time; indptr and indices of one type, as scipy wants them."""
    index = index_dtype(max(nnz, *shape))
    lines = shape[0] if kind == "csr" else shape[1]
    members = {
        "indices": (nnz, index, indices),
        "indptr": (lines + 1, index, indptr),
        "data": (nnz, np.dtype(np.float32), data),
        **others,
    }
    total, written, bar = sum(size * dtype.itemsize for size, dtype, _ in members.values()), 0, current()
    with zipfile.ZipFile(out, "w") as file:
        for name, value in (("format", np.array(kind.encode())), ("shape", np.array(shape))):
            with file.open(zipfile.ZipInfo(f"{name}.npy", _FIRST_ZIP_TIME), "w") as member:
                npy.write_array(member, value)
        for name, (size, dtype, windows) in members.items():
            with file.open(zipfile.ZipInfo(f"{name}.npy", _FIRST_ZIP_TIME), "w", force_zip64=True) as member:
                about = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": (size,)}
                npy.write_array_header_1_0(member, about)
                for window in windows:
                    member.write(window.astype(dtype, copy=False).data)
                    written += window.size * dtype.itemsize
                    bar.advance(written / max(total, 1))
