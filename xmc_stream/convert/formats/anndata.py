"""AnnData, in HDF5 files (.h5ad) or zarr folders: X or a layer, labels from a column of obs or a matrix of obsm.

Read by ranges of rows, in the documented encoding, without loading anndata: CSR and dense matrices in windows, CSC whole.
The names of the variables are those of the features, and the values of a column of obs the names of the labels; a test
set's are found among its training set's by name. The names of obs are the rows' own ids.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.convert.formats.matrix_files import NamedMatrices, label_sides
from xmc_stream.convert.matrices.arrays import ClassSide, CSRReader, CSRSide, DenseSide, check_real, csr_reader
from xmc_stream.convert.matrices.elements import ElementArray, attribute, encoding, n_strings, opened, strings
from xmc_stream.convert.matrices.sides import BlockSize, Raw, Reader, Side, row_ranges
from xmc_stream.convert.matrices.whole import WholeSide, csr_bytes
from xmc_stream.convert.messages import meant, one_line
from xmc_stream.convert.options import ConvertOptions, Like, of_labels
from xmc_stream.convert.source import PartRead, Settled
from xmc_stream.errors import InputError
from xmc_stream.runtime.job import Phase, Receipt
from xmc_stream.store.names import ROW_IDS

_HDF5 = b"\x89HDF\r\n\x1a\n"
_MOST_VALUES = 10**6  # of a column that is not categorical, to be sorted in memory
_NAME_BYTES = 400  # of a name while names are found among others


def recognises(path: Path, head: bytes) -> bool:
    """An HDF5 file, or a zarr folder with obs and var."""
    return head.startswith(_HDF5) or (path.is_dir() and all((path / name).is_dir() for name in ("obs", "var")))


def open_source(paths: Sequence[Path], options: ConvertOptions, like: Like | None) -> NamedMatrices:
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
    source = _AnnData(x, y, options, like, ("layer", "label_key"))
    source.paths, source.place, source.features = paths, place, features
    source.column = place if isinstance(y[0], _ClassSide) else ""
    if options.label_key:
        source.attributes["label_key"] = options.label_key
        del source.attributes["source_labels"]
    if options.layer:
        source.attributes["layer"] = options.layer
    return source


class _AnnData(NamedMatrices):
    """The source, which keeps names besides.

    place: of the labels, if they are in the file; column: of obs, whose values are the names of the labels, if one is.
    """

    paths: Sequence[Path]
    place: str
    column: str
    features: str

    def settle(self, work: Path, parts: list[PartRead]) -> Generator[Phase, list[Receipt], Settled]:
        """Names, which must be the same in all files; those of a training set where there is one."""
        settled = yield from super().settle(work, parts)
        missing = sum(part.notes.get("missing", 0) for part in parts)
        said = f"{settled.said}, {self.features}" + (f", labels of {self.place}" if self.place else "")
        said += f", {missing:,} rows without a class" if missing else ""
        folders = dict(settled.folders)
        for name, column in (("features", "var"), ("labels", self.column)):
            folder = work / f"names-{name}"
            if column and not self._take_over(folder, name):
                self._check_same(column)
                _write_names(folder, self.paths[:1], column)
            if folder.exists():
                folders[f"names/{name}"] = folder
        folders[ROW_IDS] = work / ROW_IDS
        n_ids = _write_names(folders[ROW_IDS], self.paths, "obs")
        if n_ids != self.n_samples:
            raise InputError(f"{self.paths[0]}: obs has {n_ids} names for {self.n_samples} rows: write it again")
        return replace(settled, said=said, folders=folders)

    def _take_over(self, folder: Path, name: str) -> bool:
        """Copy the names of the training set, if there is one; False if there is none."""
        from xmc_stream.store.names import new_names, open_names

        like = of_labels(self._like) if name == "labels" else self._like
        if like is None:
            return False
        names = open_names(like.path, name)
        if names is not None:
            with new_names(folder) as writer:
                for window in names.windows():
                    writer.append(window)
        return True

    def _check_same(self, column: str) -> None:
        for other in self.paths[1:]:
            if not _same(_names(self.paths[0], column), _names(other, column)):
                raise InputError(
                    f"{other} has other names in {column} than {self.paths[0]}: files of one set must have the same, in "
                    "the same order; join them with anndata first"
                )


def _write_names(folder: Path, paths: Sequence[Path], column: str) -> int:
    """Write `_names` of some files in turn; returns how many they are."""
    from xmc_stream.store.names import new_names

    with new_names(folder) as writer:
        for path in paths:
            window = []
            for name in _names(path, column):
                window.append(name.encode())
                if len(window) == 2**12:
                    writer.append(window)
                    window = []
            writer.append(window)
        return writer.n


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
    from xmc_stream.store.names import open_names

    names = open_names(like.path, "features")
    if names is None:
        raise InputError(
            f"{path} has names of features and "
            + flags.LIKE
            + f" {like.name} has none to find them by: convert that from AnnData too"
        )
    if _same(_names(path, "var"), iter(names)):
        return side
    return _Renamed(side, path.absolute(), like)


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
            return ClassSide(side.name, side.kind, side.files, side.array, load_bytes=side.load_bytes)
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
    if like is not None:
        _label_names(like, path)
    return _ClassSide(str(path), path.absolute(), key, n_rows, n_labels, codes, like, drop)


def _label_names(like: Like, path: Path) -> Any:
    from xmc_stream.store.names import open_names

    names = open_names(like.path, "labels")
    if names is None:
        raise InputError(
            f"{path} has names of classes and "
            + flags.LIKE
            + f" {like.name} has none to find them by: convert that from AnnData too"
        )
    return names


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
            return DenseSide(name, "dense AnnData", (path,), n_rows, array.width, array, array.n_bytes)
        if kind not in ("csr_matrix", "csc_matrix"):
            raise InputError(f"{path}: {key} is a {kind or 'group'}: it must be a csr, csc or dense matrix")
        n_rows, n_columns = (int(n) for n in attribute(element, "shape"))
        arrays = [ElementArray.of(path, f"{key}/{array}", element[array]) for array in ("indptr", "indices", "data")]
        if min(n_rows, n_columns) < 0 or any(element[array].ndim != 1 for array in ("indptr", "indices", "data")):
            raise ValueError(f"{key} of shape {n_rows} x {n_columns}")
        check_real(arrays[2].dtype, f"{path}: {key}")
        if kind == "csr_matrix":
            reader = csr_reader(name, arrays[0], arrays[1], arrays[2], n_rows)
            taken = sum(array.n_bytes for array in arrays)
            return CSRSide(name, "AnnData", (path,), n_columns, reader, load_bytes=taken)
        entries = arrays[2].n_items
        load_bytes = sum(array.n_items * array.dtype.itemsize + array.n_bytes for array in arrays)
        load_bytes += csr_bytes(entries, arrays[2].dtype, n_rows)
        load = partial(_load_csc, path.absolute(), name, key, (n_rows, n_columns))
        return WholeSide(name, "AnnData (csc)", (path,), n_rows, n_columns, entries, load_bytes, load)


def _load_csc(path: Path, name: str, key: str, shape: tuple[int, int]) -> Any:
    from scipy import sparse

    with opened(path, name) as root:
        data, indices, indptr = (np.asarray(root[key][array][:]) for array in ("data", "indices", "indptr"))
        return sparse.csc_array((data, indices, indptr), shape=shape)


def _ids(like: Like, kind: str, names: Iterator[str]) -> NDArray[np.int64]:
    """The id of each name in a training set, -1 for those it does not have. Raises InputError for ambiguous names."""
    from xmc_stream.store.names import open_names

    known: dict[str, int] = {}
    for i, name in enumerate(open_names(like.path, kind) or ()):
        if known.setdefault(name, i) != i:
            raise InputError(f"{like.name} has the name {name!r} twice among its {kind}: make the names unique first")
    return np.fromiter((known.get(name, -1) for name in names), np.int64)


@dataclass(frozen=True)
class _Renamed:
    """Features whose columns stand elsewhere in the training set, and their reader."""

    side: Any
    path: Path
    like: Like

    @property
    def name(self) -> str:
        return str(self.side.name)

    @property
    def files(self) -> Sequence[Path]:
        return (self.path,)

    @property
    def kind(self) -> str:
        return str(self.side.kind)

    @property
    def n_rows(self) -> int:
        return int(self.side.n_rows)

    @property
    def n_columns(self) -> int | None:
        """Unseen ones stand behind those of the training set."""
        return self.like.n_features + int(self.side.n_columns)

    @property
    def entries(self) -> int | None:
        return int(self.side.entries)

    @property
    def load_bytes(self) -> int:
        return int(self.side.load_bytes) + _NAME_BYTES * (int(self.side.n_columns) + self.like.n_features)

    def ranges(self) -> list[tuple[int, int]]:
        ranges: list[tuple[int, int]] = self.side.ranges()
        return ranges

    def reader(self) -> Reader:
        return self

    def settle(self, notes: Sequence[Mapping[str, Any]]) -> None:
        self.side.settle(notes)

    def blocks(self, start: int, stop: int, size: BlockSize, notes: dict[str, Any]) -> Iterator[Raw]:
        """Rows with the ids of the training set. Raises InputError for names that stand twice."""
        ids = _ids(self.like, "features", _names(self.path, "var"))
        unseen = ids < 0
        ids[unseen] = self.like.n_features + np.flatnonzero(unseen)
        reader: CSRReader = self.side.reader()
        for indptr, indices, values in reader.blocks(start, stop, size, notes):
            if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < len(ids):
                raise InputError(f"{self.name}: its arrays do not fit its shape: write it again")
            yield indptr, ids[indices.astype(np.int64)], values


@dataclass(frozen=True)
class _ClassSide:
    """The class of each row in a column of obs, and its reader. codes: of a categorical; None: the values themselves."""

    name: str
    path: Path
    key: str
    n_rows: int
    n_classes: int
    codes: ElementArray | None
    like: Like | None
    drop: bool
    kind: str = "AnnData"

    @property
    def files(self) -> Sequence[Path]:
        return (self.path,)

    @property
    def n_columns(self) -> int:
        return self.like.n_labels if self.like else self.n_classes

    @property
    def entries(self) -> int:
        return self.n_rows

    @property
    def load_bytes(self) -> int:
        known = self.n_classes + (self.like.n_labels if self.like else 0)
        return _NAME_BYTES * (known + 2**15) + (self.codes.n_bytes if self.codes else 0)

    def ranges(self) -> list[tuple[int, int]]:
        return row_ranges(self.n_rows, self.entries) if self.codes else [(0, self.n_rows)]

    def reader(self) -> Reader:
        return self

    def settle(self, notes: Sequence[Mapping[str, Any]]) -> None:
        pass

    def blocks(self, start: int, stop: int, size: BlockSize, notes: dict[str, Any]) -> Iterator[Raw]:
        """Rows [start, stop) with one label, or none where the value is missing, counted."""
        names = list(_names(self.path, self.key))
        ids = np.arange(len(names)) if self.like is None else _ids(self.like, "labels", iter(names))
        row = start
        for codes in self._codes(names, start, stop, size):
            if len(codes) and int(codes.max()) >= len(ids):
                raise InputError(f"{self.name}: {self.key} has a code without category: write it again")
            there = codes >= 0
            found = np.where(there, ids[codes] if len(ids) else -1, -1)
            unseen = there & (found < 0)
            if unseen.any() and not self.drop:
                at = int(np.argmax(unseen))
                raise InputError(
                    f"{self.name}: class {names[codes[at]]!r} in row {row + at} (from 0) is none of the labels of "
                    + flags.LIKE
                    + f" {self.like.name if self.like else ''}: check that the two belong together, or "
                    + flags.UNSEEN_DROP
                )
            notes["dropped"] = notes.get("dropped", 0) + int(unseen.sum())
            notes["missing"] = notes.get("missing", 0) + int((~there).sum())
            indptr = np.zeros(len(codes) + 1, np.int64)
            np.cumsum(found >= 0, out=indptr[1:])
            row += len(codes)
            yield indptr, found[found >= 0], None

    def _codes(self, names: list[str], start: int, stop: int, size: BlockSize) -> Iterator[NDArray[np.int64]]:
        """The place of each row's class among the names, -1 for none."""
        if self.codes is None:
            place = {name: i for i, name in enumerate(names)}
            with opened(self.path) as root:
                for window in strings(root[self.key]):
                    yield np.fromiter((-1 if v is None else place[v] for v in window), np.int64, len(window))
            return
        with self.codes.stream(start, stop) as stream:
            for row in range(start, stop, size.block):
                yield stream.take(min(size.block, stop - row)).astype(np.int64)
