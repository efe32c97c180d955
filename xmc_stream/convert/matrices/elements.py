"""Arrays and strings in HDF5 files and zarr folders, read by ranges: what AnnData is stored in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.convert.matrices.arrays import Array, Take
from xmc_stream.convert.messages import one_line
from xmc_stream.errors import InputError, XmcStreamError
from xmc_stream.system.memory import at_most_more

WINDOW = 2**18  # items read at a time, rounded up to whole chunks
STRINGS = 2**14  # strings read at a time
_MOST_BYTES = 2**28  # that reading so many may take: HDF5 takes what the file says that a string has, up to 4 GB


@contextmanager
def opened(path: str | Path, name: str = "") -> Iterator[Any]:
    """The root of an HDF5 file or zarr folder; what goes wrong in reading it is an InputError, which names it `name`."""
    path, name = Path(path), name or str(path)
    with ExitStack() as stack:
        try:
            if path.is_dir():
                from xmc_stream.store.nodes import open_foreign

                root = open_foreign(path)
            else:
                root = stack.enter_context(_h5py(name).File(path, "r"))
            yield root
        except XmcStreamError:
            raise
        except (OSError, KeyError, ValueError, TypeError, RuntimeError, IndexError, AttributeError) as error:
            raise InputError(
                f"{name} cannot be read as AnnData ({one_line(error)}): write it again with a recent anndata"
            ) from None


def _h5py(name: str) -> Any:
    try:
        import h5py
    except ImportError:
        raise InputError(
            f"{name} is an HDF5 file: install h5py (pip install 'xmc-stream[anndata]') to read it"
        ) from None
    return h5py


def encoding(element: Any) -> str:
    """What an element says it is, as "csr_matrix"; an array that says nothing is one."""
    return one_line(attribute(element, "encoding-type", "" if hasattr(element, "keys") else "array"))


def attribute(element: Any, name: str, otherwise: Any = None) -> Any:
    """An attribute of an element."""
    with at_most_more(_MOST_BYTES):
        return element.attrs.get(name, otherwise)


@dataclass(frozen=True)
class ElementArray(Array):
    """An array in a file, whose rows follow each other if it has two dimensions.

    width: items of a row; n_bytes: of memory that reading it takes.
    """

    width: int
    n_bytes: int

    @classmethod
    def of(cls, path: Path, key: str, array: Any) -> ElementArray:
        """An array that was opened. Raises ValueError where it is none that can be read."""
        if hasattr(array, "keys") or array.ndim not in (1, 2):
            raise ValueError(f"{key} is not an array of one or two dimensions")
        width = int(array.shape[1]) if array.ndim == 2 else 1
        chunk = getattr(array, "shards", None) or array.chunks or (1,) * array.ndim
        rows = max(1, int(chunk[0]))
        step = -(-max(1, WINDOW // max(width, 1)) // rows) * rows  # rows read at a time
        step = max(1, min(step, int(array.shape[0])))
        dtype = np.dtype(array.dtype)
        across = -(-width // int(chunk[1])) * int(chunk[1]) if array.ndim == 2 else 1  # chunks are read whole
        n_bytes = (step * width + 2 * max(rows * across, step * across)) * dtype.itemsize
        stream = partial(_items, str(path.absolute()), key, dtype, max(width, 1), step)
        return cls(int(np.prod(array.shape, dtype=object)), dtype, stream, width, n_bytes)


@contextmanager
def _items(path: str, key: str, dtype: np.dtype[Any], width: int, step: int, start: int, stop: int) -> Iterator[Take]:
    """Items [start, stop), which begin and end with a row."""
    left = np.empty(0, dtype)  # items that were read and not yet taken
    row = start // width
    with opened(path) as root:
        data = root[key]

        def next_rows() -> NDArray[Any]:
            """Rows up to the next multiple of a step, so that no chunk is read twice but at the ends of ranges."""
            nonlocal row
            begin, row = row, min((row // step + 1) * step, stop // width)
            try:
                rows = np.asarray(data[begin:row]).reshape(-1)
            except (OSError, ValueError, RuntimeError, KeyError) as error:
                raise InputError(
                    f"{path}: {key} cannot be read from row {begin} (from 0) on ({one_line(error)}): fetch or write it again"
                ) from None
            if not len(rows):
                raise InputError(f"{path}: {key} ends early: it was changed meanwhile, convert again")
            return rows

        def take(n: int) -> NDArray[Any]:
            nonlocal left
            found = [left[:n]]
            left = left[n:]
            while (missing := n - sum(map(len, found))) > 0:
                rows = next_rows()
                found.append(rows[:missing])
                left = rows[missing:]
            return np.concatenate(found)

        yield take


def n_strings(element: Any) -> int:
    """Length of a column of strings or other values."""
    return int((element["values"] if hasattr(element, "keys") else element).shape[0])


def strings(element: Any) -> Iterator[list[str | None]]:
    """A column as strings, in windows: numbers in decimal, None where the column has a mask that is set."""
    values, mask = (element["values"], element["mask"]) if hasattr(element, "keys") else (element, None)
    text = values.asstr() if hasattr(values, "asstr") and values.dtype.kind in "OS" else values
    for start in range(0, int(values.shape[0]), STRINGS):
        with at_most_more(_MOST_BYTES):
            window: list[str | None] = [str(value) for value in text[start : start + STRINGS].tolist()]
        if mask is not None:
            missing = np.asarray(mask[start : start + STRINGS]).tolist()
            window = [None if gone else value for value, gone in zip(window, missing, strict=True)]
        yield window
