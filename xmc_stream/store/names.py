"""Names of features and labels, and how text becomes features: as much as there is of them, read by ranges.

Names are a group of two arrays: `bytes`, the UTF-8 of all names in turn, and `ends`, where each ends in it. The rows'
own ids, of a dataset or of predictions, are stored likewise. A vectorizer is a group with its options as attributes and
the array `idf`, in the order of the features.

A store of selected features has an array of their ids, ascending, by the name of the attribute SELECTED: which features of
wider data its columns are. The attribute says how many features there were ("of") and has a hash of the ids: two stores of
one attribute have the same columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import StoreError
from xmc_stream.store.chunks import ChunkedArray, are_apart, open_array, read_small
from xmc_stream.store.encoding import ArrayWriter, new_store
from xmc_stream.store.inventory import StoredArrays
from xmc_stream.store.nodes import Group, attributes_of, is_whole, understood
from xmc_stream.store.places import copy_folders, fsync_tree

CHUNK_BYTES = 4 * 2**20  # small: a writer's buffer is one chunk of each array
WRITER_BYTES = 2 * 3 * CHUNK_BYTES  # two arrays: a chunk, its padded and its checksummed copy
ROW_IDS = "row_ids"
SELECTED = "selected_features"
VOCABULARY = ("vectorizer", "names", SELECTED)  # folders of a store
WINDOW = 2**13  # names read at a time
_WINDOW_BYTES = 2**19  # of which at most so many bytes, or one name
_MOST_BYTES = 2**28  # of a name, and of names that are taken at once


class NamesWriter:
    """Appends names to a new group; n: how many so far; arrays: their writers."""

    def __init__(self, group: Group) -> None:
        self._bytes = ArrayWriter(group, "bytes", np.uint8, CHUNK_BYTES)
        self._ends = ArrayWriter(group, "ends", np.int64, CHUNK_BYTES)
        self.arrays = [self._bytes, self._ends]
        self._end = 0
        self.n = 0

    def append(self, names: Sequence[bytes]) -> None:
        """Add names, in UTF-8."""
        if not names:
            return
        ends = self._end + np.cumsum(np.fromiter(map(len, names), np.int64, len(names)))
        self._bytes.append(np.frombuffer(b"".join(names), np.uint8))
        self._ends.append(ends)
        self._end = int(ends[-1])
        self.n += len(names)

    def extend(self, names: Names) -> None:
        """Add stored names: the first ones by hard links to full chunk files, see `ArrayWriter.extend`."""
        if self.n:
            for array in names.arrays():
                array.verify()
            for window in names.windows():
                self.append(window)
            return
        for mine, theirs in zip(self.arrays, names.arrays(), strict=True):
            mine.extend(theirs)
        self._end, self.n = names.n_bytes, len(names)

    def close(self) -> None:
        """Write what is buffered."""
        self._bytes.close()
        self._ends.close()


@contextmanager
def new_names(path: Path, work: Path | None = None) -> Iterator[NamesWriter]:
    """Names under construction, under their name when the block ends well. work: as of `new_folder`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_store(path, {"encoding": "utf-8"}, work) as group:
        writer = NamesWriter(group)
        yield writer
        writer.close()


