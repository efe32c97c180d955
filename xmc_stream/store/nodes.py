"""The zarr.json files of plain local groups and arrays, written and read as the JSON they are.

zarr takes a millisecond or more for each, in a thread of its own, and a run with a million labels comes by a hundred
thousand of them. What is not plain (compressed, of other formats, behind a URL) is left to zarr.
"""

from __future__ import annotations

import functools
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c
import numpy as np

from xmc_stream.errors import StoreError, XmcStreamError, in_urls
from xmc_stream.store.remote import open_file
from xmc_stream.system.files import regular
from xmc_stream.system.stop import stop_if_unwanted

_NAME = "zarr.json"
_MOST_BYTES = 1 << 24  # of a zarr.json: what is parsed takes some twenty times as much memory
_PIECE = 1 << 18  # bytes of a chunk that are read at a time, to be compared with its checksum
CHECKSUM_BYTES = 4  # behind each chunk, and at the end of a pack
_MOST_ITEMS = 1 << 60  # of an array, and of a chunk: their bytes are numbers of 64 bits
CRCS = "chunks_crc32c"  # attribute of an array: the checksum of each chunk file, in eight digits, one after another
# what zarr raises where a zarr.json is not what it must be
ZARR_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
_GRID = {"name": "regular"}
_KEYS = {"name": "default", "configuration": {"separator": "/"}}
_KINDS = (
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
)  # fmt: skip


class Group:
    """A group, or array, of a local store that is being written. attributes: of a new group; else it is there already."""

    def __init__(self, path: Path, attributes: Mapping[str, Any] | None = None) -> None:
        self.path = path
        if attributes is not None:
            path.mkdir(parents=True, exist_ok=True)
            _write(path, {"attributes": dict(attributes), "zarr_format": 3, "node_type": "group"})

    def create_group(self, name: str) -> Group:
        """A group below this one, and those on the way to it."""
        group = self
        for part in name.split("/"):
            path = group.path / part
            group = Group(path, None if (path / _NAME).exists() else {})
        return group

    def update_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Set attributes beside those that are there."""
        about = json.loads((self.path / _NAME).read_bytes())
        about["attributes"].update(attributes)
        _write(self.path, about)


def from_here(path: Path) -> str:
    """An absolute path, relative to the current folder where it is in it; of what is behind a URL the URL."""
    here = Path.cwd()
    return in_urls(str(path.relative_to(here) if path.is_relative_to(here) else path))


@dataclass(frozen=True)
class PlainArray:
    """A 1-D array in a local folder: chunk k is the file c/k, raw little-endian values and their crc32c.

    places: where the chunks begin in the file `path`, a pack, if that is where they are. crcs: the checksum of each chunk
    as it was written, in eight digits, one after another: of values that are left out, as ones are, ""; None where nobody
    noted them.
    """

    path: Path
    dtype: np.dtype[Any]
    size: int
    chunk: int
    fill_value: float
    places: tuple[int, ...] | None = None
    crcs: str | None = None

    def write(self) -> None:
        """Describe it in its folder, which is made if it is not there."""
        endian = {} if self.dtype.itemsize == 1 else {"configuration": {"endian": "little"}}
        if not self.path.is_dir():
            self.path.mkdir(parents=True, exist_ok=True)
        _write(
            self.path,
            {
                "shape": [self.size],
                "data_type": self.dtype.name,
                "chunk_grid": {**_GRID, "configuration": {"chunk_shape": [self.chunk]}},
                "chunk_key_encoding": _KEYS,
                "fill_value": (float if self.dtype.kind == "f" else int)(self.fill_value),
                "codecs": [{"name": "bytes", **endian}, {"name": "crc32c"}],
                "attributes": {} if self.crcs is None else {CRCS: self.crcs},
                "zarr_format": 3,
                "node_type": "array",
                "storage_transformers": [],
            },
        )

    @property
    def nchunks_initialized(self) -> int:
        """Chunk files that are there; as zarr calls it."""
        chunks = self.path / "c"
        return len(os.listdir(chunks)) if chunks.is_dir() else 0


def plain_array(path: Path) -> PlainArray | None:
    """The array in a folder; None where there is none, or one that zarr must read.

    Raises StoreError where its zarr.json is damaged.
    """
    about = _read(path, "array")
    if about is None:
        return None
    if "places" in about:
        with understood(path):
            (size,), kind, chunk, places = about["shape"], about["data_type"], about["chunk"], about["places"]
            return PlainArray(Path(about["pack"]), np.dtype(kind), size, chunk, 0.0, tuple(places))
    try:
        names = [codec["name"] for codec in about["codecs"]]
        endian = about["codecs"][0].get("configuration", {}).get("endian", "little")
        (size,), grid, kind = about["shape"], about["chunk_grid"], about["data_type"]
        plain = names == ["bytes", "crc32c"] and endian == "little" and kind in _KINDS
        if not plain or grid["name"] != "regular" or about["chunk_key_encoding"] != _KEYS:
            return None
        (chunk,) = grid["configuration"]["chunk_shape"]
        if about.get("storage_transformers") or not (is_whole(size, 0) and is_whole(chunk, 1)):
            return None
        crcs = crcs_of(path, about, -(-size // chunk))
        return PlainArray(path, np.dtype(kind), size, chunk, float(about["fill_value"]), crcs=crcs)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        return None


@contextmanager
def understood(file: Path) -> Iterator[None]:
    """What a file of a store holds is taken for granted in the block: where it is otherwise, a StoreError names it."""
    try:
        yield
    except XmcStreamError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise not_understood(file, error) from error


def whole_of(path: Path, attributes: Mapping[str, Any], name: str, least: int = 0) -> int:
    """An attribute of the group in a folder. Raises StoreError where it is no whole number from `least` on."""
    value = attributes.get(name)
    if not is_whole(value, least):
        raise StoreError(
            f"{path / _NAME}: the attribute {name} is {str(value)[:100]!r}, no whole number from {least} on: the store is "
            "damaged; make it again"
        )
    return int(value)  # type: ignore[arg-type]


def is_whole(value: Any, least: int) -> bool:
    """Whether a value of a zarr.json is a whole number from `least` up to what arrays may have."""
    return type(value) is int and least <= value <= _MOST_ITEMS


def crcs_of(path: Path, about: Mapping[str, Any], n_chunks: int) -> str | None:
    """The checksums of an array's chunks that its zarr.json has, if any. Raises StoreError for what they cannot be."""
    attributes = about.get("attributes")
    crcs = attributes.get(CRCS) if isinstance(attributes, dict) else None
    if crcs is None:
        return None
    if not isinstance(crcs, str) or len(crcs) not in (0, 8 * n_chunks) or not re.fullmatch("[0-9a-f]*", crcs):
        raise StoreError(
            f"{path / _NAME}: {CRCS} is not a checksum of each of {n_chunks} chunks: the store is damaged; make it again"
        )
    return crcs


