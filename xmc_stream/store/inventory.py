"""What files a store has and should have, and whether each is what was written.

Every chunk file ends with the checksum of its values, and the array's zarr.json has the checksums of all its chunks. The
zarr.json files have none of their own: a finished store is sealed, which puts a hash of all of them into the attributes of
the outermost. So a file that is whole in itself and another store's is found too. What values mean is not looked at here.

A hash of a store's arrays alone says what two stores have in common that say different things of themselves. Each array counts
by its name, type, shape and values; attributes, chunks, codecs and files do not count, nor what a run wrote down. So a store
can be compared with one that another version of the library made.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import StoreError
from xmc_stream.store.chunks import ChunkedArray, Comparing, compare_while_reading, described
from xmc_stream.store.encoding import folder_bytes
from xmc_stream.store.nodes import (
    CHECKSUM_BYTES,
    CRCS,
    ZARR_ERRORS,
    Group,
    PlainArray,
    attributes_of,
    checksum,
    crcs_of,
    is_whole,
    not_understood,
    read_json,
    understood,
    whole_of,
)
from xmc_stream.store.remote import local_path, open_file, size_of
from xmc_stream.system.progress import current

SEAL = "metadata_sha256"
UNREAD = "cannot be read"  # in a line of damage that may pass
BLANK = "0" * 64  # what the seal is while the hash is taken
APART = ("X/columns", "observed")  # made later than the dataset they lie in: stores with seals of their own
_SEALING = "zarr.sealed.partial"
# what is being made in a finished store, or what a process left that was killed at it: no part of the store
_UNDER_WAY = (*(f"{name}.{kind}/" for name in APART for kind in ("partial", "replaced")), _SEALING)
_LOGS = {"events.jsonl", "ledger.jsonl"}  # what a run that made a model wrote down: no part of what the model is
LOGS = "logs_sha256"
_PIECE = 1 << 20
_MOST_MISSING = 100  # files of an array that are named
_DENSEST = 1 << 16  # times smaller than its values is an array on disk at most, where others compressed it
_BLOCK = 1 << 20  # bytes of an array that are in memory at a time
_AGAIN = "X/columns/"  # X once more, made when a method asks for it: no reason for another hash


@dataclass(frozen=True)
class ArrayFiles:
    """The chunk files of an array. grid: chunks along each dimension; chunk_bytes, n_bytes: of a chunk's and all values.

    crcs: see `nodes.PlainArray`.
    """

    folder: str
    grid: tuple[int, ...]
    chunk_bytes: int
    n_bytes: int
    crcs: str | None = None

    @property
    def n_chunks(self) -> int:
        """Chunk files."""
        return math.prod(self.grid)

    @property
    def file_bytes(self) -> int:
        """Bytes of all chunk files."""
        return self.n_chunks * (self.chunk_bytes + CHECKSUM_BYTES)

    def names(self) -> Iterator[str]:
        """The chunk files, in the order of the values of a 1-D array."""
        return ("/".join(["c", *map(str, place)]) for place in product(*map(range, self.grid)))

    def check(self) -> tuple[str, list[str]]:
        """Read all of it: the sha256 of the values of a 1-D array, and a line for each chunk file that is damaged."""
        values, damage = hashlib.sha256(), []
        left = self.n_bytes

        def hashed(piece: bytes) -> None:
            nonlocal left
            values.update(memoryview(piece)[:left])  # the last chunk is padded
            left -= min(left, len(piece))

        for k, name in enumerate(self.names()):
            file = Path(self.folder) / name
            try:
                if (size := size_of(file)) != self.chunk_bytes + CHECKSUM_BYTES:
                    damage.append(f"{file} has {size} bytes instead of {self.chunk_bytes + CHECKSUM_BYTES}")
                    continue
                with open(open_file(file), "rb", buffering=0) as raw:
                    crc = checksum(raw, self.chunk_bytes, hashed)
                if not crc:
                    damage.append(f"{file} fails its checksum")
                elif self.crcs is not None and crc != self.crcs[8 * k : 8 * k + 8]:
                    damage.append(f"{file} is not the file that was written here")
            except StoreError as error:  # it could not be fetched
                damage.append(error.in_shell)
            except OSError as error:
                damage.append(f"{file} {UNREAD} ({error.strerror})")
        return values.hexdigest(), damage

    def other_chunks(self) -> Iterator[str]:
        """A line for each chunk file that is missing, or does not end with the checksum that was written."""
        for k, (file, crc) in enumerate(self._ends()):
            if not crc:
                yield f"{file} is missing or not whole"
            elif self.crcs is not None and crc != self.crcs[8 * k : 8 * k + 8]:
                yield f"{file} is not the file that was written here"

    def note_crcs(self) -> None:
        """Put the checksums that the chunk files end with into the zarr.json."""
        Group(Path(self.folder)).update_attributes({CRCS: "".join(crc for _, crc in self._ends())})

    def _ends(self) -> Iterator[tuple[Path, str]]:
        """Each chunk file, and the checksum that it ends with; "" where it is not there or not of its size.

        Raises OSError where it cannot be read.
        """
        for name in self.names():
            file, crc = Path(self.folder) / name, ""
            with suppress(FileNotFoundError), open(open_file(file), "rb") as opened:
                if opened.seek(0, os.SEEK_END) == self.chunk_bytes + CHECKSUM_BYTES:
                    opened.seek(self.chunk_bytes)
                    crc = f"{int.from_bytes(opened.read(), 'little'):08x}"
            yield file, crc


@dataclass(frozen=True)
class Inventory:
    """What stands under a folder. arrays: those with all their files; damage: a line for each file that is not right."""

    arrays: list[ArrayFiles]
    n_files: int
    damage: list[str]


def take_inventory(path: Path) -> Inventory:
    """List a store's arrays and compare the files that are there with those that should be. Reads the zarr.json files."""
    found = set(files_of_store(path))
    described = sorted(name for name in found if _is_description(name))
    n_files = len(found)
    found -= {*described, *_LOGS}
    arrays: list[ArrayFiles] = []
    damage: list[str] = []
    for name in described:
        file = path / name
        try:
            array, of_ones = array_files(file)
        except OSError as error:
            damage.append(f"{file} {UNREAD} ({error.strerror or error})")
            continue
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            damage.append(f"{file} does not describe a group or an array ({error!r})")
            continue
        if array is None:
            continue
        inside = name.removesuffix("zarr.json")
        if of_ones and not any(other.startswith(f"{inside}c/") for other in found):  # readers see the fill value
            continue
        # no more of them than there are files, whatever is promised
        expected = {inside + chunk for chunk in itertools.islice(array.names(), len(found) + 1)}
        damage += [f"{path / missing} is missing" for missing in sorted(expected - found)[:_MOST_MISSING]]
        if expected and expected <= found:
            arrays.append(array)
        found -= expected
    damage += [f"{path / name} does not belong to the store" for name in sorted(found)]
    return Inventory(arrays, n_files, damage)