class Names:
    """Opened names, numbered from zero. Raises StoreError where there are none, or they are damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._bytes, self._ends = (open_array(path / name) for name in ("bytes", "ends"))
        except StoreError:
            raise StoreError(f"{path} holds no names: the store is damaged; make it again") from None
        if self._bytes.dtype != np.uint8 or self._ends.dtype != np.int64:
            raise self._damaged()

    def __len__(self) -> int:
        return self._ends.size

    @property
    def n_bytes(self) -> int:
        """Of all names in UTF-8."""
        return self._bytes.size

    def arrays(self) -> list[ChunkedArray]:
        """All names in UTF-8, and where each ends."""
        return [self._bytes, self._ends]

    def read(self, start: int, stop: int) -> list[str]:
        """Names [start, stop)."""
        return [self._text(name) for name in self.read_bytes(start, stop)]

    def _text(self, name: bytes) -> str:
        with understood(self.path):
            return name.decode()

    def _damaged(self) -> StoreError:
        return StoreError(f"{self.path}: names end where they cannot: the store is damaged; make it again")

    def read_bytes(self, start: int, stop: int) -> list[bytes]:
        """Names [start, stop) in UTF-8."""
        if start >= stop:
            return []
        ends = self._bounds(start, stop)
        blob = self._bytes.read(ends[0], ends[-1]).tobytes()
        return [blob[a - ends[0] : b - ends[0]] for a, b in itertools.pairwise(ends)]

    def _bounds(self, start: int, stop: int) -> list[int]:
        """Where name `start` begins and where it and those before `stop` end."""
        ends = self._ends.read(max(start - 1, 0), stop).tolist()
        ends = ends if start else [0, *ends]
        if ends[0] < 0 or ends[-1] > self._bytes.size or any(a > b for a, b in itertools.pairwise(ends)):
            raise self._damaged()
        return ends

    def windows(self) -> Iterator[list[bytes]]:
        """All names in UTF-8, some thousands at a time."""
        start = 0
        while start < len(self):
            ends = self._bounds(start, min(start + WINDOW, len(self)))
            if ends[1] - ends[0] > _MOST_BYTES:
                raise self._damaged()
            n = int(np.searchsorted(ends, ends[0] + _WINDOW_BYTES, side="right")) - 1
            stop = start + max(1, n)
            yield self.read_bytes(start, stop)
            start = stop

    def __iter__(self) -> Iterator[str]:
        return (self._text(name) for window in self.windows() for name in window)

    def take(self, ids: NDArray[np.int64]) -> list[str]:
        """The names of ascending ids without repetition, in one sweep."""
        ones = np.ones(len(ids), np.int64)
        begins, ends = np.zeros(len(ids), np.int64), np.empty(len(ids), np.int64)
        self._ends.read_ranges(ids, ones, ends)
        inner = ids > 0
        gathered = np.empty(int(inner.sum()), np.int64)
        self._ends.read_ranges(ids[inner] - 1, ones[inner], gathered)
        begins[inner] = gathered
        lengths = ends - begins
        if not are_apart(begins, lengths, self._bytes.size):
            raise self._damaged()
        if lengths.sum() > _MOST_BYTES:
            raise StoreError(f"{self.path}: {len(ids)} names have more than {_MOST_BYTES} bytes: the store is damaged")
        blob_array = np.empty(int(lengths.sum()), np.uint8)
        self._bytes.read_ranges(begins, lengths, blob_array)
        blob = blob_array.tobytes()
        stops = np.cumsum(lengths).tolist()
        return [self._text(blob[b - n : b]) for b, n in zip(stops, lengths.tolist(), strict=True)]


class NamedIds:
    """Ids by names, of names that may be many: 16 bytes a name are in memory."""

    BYTES = 48  # of a name, while hashes are sorted

    def __init__(self, names: Names) -> None:
        self._names = names
        hashes = np.empty(len(names), np.uint64)
        start = 0
        for window in names.windows():
            hashes[start : start + len(window)] = _hashes(window)
            start += len(window)
        self._ids = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._ids]

    def ids(self, wanted: Sequence[str]) -> list[int]:
        """Ids of these names. Raises LookupError with what to say where there is none of a name, or several."""
        different = sorted(set(wanted))
        known = dict(zip(different, self.find(different).tolist(), strict=True))
        if (unknown := next((name for name, label in known.items() if label < 0), None)) is not None:
            raise LookupError(f"{unknown!r:.50} is the name of no label of {self._names.path.parents[1]}")
        return [known[name] for name in wanted]

    def repeated(self) -> tuple[int, int] | None:
        """Two ids of one name; None where all names differ."""
        for place in np.flatnonzero(self._hashes[1:] == self._hashes[:-1]):
            pair = np.sort(self._ids[place : place + 2])
            if len(set(self._names.take(pair))) == 1:
                return int(pair[0]), int(pair[1])
        return None

    def find(self, different: Sequence[str]) -> NDArray[np.int64]:
        """Ids of different names, -1 for those that there are not. Raises LookupError for one that there is twice."""
        hashes = _hashes([name.encode("utf-8", "surrogatepass") for name in different])
        first, last = (np.searchsorted(self._hashes, hashes, side=side) for side in ("left", "right"))
        if len(several := np.flatnonzero(last - first > 1)):
            name, (one, other) = different[several[0]], self._ids[first[several[0]] :][:2].tolist()
            raise LookupError(f"{name!r:.50} is the name of label {one} and of label {other}")
        found = np.full(len(different), -1, np.int64)
        there = last > first
        found[there] = self._ids[first[there]]
        ids = np.unique(found[there])
        called = dict(zip(ids.tolist(), self._names.take(ids), strict=True))
        same = [called.get(label) == name for label, name in zip(found.tolist(), different, strict=True)]
        found[~np.array(same, bool)] = -1  # others that have the hash of one
        return found


def _hashes(names: Sequence[bytes]) -> NDArray[np.uint64]:
    """64 bits of each."""
    return np.frombuffer(b"".join(blake2b(name, digest_size=8).digest() for name in names), np.uint64)


def open_names(store: Path, kind: str) -> Names | None:
    """The names of `kind` ("features" or "labels") that a dataset or model keeps, or None."""
    path = store / "names" / kind
    return Names(path) if path.exists() else None


class NamedStore(StoredArrays):
    """What a dataset and a model are alike in: features and labels may have names."""

    def feature_names(self) -> Names | None:
        """Names of the features.

        Returns
        -------
        Names or None
            `names.read(start, stop)` gives those of a range; None where the features have no names.
        """
        return open_names(self.path, "features")

    def label_names(self) -> Names | None:
        """Names of the labels.

        Returns
        -------
        Names or None
            `names.read(start, stop)` gives those of a range; None where the labels have no names.
        """
        return open_names(self.path, "labels")


def copy_names(source: Path, target: Path, kind: str, n: int) -> None:
    """Copy the names of `kind`, if they are n, into another store under construction, in place of what is there."""
    names = open_names(source, kind)
    if names is not None and len(names) == n:
        copy_folders(source, target, (f"names/{kind}",))


def ascend(names: Names) -> bool:
    """Whether names are in the order of their bytes, as those of raw text are; what is appended to is not."""
    before = b""
    for window in names.windows():
        if any(a > b for a, b in itertools.pairwise([before, *window])):
            return False
        before = window[-1]
    return True


def first_difference(mine: Names, theirs: Names) -> int | None:
    """The first name of theirs that mine, which are as many or more, do not begin with."""
    for start in range(0, len(theirs), WINDOW):
        stop = min(start + WINDOW, len(theirs))
        a, b = mine.read_bytes(start, stop), theirs.read_bytes(start, stop)
        if a != b:
            return start + next(i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1])
    return None


def open_row_ids(store: Path, n_rows: int) -> Names | None:
    """The rows' own ids that a dataset, or predictions, keep, or None. Raises StoreError where there are not n_rows."""
    path = store / ROW_IDS
    if not path.exists():
        return None
    names = Names(path)
    if len(names) != n_rows:
        raise StoreError(f"{path} has {len(names)} ids for {n_rows} rows: the store is damaged; make it again")
    return names


