"""AnnData, in HDF5 files (.h5ad) or zarr folders: X or a layer, labels from a column of obs or a matrix of obsm.

Read by ranges of rows, in the documented encoding, without loading anndata: CSR and dense matrices in windows, CSC whole.
The names of the variables are those of the features, and the values of a column of obs the names of the labels; a test
set's are found among its training set's by name. The names of obs are the rows' own ids.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.convert.formats.matrix_files import label_sides
from xmc_stream.convert.matrices.arrays import (
    Array,
    DenseSide,
    NamedClasses,
    Take,
    classes,
    csr_side,
    dense,
    ids_by_name,
)
from xmc_stream.convert.matrices.memory import WholeSide, csr_bytes
from xmc_stream.convert.matrices.sides import BlockSize, Raw, Side, check_real
from xmc_stream.convert.matrices.source import Matrices, write_names
from xmc_stream.convert.messages import meant, one_line
from xmc_stream.convert.options import ConvertOptions, Like, of_labels
from xmc_stream.convert.pieces import Items
from xmc_stream.convert.source import PartRead, Settled
from xmc_stream.errors import InputError, XmcStreamError
from xmc_stream.runtime.job import Phase, Receipt
from xmc_stream.store.names import ROW_IDS, open_names
from xmc_stream.store.places import copy_folders
from xmc_stream.system.memory import at_most_more

WINDOW = 2**18  # items read at a time, rounded up to whole chunks
STRINGS = 2**14  # strings read at a time
_MOST_BYTES = 2**28  # that reading so many may take: HDF5 takes what the file says that a string has, up to 4 GB
_MOST_VALUES = 10**6  # of a column that is not categorical, to be sorted in memory
_NAME_BYTES = 400  # of a name while names are found among others


def open_source(paths: Sequence[Path], options: ConvertOptions, like: Like | None) -> AnnData:
    """Features of AnnData files; labels of the same, or of other files of matrices. Raises InputError."""
    features = f"layers/{options.layer}" if options.layer else "X"
    x = [_features(path, features, like) for path in paths]
    if options.label_files or options.unlabelled:
        if options.label_key:
            raise InputError(
                flags.LABEL_KEY
                + f" {options.label_key} and "
                + flags.LABELS
                + " were given: there can be one place of labels"
            )
        y, place = label_sides(x, paths, options, like), ""
    else:
        keys = [_label_element(path, options.label_key) for path in paths]
        y = [_labels(path, key, of_labels(like), options.drop_unseen) for path, key in zip(paths, keys, strict=True)]
        place = keys[0]
    return AnnData(x, y, options, like, paths, features, place)


class AnnData(Matrices):
    """The source, which keeps names besides. features, place: of the features and the labels, if they are in the file."""

    def __init__(
        self, x: Sequence[Side], y: Sequence[Side], options: ConvertOptions, like: Like | None, paths: Sequence[Path],
        features: str, place: str,
    ) -> None:  # fmt: skip
        super().__init__(x, y, options, like)
        self._paths, self._features, self._place = paths, features, place
        # what has names, by what that is in the files: those of labels are the values of a column of obs
        self._named = {"features": "var"} | ({"labels": place} if isinstance(y[0], _ObsClasses) else {})
        if options.label_key:
            self.attributes["label_key"] = options.label_key
            del self.attributes["source_labels"]
        if options.layer:
            self.attributes["layer"] = options.layer

    def settle(self, work: Path, parts: list[PartRead]) -> Generator[Phase, list[Receipt], Settled]:
        """Names, which must be the same in all files; those of a training set where there is one."""
        settled = yield from super().settle(work, parts)
        missing = settled.attributes.get("rows_without_class", 0)
        said = f"{settled.said}, {self._features}" + (f", labels of {self._place}" if self._place else "")
        said += f", {missing:,} rows without a class" if missing else ""
        folders = dict(settled.folders)
        for name, column in self._named.items():
            like = of_labels(self._like) if name == "labels" else self._like
            folders[f"names/{name}"] = work / "names" / name
            if like is None:
                self._check_same(column)
                write_names(work / "names" / name, _names(self._paths[0], column))
            else:
                copy_folders(like.path, work, (f"names/{name}",))
        folders[ROW_IDS] = work / ROW_IDS
        n_ids = write_names(folders[ROW_IDS], (name for path in self._paths for name in _names(path, "obs")))
        if n_ids != self.n_samples:
            raise InputError(f"{self._paths[0]}: obs has {n_ids} names for {self.n_samples} rows: write it again")
        return replace(settled, said=said, folders=folders)

    def _check_same(self, column: str) -> None:
        for other in self._paths[1:]:
            if not _same(_names(self._paths[0], column), _names(other, column)):
                raise InputError(
                    f"{other} has other names in {column} than {self._paths[0]}: files of one set must have the same, in "
                    "the same order; join them with anndata first"
                )


def _same(a: Iterator[Any], b: Iterator[Any]) -> bool:
    return all(x == y for x, y in zip_longest(a, b))


def _names(path: Path, column: str) -> Iterator[str]:
    """Names of the variables ("var") or of the rows ("obs"), or the classes of a column of obs, in order."""
    with opened(path) as root:
        element = root[column]
        if column in ("var", "obs"):
            yield from _values(element[attribute(element, "_index")])
        elif encoding(element) == "categorical":
            yield from _values(element["categories"])
        else:
            found: set[str] = set()
            for window in strings(element):
                found.update(value for value in window if value is not None)
                if len(found) > _MOST_VALUES:
                    raise InputError(
                        f"{path}: {column} has more than {_MOST_VALUES:,} different values: make it a categorical first"
                    )
            numbers = np.dtype((element["values"] if hasattr(element, "keys") else element).dtype).kind in "iu"
            yield from sorted(found, key=int if numbers else None)


def _values(element: Any) -> Iterator[str]:
    """A column's strings; a missing one is empty."""
    return (value or "" for window in strings(element) for value in window)


