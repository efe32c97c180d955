"""Files of labels that stand beside features, known by their content."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from xmc_stream.convert import npz, numpy_arrays
from xmc_stream.convert.sides import Side
from xmc_stream.convert.source import Options
from xmc_stream.errors import InputError


def label_sides(paths: Sequence[Path], options: Options) -> list[Side]:
    """Y of each of the files of features. Raises InputError where they lack, or are of no kind known."""
    if not options.labels:
        raise InputError(f"{paths[0]} holds features alone: name the file of its labels too (labels=, --labels)")
    if len(options.labels) != len(paths):
        raise InputError(
            f"{len(paths)} files of features and {len(options.labels)} of labels: name one of labels for each, in order"
        )
    return [_open(path) for path in options.labels]


def _open(path: Path) -> Side:
    with numpy_arrays.reading(path):
        if path.is_dir():
            head = b""
        else:
            with open(path, "rb") as file:
                head = file.read(16)
    if npz.recognises(path, head):
        return npz.open_side(path)
    if numpy_arrays.recognises(path, head):
        return numpy_arrays.open_side(path, labels=True)
    raise InputError(
        f"{path} is not a file of labels for a matrix: it must be a .npz of scipy.sparse.save_npz, a folder or file of a "
        "CSR matrix in .npy files, or a .npy of class ids"
    )