@contextmanager
def new_vectorizer(path: Path, options: Mapping[str, Any]) -> Iterator[ArrayWriter]:
    """A vectorizer under construction; what is given takes its idf (D,), float64, in turn."""
    with new_store(path, options) as group:
        idf = ArrayWriter(group, "idf", np.float64, CHUNK_BYTES)
        yield idf
        idf.close()


def open_vectorizer(store: Path) -> tuple[dict[str, Any], ChunkedArray] | None:
    """Options and idf of the vectorizer that a dataset or model keeps, or None."""
    path = store / "vectorizer"
    if not path.exists():
        return None
    try:
        return attributes_of(path), open_array(path / "idf")
    except (FileNotFoundError, ValueError, StoreError):
        raise StoreError(f"{path} is not a vectorizer: the store is damaged; make it again") from None


def select_names(source: Path, target: Path, features: NDArray[np.int64]) -> None:
    """Copy the names of some features (ascending), and of all labels, into a store under construction.

    No vectorizer: its weights are for rows of all features.
    """
    names = open_names(source, "features")
    if names is not None:
        with new_names(target / "names" / "features") as writer:
            for start in range(0, len(features), WINDOW):
                writer.append([name.encode() for name in names.take(features[start : start + WINDOW])])
    copy_folders(source, target, ("names/labels",))


def write_selection(work: Path, features: NDArray[np.int64], of: int) -> dict[str, Any]:
    """Put the ids of the features (ascending, of so many) into a store under construction; returns its attribute."""
    array = ArrayWriter(Group(work), SELECTED, np.int64, CHUNK_BYTES)
    array.append(features)
    digest = array.close()
    fsync_tree(work / SELECTED)
    return {SELECTED: {"of": of, "sha256": digest}}


def selected_of(attributes: Mapping[str, Any]) -> int | None:
    """How many features the data had of which a store has some; None for a store of all. Raises StoreError."""
    about = attributes.get(SELECTED)
    if about is None:
        return None
    if not isinstance(about, dict) or not is_whole(about.get("of"), 0):
        raise StoreError(f"the attribute {SELECTED} is not understood: the store is damaged; make it again")
    return int(about["of"])


def n_converted(attributes: Mapping[str, Any]) -> int:
    """How many features the data of a dataset or model had when they were converted. Raises StoreError."""
    of = selected_of(attributes)
    return int(attributes["n_features"]) if of is None else of


def read_selection(path: Path, attributes: Mapping[str, Any], n: int) -> NDArray[np.int64] | None:
    """The ids of a store's n features in the data they were selected from; None for a store of all features."""
    of = selected_of(attributes)
    if of is None:
        return None
    features = read_small(path, SELECTED, n, np.int64)
    if n and not (features[0] >= 0 and features[-1] < of and (np.diff(features) > 0).all()):
        raise StoreError(
            f"{path / SELECTED} has no {n} features of {of} in ascending order: the store is damaged; make it again"
        )
    return features