def _features(path: Path, key: str, like: Like | None) -> Side:
    with opened(path) as root:
        if key not in root or encoding(root[key]) == "null":
            layers = ", ".join(sorted(root["layers"])) if "layers" in root else ""
            near = meant(key, [f"layers/{name}" for name in root["layers"]]) if layers else ""
            raise InputError(
                f"{path} has no {key}{near}: name one of its layers by "
                + flags.LAYER
                + f" ({one_line(layers) or 'it has none'})"
            )
        n_names = n_strings(root["var"][attribute(root["var"], "_index")])
    side = _matrix(path, key)
    if side.n_columns != n_names:
        raise InputError(f"{path}: {key} has {side.n_columns} columns and var {n_names} names: write it again")
    if like is None:
        return side
    names = open_names(like.path, "features")
    if names is not None and _same(_names(path, "var"), iter(names)):
        return side
    ids = ids_by_name(like, "features", list(_names(path, "var")), str(path))
    ids[ids < 0] = like.n_features + np.flatnonzero(ids < 0)
    load_bytes = side.load_bytes + _NAME_BYTES * (n_names + like.n_features)
    return _Renamed(
        side.name, side.kind, side.files, side.n_rows, like.n_features + n_names, side.entries, side, ids,
        load_bytes=load_bytes, divisible=side.divisible,
    )  # fmt: skip


def _label_element(path: Path, key: str | None) -> str:
    """Where the labels are: "obs/KEY" or "obsm/KEY"."""
    with opened(path) as root:
        found = {
            group: sorted(root[group]) if group in root else []
            for group in ("obs", "obsm")
        }  # fmt: skip
        found["obs"] = [name for name in found["obs"] if name != attribute(root["obs"], "_index")]
    places = [f"{group}/{name}" for group, names in found.items() for name in names]
    matching = [place for place in places if key is not None and key in (place, place.split("/", 1)[1])]
    if len(matching) == 1:
        return matching[0]
    near = "" if key is None else meant(key, [*places, *(place.split("/", 1)[1] for place in places)])
    said = "names no labels" if key is None else f"has {' and '.join(matching) or f'no {key}{near}'}"
    shown = ", ".join(places[:20]) + (", ..." if len(places) > 20 else "")
    raise InputError(
        f"{path} {said}: name the place of the labels by " + flags.LABEL_KEY + f" ({one_line(shown) or 'it has none'})"
    )