def checksum(file: BinaryIO, n_bytes: int, see: Callable[[bytes], None] | None = None) -> str:
    """The crc32c of the next bytes of a file, in eight digits; "" where it is not the one that stands behind them.

    see: is given the bytes, piece by piece.
    """
    crc, left = 0, n_bytes
    while left and (piece := file.read(min(left, _PIECE))):
        stop_if_unwanted()
        crc, left = google_crc32c.extend(crc, piece), left - len(piece)
        if see is not None:
            see(piece)
    return f"{crc:08x}" if file.read(CHECKSUM_BYTES) == crc.to_bytes(CHECKSUM_BYTES, "little") else ""


def attributes_of(path: Path) -> dict[str, Any]:
    """The attributes of the group in a folder. Raises FileNotFoundError or ValueError where there is none, and

    StoreError where its zarr.json is damaged.
    """
    about = _read(path, "group")
    if about is not None:
        attributes = about.get("attributes", {})
        if not isinstance(attributes, dict):
            raise StoreError(f"{path / _NAME}: its attributes are no object: the store is damaged; make it again")
        return attributes
    if not path.exists():
        raise FileNotFoundError(path)
    import zarr  # it takes a quarter of a second, and plain stores do without

    try:
        return dict(zarr.open_group(path, mode="r").attrs)
    except (FileNotFoundError, ValueError):
        raise
    except ZARR_ERRORS as error:
        raise not_understood(path / _NAME, error) from None


