"""What files a store has and should have, and whether each is what was written.

Every chunk file ends with the checksum of its values. The zarr.json files have none of their own: a finished store is
sealed, which puts a hash of all of them into the attributes of the outermost. What values mean is not looked at here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import zarr

SEAL = "metadata_sha256"
BLANK = "0" * 64  # what the seal is while the hash is taken
_APART = ("X/columns/", "observed/")  # made later than the dataset they lie in: stores with seals of their own
_LOGS = {"events.jsonl", "ledger.jsonl"}  # what a run that made a model wrote down: no part of what the model is
LOGS = "logs_sha256"
_CHECKSUM_BYTES = 4
_PIECE = 1 << 20


@dataclass(frozen=True)
class ArrayFiles:
    """The chunk files of an array. grid: chunks along each dimension; chunk_bytes, n_bytes: of a chunk's and all values."""

    folder: str
    grid: tuple[int, ...]
    chunk_bytes: int
    n_bytes: int

    @property
    def file_bytes(self) -> int:
        """Bytes of all chunk files."""
        return math.prod(self.grid) * (self.chunk_bytes + _CHECKSUM_BYTES)

    def names(self) -> Iterator[str]:
        """The chunk files, in the order of the values of a 1-D array."""
        return ("/".join(["c", *map(str, place)]) for place in product(*map(range, self.grid)))

    def check(self) -> tuple[str, list[str]]:
        """Read all of it: the sha256 of the values of a 1-D array, and a line for each chunk file that is damaged."""
        values, damage = hashlib.sha256(), []
        left = self.n_bytes  # the last chunk is padded
        for name in self.names():
            file = Path(self.folder) / name
            try:
                size = file.stat().st_size
                if size != self.chunk_bytes + _CHECKSUM_BYTES:
                    damage.append(f"{file} has {size} bytes instead of {self.chunk_bytes + _CHECKSUM_BYTES}")
                    continue
                crc, unread = 0, self.chunk_bytes
                with open(file, "rb", buffering=0) as raw:
                    while unread and (piece := raw.read(min(unread, _PIECE))):
                        crc = google_crc32c.extend(crc, piece)
                        unread -= len(piece)
                        values.update(memoryview(piece)[:left])
                        left -= min(left, len(piece))
                    stored = raw.read(_CHECKSUM_BYTES)
                if crc.to_bytes(_CHECKSUM_BYTES, "little") != stored:
                    damage.append(f"{file} fails its checksum")
            except OSError as error:
                damage.append(f"{file} cannot be read ({error.strerror})")
        return values.hexdigest(), damage


@dataclass(frozen=True)
class Inventory:
    """What stands under a folder. arrays: those with all their files; damage: a line for each file that is not right."""

    arrays: list[ArrayFiles]
    n_files: int
    damage: list[str]


def take_inventory(path: Path) -> Inventory:
    """List a store's arrays and compare the files that are there with those that should be. Reads the zarr.json files."""
    found = set(_files(path))
    described = sorted(name for name in found if _is_description(name))
    n_files = len(found)
    found -= {*described, *_LOGS}
    arrays: list[ArrayFiles] = []
    damage: list[str] = []
    for name in described:
        file = path / name
        try:
            array, of_ones = _array_files(file)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            damage.append(f"{file} does not describe a group or an array ({error!r})")
            continue
        if array is None:
            continue
        inside = name.removesuffix("zarr.json")
        expected = {inside + chunk for chunk in array.names()}
        if of_ones and not expected & found:  # readers see the fill value
            continue
        damage += [f"{path / missing} is missing" for missing in sorted(expected - found)]
        if expected and expected <= found:
            arrays.append(array)
        found -= expected
    damage += [f"{path / name} does not belong to the store" for name in sorted(found)]
    return Inventory(arrays, n_files, damage)


def _files(path: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(path):
        folders.sort()
        for name in files:
            yield os.path.relpath(os.path.join(folder, name), path)


def _is_description(name: str) -> bool:
    return name.rpartition("/")[2] == "zarr.json"


def _array_files(file: Path) -> tuple[ArrayFiles | None, bool]:
    """The array that a zarr.json describes, if it is none of a group; whether its chunks may be left out for ones."""
    about: dict[str, Any] = json.loads(file.read_bytes())
    if about["zarr_format"] != 3 or about["node_type"] not in ("array", "group"):
        raise ValueError(f"format {about['zarr_format']}, node {about['node_type']}")
    if about["node_type"] == "group":
        return None, False
    if [codec["name"] for codec in about["codecs"]] != ["bytes", "crc32c"]:
        raise ValueError("its chunks are not plain values and a checksum")
    shape, chunk = about["shape"], about["chunk_grid"]["configuration"]["chunk_shape"]
    itemsize = np.dtype(about["data_type"]).itemsize
    grid = tuple(-(-n // c) for n, c in zip(shape, chunk, strict=True))
    array = ArrayFiles(str(file.parent), grid, math.prod(chunk) * itemsize, math.prod(shape) * itemsize)
    return array, about["fill_value"] == 1


def seal(path: Path) -> None:
    """Put a hash of all zarr.json files under `path`, byte for byte, into the attributes of its own."""
    zarr.open_group(path, mode="r+").update_attributes({SEAL: BLANK})
    fill_seal(path)


def fill_seal(path: Path) -> None:
    """Put it there where a blank one stands, as in the attributes of a store that was made with {SEAL: BLANK}."""
    file = path / "zarr.json"
    digest = _metadata_hash(path, file.read_bytes())
    sealed = path / "zarr.sealed.partial"  # whoever is killed here leaves the file whole
    sealed.write_bytes(file.read_bytes().replace(BLANK.encode(), digest.encode(), 1))
    sealed.replace(file)


def change_sealed(path: Path, attributes: Mapping[str, Any]) -> None:
    """Give a sealed store other attributes, and a seal that fits them, in one step: a kill leaves one or the other."""
    about = json.loads((path / "zarr.json").read_bytes())
    blank = json.dumps({**about, "attributes": {**attributes, SEAL: BLANK}}).encode()
    work = path / "zarr.sealed.partial"
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
            with open(path / name, "rb") as file:
                hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def log_damage(path: Path, sealed: dict[str, str]) -> list[str]:
    """A line for each log that is not as it was when the model was finished."""
    now = log_hashes(path)
    return [
        f"{path / name} {'was changed' if name in now else 'is missing'}"
        for name in sealed
        if now.get(name) != sealed[name]
    ]


def seal_damage(path: Path) -> list[str]:
    """A line where the zarr.json files under `path` are not those that were sealed."""
    file = path / "zarr.json"
    try:
        content = file.read_bytes()
        sealed = json.loads(content)["attributes"][SEAL]
    except (OSError, ValueError, TypeError):
        return [f"{file} cannot be read"]
    except KeyError:
        return [f"{file} has no {SEAL}: it was written by an older xmc_stream, or changed since"]
    blanked = content.replace(str(sealed).encode(), BLANK.encode(), 1)
    if _metadata_hash(path, blanked) != sealed:
        return [f"{file} or a zarr.json below it was changed or is missing: together they do not fit {SEAL}"]
    return []


def _metadata_hash(path: Path, own: bytes) -> str:
    """own: the content of the outermost file, with a blank seal."""
    digest = hashlib.sha256()
    for name in sorted(_files(path)):
        if _is_description(name) and not name.startswith(_APART):
            content = own if name == "zarr.json" else (path / name).read_bytes()
            digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