def _labels(path: Path, key: str, like: Like | None, drop: bool) -> Side:
    if key.startswith("obsm/"):
        side = _matrix(path, key)
        if isinstance(side, DenseSide) and side.n_columns == 1 and side.array.dtype.kind in "iu":
            return classes(side.name, side.kind, side.files, side.array, load_bytes=side.load_bytes)
        return side
    with opened(path) as root:
        element = root[key]
        kind = encoding(element)
        if kind == "categorical":
            codes = ElementArray.of(path, f"{key}/codes", element["codes"])
            if codes.dtype.kind not in "iu" or codes.width != 1:
                raise ValueError(f"{key}/codes of type {codes.dtype}")
            n_rows, n_labels = codes.n_items, n_strings(element["categories"])
        elif kind in ("array", "string-array", "nullable-integer", "nullable-boolean", "nullable-string-array"):
            values = element["values"] if hasattr(element, "keys") else element
            if len(values.shape) != 1 or np.dtype(values.dtype).kind not in "biuOST":
                raise InputError(f"{path}: {key} holds {values.dtype}: labels are categories, strings or integers")
            codes, n_rows = None, int(values.shape[0])
            n_labels = sum(1 for _ in _names(path, key))
        else:
            raise InputError(f"{path}: {key} is a {kind}: labels are categories, strings or integers")
    name = str(path)
    ids = None if like is None else ids_by_name(like, "labels", list(_names(path, key)), name)
    n_columns = like.n_labels if like else n_labels
    load_bytes = _NAME_BYTES * (n_labels + 2**15 + (like.n_labels if like else 0)) + (codes.n_bytes if codes else 0)
    return _ObsClasses(
        name, "AnnData", (path,), n_rows, n_columns, n_rows, like.name if like else "", drop, path.absolute(), key, codes,
        ids, load_bytes=load_bytes, divisible=codes is not None,
    )  # fmt: skip


def _matrix(path: Path, key: str) -> Side:
    """A matrix by the encoding of its element."""
    name = str(path)
    with opened(path) as root:
        element = root[key]
        kind = encoding(element)
        if kind == "array":
            array = ElementArray.of(path, key, element)
            if element.ndim != 2 or not array.width:
                raise InputError(f"{path}: {key} has the shape {element.shape}: it must be a matrix with columns")
            check_real(array.dtype, f"{path}: {key}")
            n_rows = int(element.shape[0])
            return dense(name, "dense AnnData", (path,), n_rows, array.width, array, load_bytes=array.n_bytes)
        if kind not in ("csr_matrix", "csc_matrix"):
            raise InputError(f"{path}: {key} is a {kind or 'group'}: it must be a csr, csc or dense matrix")
        n_rows, n_columns = (int(n) for n in attribute(element, "shape"))
        arrays = [ElementArray.of(path, f"{key}/{array}", element[array]) for array in ("indptr", "indices", "data")]
        if min(n_rows, n_columns) < 0 or any(element[array].ndim != 1 for array in ("indptr", "indices", "data")):
            raise ValueError(f"{key} of shape {n_rows} x {n_columns}")
        check_real(arrays[2].dtype, f"{path}: {key}")
        if kind == "csr_matrix":
            taken = sum(array.n_bytes for array in arrays)
            return csr_side(name, "AnnData", (path,), (n_rows, n_columns), *arrays, load_bytes=taken, divisible=True)
        entries = arrays[2].n_items
        load_bytes = sum(array.n_items * array.dtype.itemsize + array.n_bytes for array in arrays)
        load_bytes += csr_bytes(entries, arrays[2].dtype, n_rows)
        load = partial(_load_csc, path.absolute(), name, key, (n_rows, n_columns))
        return WholeSide(name, "AnnData (csc)", (path,), n_rows, n_columns, entries, load, load_bytes=load_bytes)