def files_of_store(path: Path) -> Iterator[str]:
    """The files of a store, by their paths in it; those of what is made in it now are none of them."""
    for folder, folders, files in os.walk(path):
        folders.sort()
        for name in files:
            inside = os.path.relpath(os.path.join(folder, name), path)
            if not inside.startswith(_UNDER_WAY):
                yield inside


def _is_description(name: str) -> bool:
    return name.rpartition("/")[2] == "zarr.json"


def array_files(file: Path) -> tuple[ArrayFiles | None, bool]:
    """The array that a zarr.json describes, if it is none of a group; whether its chunks may be left out for ones."""
    about: dict[str, Any] = read_json(file)
    if about["zarr_format"] != 3 or about["node_type"] not in ("array", "group"):
        raise ValueError(f"format {about['zarr_format']}, node {about['node_type']}")
    if about["node_type"] == "group":
        return None, False
    if [codec["name"] for codec in about["codecs"]] != ["bytes", "crc32c"]:
        raise ValueError("its chunks are not plain values and a checksum")
    shape, chunk = about["shape"], about["chunk_grid"]["configuration"]["chunk_shape"]
    if not (all(is_whole(n, 0) for n in shape) and all(is_whole(n, 1) for n in chunk)):
        raise ValueError(f"shape {shape}, chunks of {chunk}")
    itemsize = np.dtype(about["data_type"]).itemsize
    grid = tuple(-(-n // c) for n, c in zip(shape, chunk, strict=True))
    crcs = crcs_of(file.parent, about, math.prod(grid))
    array = ArrayFiles(str(file.parent), grid, math.prod(chunk) * itemsize, math.prod(shape) * itemsize, crcs)
    return array, about["fill_value"] == 1


def seal(path: Path) -> None:
    """Put a hash of all zarr.json files under `path`, byte for byte, into the attributes of its own."""
    Group(path).update_attributes({SEAL: BLANK})
    fill_seal(path)


def fill_seal(path: Path) -> None:
    """Put it there where a blank one stands, as in the attributes of a store that was made with {SEAL: BLANK}."""
    file = path / "zarr.json"
    digest = _metadata_hash(path, file.read_bytes())
    sealed = path / _SEALING  # whoever is killed here leaves the file whole
    sealed.write_bytes(file.read_bytes().replace(BLANK.encode(), digest.encode(), 1))
    sealed.replace(file)


def change_sealed(path: Path, attributes: Mapping[str, Any]) -> None:
    """Give a sealed store other attributes, and a seal that fits them, in one step: a kill leaves one or the other."""
    refuse_broken_seal(path)  # what was damaged before stays so
    about = json.loads((local_path(path) / "zarr.json").read_bytes())
    blank = json.dumps({**about, "attributes": {**attributes, SEAL: BLANK}}).encode()
    work = path / _SEALING
    with open(work, "wb") as file:
        file.write(blank.replace(BLANK.encode(), _metadata_hash(path, blank).encode(), 1))
        file.flush()
        os.fsync(file.fileno())
    work.replace(path / "zarr.json")


def log_hashes(path: Path) -> dict[str, str]:
    """The sha256 of each log of a run in a model's folder, for its attributes (LOGS), which are sealed."""
    hashes = {}
    for name in sorted(_LOGS):
        if (path / name).exists():
            with open(open_file(path / name), "rb") as file:
                hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def log_damage(path: Path, sealed: dict[str, str]) -> list[str]:
    """A line for each log that is not as it was when the model was finished, or was not there then."""
    now = log_hashes(path)
    return [
        f"{path / name} {'is missing' if name not in now else 'was changed' if name in sealed else 'does not belong there'}"
        for name in sorted({*sealed, *now})
        if now.get(name) != sealed.get(name)
    ]


def seal_damage(path: Path) -> list[str]:
    """A line where the zarr.json files under `path` are not those that were sealed, or there is no seal."""
    try:
        return _broken_seal(path)
    except OSError as error:
        return [f"{path / 'zarr.json'} or a zarr.json below it {UNREAD} ({error})"]


def _broken_seal(path: Path) -> list[str]:
    """See `seal_damage`. Raises OSError where files cannot be read."""
    file = path / "zarr.json"
    try:
        sealed = str(read_json(file)["attributes"][SEAL])
        with open(open_file(file), "rb") as opened:
            own = opened.read().replace(sealed.encode(), BLANK.encode(), 1)
        whole = _metadata_hash(path, own) == sealed
    except TypeError as error:
        return [f"{file} or a zarr.json below it is not what it must be ({error})"]
    except KeyError:
        return [f"{file} has no {SEAL}: it was written by an older xmc_stream, or changed since"]
    if not whole:
        return [f"{file} or a zarr.json below it was changed or is missing: together they do not fit {SEAL}"]
    return []


def refuse_broken_seal(path: Path) -> None:
    """Raise StoreError where the zarr.json files under `path` are not those that were sealed, or there is no seal."""
    try:
        lines = _broken_seal(path)
    except StoreError:
        raise
    except OSError as error:
        raise not_understood(path / "zarr.json", error) from None
    for line in lines:
        raise StoreError(f"{line}: the store is damaged; make it again")


def _metadata_hash(path: Path, own: bytes) -> str:
    """own: the content of the outermost file, with a blank seal."""
    digest = hashlib.sha256()
    for name in sorted(files_of_store(path)):
        if _is_description(name) and not name.startswith(APART):
            size = len(own) if name == "zarr.json" else (path / name).stat().st_size
            digest.update(f"{name} {size}\n".encode())
            with io.BytesIO(own) if name == "zarr.json" else open(open_file(path / name), "rb") as file:
                while piece := file.read(_PIECE):
                    digest.update(piece)
    return digest.hexdigest()


class StoredArrays:
    """What a dataset, a model and predictions are alike in: a folder of arrays."""

    path: Path
    attributes: dict[str, Any]

    def _open(self, shown: str | Path, format: str, version: int, missing: str, other: str) -> None:
        """Read the attributes, if they are not there. Raises StoreError for another format, or a newer version.

        version: the newest that is read, 0 for a format without. missing, other: what to say of the path where there is
        nothing, or something else.
        """
        try:
            self.attributes = getattr(self, "attributes", None) or attributes_of(self.path)
        except (FileNotFoundError, ValueError):
            raise StoreError(f"{shown} {missing}") from None
        if self.attributes.get("format") != format:
            raise StoreError(f"{shown} is a zarr group but {other}")
        if version and (found := whole_of(self.path, self.attributes, "version", 1)) > version:
            raise StoreError(f"{shown} was written by a newer xmc_stream (format {found}): update")

    def arrays_digest(self) -> str:
        """A hash of the arrays alone: of the name, type, shape and values of each.

        Attributes, chunks and compression do not enter. So it tells whether two versions of the library wrote the same
        arrays, also where they say different things about them. All arrays of the store are read, except X by columns.

        Returns
        -------
        str
            A SHA-256 hash, in hexadecimal digits.

        Raises
        ------
        StoreError
            The store is damaged: what is read is compared with its checksums.
        """
        return arrays_digest(self.path)


def arrays_digest(path: Path) -> str:
    """See `StoredArrays.arrays_digest`."""
    with compare_while_reading(Comparing((str(path),), uuid.uuid4().hex)):
        for store in (path, path / "observed"):  # a mask has a seal of its own
            if store == path or store.exists():
                refuse_broken_seal(store)
        arrays = {name: described(path / name) for name in _names(path)}
        for name, array in arrays.items():
            _refuse_what_is_not_there(path / name, array)
        bar, done = current(), 0
        whole = max(1, sum(_size(array) for array in arrays.values()))
        bar.phase("hashing the arrays")
        digest = hashlib.sha256()
        for name, array in arrays.items():
            values = hashlib.sha256()
            for block in _blocks(path / name, array):
                values.update(block.data)
                done += block.nbytes
                bar.advance(done / whole)
            about = [name, array.dtype.name, list(_shape(array)), values.hexdigest()]
            digest.update(json.dumps(about).encode() + b"\n")
    return digest.hexdigest()


def _names(path: Path) -> Iterator[str]:
    """The arrays of a store by their places in it, in one order."""
    for name in sorted(files_of_store(path)):
        folder, _, file = name.rpartition("/")
        if file == "zarr.json" and not name.startswith(_AGAIN):
            with understood(path / name):
                is_array = read_json(path / name)["node_type"] == "array"
            if is_array:
                yield folder


def _shape(array: Any) -> tuple[int, ...]:
    return (array.size,) if isinstance(array, PlainArray) else tuple(array.shape)


def _size(array: Any) -> int:
    return math.prod(_shape(array)) * int(array.dtype.itemsize)


def _is_ones(path: Path, array: Any) -> bool:
    """Whether it is the values of a matrix of ones, which have no files."""
    plain = isinstance(array, PlainArray) and path.name == "data"
    return plain and array.fill_value == 1 and array.nchunks_initialized == 0


def _refuse_what_is_not_there(path: Path, array: Any) -> None:
    """Raise StoreError for an array that says it is longer than its files can be: without end, it would take for ever."""
    if _is_ones(path, array):
        indices = described(path.with_name("indices"))
        if _shape(indices) == _shape(array):
            _refuse_what_is_not_there(path.with_name("indices"), indices)
            return
    elif isinstance(array, PlainArray):
        ChunkedArray(array).check_sizes()
        return
    elif _size(array) <= _DENSEST * (folder_bytes(path) + _DENSEST):
        return
    raise StoreError(f"{path} has fewer values than its zarr.json says: the store is damaged; make it again")


def _blocks(path: Path, array: Any) -> Iterator[NDArray[Any]]:
    """The values of an array in turn, little-endian; of one with several dimensions row by row."""
    stored = array.dtype.newbyteorder("<")
    if len(shape := _shape(array)) > 1:
        for start in range(0, shape[0], array.chunks[0]):  # zarr reads whole chunks anyway
            try:
                yield np.ascontiguousarray(array[start : start + array.chunks[0]], stored)
            except ZARR_ERRORS as error:
                raise not_understood(path, error) from None
        return
    items = _BLOCK // int(array.dtype.itemsize)
    if _is_ones(path, array):
        block = np.ones(min(items, array.size), stored)
        for start in range(0, array.size, items):
            yield block[: array.size - start]
        return
    reader = ChunkedArray(array)
    for start in range(0, reader.size, items):
        yield np.ascontiguousarray(reader.read(start, min(start + items, reader.size)), stored)


def is_of_format(path: Path, format: str) -> bool:
    """Whether a folder says it is a store of a format; read without zarr, so that any other folder is told apart cheaply."""
    try:
        attributes = read_json(path / "zarr.json")["attributes"]
    except (OSError, KeyError, TypeError):
        return False
    return isinstance(attributes, dict) and attributes.get("format") == format