def read_json(file: Path) -> Any:
    """What a zarr.json holds. Raises StoreError where it is no JSON or far too large, OSError where it cannot be read."""
    with open(open_file(file), "rb", buffering=0) as opened:
        if os.fstat(opened.fileno()).st_size > _MOST_BYTES:  # not read(_MOST_BYTES): it takes so much memory at once
            raise StoreError(f"{file} has more than {_MOST_BYTES} bytes: the store is damaged; make it again")
        content = opened.readall()
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise not_understood(file, error) from None


def unreadable(file: str | Path, error: OSError) -> StoreError:
    """The error for a file of a store that the system does not give: it may be sound, so nothing says to make it again."""
    said = error.strerror or error
    return StoreError(
        f"{error.filename or file} cannot be read ({said}): look at the disk and run the same command again"
    )


def not_understood(file: str | Path, error: Exception) -> StoreError:
    """The error for a file of a store that is not what it must be, or cannot be read."""
    gone = FileNotFoundError, NotADirectoryError, IsADirectoryError
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, gone):
        return unreadable(file, error)
    said = " ".join(f"{type(error).__name__}: {error}".split())
    return StoreError(f"{file} is not what it must be ({said[:200]}): the store is damaged; make it again")


def _read(path: Path, kind: str) -> dict[str, Any] | None:
    """The description of a group or array; None where there is none of version 3."""
    try:
        about = read_json(path / _NAME)
    except NotADirectoryError:  # it may lead into a pack
        found = _member(path)
        if found is None:
            return None
        about = {**found[1], "pack": str(found[0])}
    except FileNotFoundError:
        return None
    whole = isinstance(about, dict) and about.get("zarr_format") == 3 and about.get("node_type") == kind
    return about if whole else None


LENGTH_BYTES = 8  # at the end of a pack: how long its index is
_END = LENGTH_BYTES + CHECKSUM_BYTES
Index = dict[str, dict[str, Any]]  # of a pack (see `encoding`): what the zarr.json of each member would say


def _member(path: Path) -> tuple[Path, dict[str, Any]] | None:
    """The pack that a path leads into, and what its index says of the member there; None where there is none.

    Raises StoreError for a pack that is damaged.
    """
    for above in path.parents:
        try:
            found = os.stat(above)
        except (FileNotFoundError, NotADirectoryError):  # it is below the pack, or there is nothing
            continue
        if not stat.S_ISREG(found.st_mode):
            return None
        index = _index(above, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))
        about = index.get(path.relative_to(above).as_posix())
        return None if about is None else (above, about)
    return None


@functools.lru_cache(maxsize=8)  # members of a pack are opened one after another
def _index(pack: Path, as_it_is: tuple[int, ...]) -> Index:
    """`read_index`, once for a file as it is: device, number, size and time of its last change."""
    return read_index(pack)


def read_index(pack: Path) -> Index:
    """What a pack holds, by name. Raises StoreError where it is damaged."""
    damaged = StoreError(
        f"{pack} fails its checksum: it was cut short or changed while the run was at it; run it again"
    )
    with open(pack, "rb", opener=regular) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _END))
        end = file.read(_END)
        length = int.from_bytes(end[:LENGTH_BYTES], "little")
        if len(end) < _END or length > size - _END:
            raise damaged
        file.seek(size - _END - length)
        text = file.read(length)
    if google_crc32c.value(text + end[:LENGTH_BYTES]) != int.from_bytes(end[LENGTH_BYTES:], "little"):
        raise damaged
    index: Index = json.loads(text)
    return index


def _write(folder: Path, about: Mapping[str, Any]) -> None:
    work = f"{folder / _NAME}.partial"  # whoever is killed here leaves the file whole
    with open(work, "wb") as file:
        file.write(json.dumps(about).encode())
    os.replace(work, folder / _NAME)


def open_foreign(path: Path) -> Any:
    """A zarr group that others wrote, of version 2 or 3, for reading. Raises StoreError where there is none."""
    import zarr

    try:
        return zarr.open_group(path, mode="r")
    except (FileNotFoundError, ValueError, KeyError, zarr.errors.GroupNotFoundError):
        raise StoreError(f"{path} is not a zarr group: check the name") from None