def _load_csc(path: Path, name: str, key: str, shape: tuple[int, int]) -> Any:
    from scipy import sparse

    with opened(path, name) as root:
        data, indices, indptr = (np.asarray(root[key][array][:]) for array in ("data", "indices", "indptr"))
        return sparse.csc_array((data, indices, indptr), shape=shape)


@dataclass(frozen=True)
class _Renamed(Side):
    """Features whose columns stand elsewhere in the training set. ids: of each; unseen ones stand behind all of that."""

    side: Side
    ids: NDArray[np.int64]

    def blocks(self, start: int, stop: int, size: BlockSize, notes: dict[str, Any]) -> Iterator[Raw]:
        """Rows with the ids of the training set."""
        for indptr, indices, values in self.side.blocks(start, stop, size, notes):
            if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < len(self.ids):
                raise InputError(f"{self.name}: its arrays do not fit its shape: write it again")
            yield indptr, self.ids[indices.astype(np.int64)], values


@dataclass(frozen=True)
class _ObsClasses(NamedClasses):
    """The class of each row in a column of obs. codes: of a categorical, None: the values themselves; ids: of the classes,
    None where they are the codes."""

    path: Path
    key: str
    codes: ElementArray | None
    ids: NDArray[np.int64] | None

    def blocks(self, start: int, stop: int, size: BlockSize, notes: dict[str, Any]) -> Iterator[Raw]:
        """Rows [start, stop) with one label, or none where the value is missing."""
        names = list(_names(self.path, self.key))
        ids = np.arange(len(names)) if self.ids is None else self.ids
        row = start
        for codes in self._codes(names, start, stop, size):
            if len(codes) and int(codes.max()) >= len(ids):
                raise InputError(f"{self.name}: {self.key} has a code without category: write it again")
            yield self.labelled(codes, ids, names, row, notes)
            row += len(codes)

    def _codes(self, names: list[str], start: int, stop: int, size: BlockSize) -> Iterator[NDArray[np.int64]]:
        """The place of each row's class among the names, -1 for none."""
        if self.codes is None:
            place = {name: i for i, name in enumerate(names)}
            with opened(self.path) as root:
                for window in strings(root[self.key]):
                    yield np.fromiter((-1 if v is None else place[v] for v in window), np.int64, len(window))
            return
        with self.codes.stream(start, stop) as take:
            for row in range(start, stop, size.block):
                yield take(min(size.block, stop - row)).astype(np.int64)


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
        stream = partial(_items, str(path.absolute()), key, max(width, 1), step)
        return cls(int(np.prod(array.shape, dtype=object)), dtype, stream, width, n_bytes)


@contextmanager
def _items(path: str, key: str, width: int, step: int, start: int, stop: int) -> Iterator[Take]:
    """Items [start, stop), which begin and end with a row."""
    with opened(path) as root:
        yield Items(_windows(path, key, root[key], step, start // width, stop // width)).take


def _windows(path: str, key: str, data: Any, step: int, row: int, stop: int) -> Iterator[NDArray[Any]]:
    """Items of the rows, up to the next multiple of a step, so that no chunk is read twice but at the ends of ranges."""
    while True:
        begin, row = row, min((row // step + 1) * step, stop)
        try:
            items = np.asarray(data[begin:row]).reshape(-1)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise InputError(
                f"{path}: {key} cannot be read from row {begin} (from 0) on ({one_line(error)}): fetch or write it again"
            ) from None
        if not len(items):
            raise InputError(f"{path}: {key} ends early: it was changed meanwhile, convert again")
        yield items


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
