"""The zarr.json files of plain local groups and arrays, written and read as the JSON they are.

zarr takes a millisecond or more for each, in a thread of its own, and a run with a million labels comes by a hundred
thousand of them. What is not plain (compressed, of other formats, behind a URL) is left to zarr.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from xmc_stream.store.packs import member

_NAME = "zarr.json"
_GRID = {"name": "regular"}
_KEYS = {"name": "default", "configuration": {"separator": "/"}}
_KINDS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64")


class Group:
    """A group of a local store that is being written. attributes: its own, for a new one; else it is there already."""

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


@dataclass(frozen=True)
class PlainArray:
    """A 1-D array in a local folder: chunk k is the file c/k, raw little-endian values and their crc32c.

    places: where the chunks begin in the file `path`, a pack, if that is where they are.
    """

    path: Path
    dtype: np.dtype[Any]
    size: int
    chunk: int
    fill_value: float
    places: tuple[int, ...] | None = None

    def write(self) -> None:
        """Describe it in its folder, which is made if it is not there."""
        endian = {} if self.dtype.itemsize == 1 else {"configuration": {"endian": "little"}}
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
                "attributes": {},
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
    """The array in a folder; None where there is none, or one that zarr must read."""
    about = _read(path, "array")
    if about is None:
        return None
    if "places" in about:
        size, dtype = about["shape"][0], np.dtype(about["data_type"])
        return PlainArray(Path(about["pack"]), dtype, size, about["chunk"], 0.0, tuple(about["places"]))
    try:
        names = [codec["name"] for codec in about["codecs"]]
        endian = about["codecs"][0].get("configuration", {}).get("endian", "little")
        (size,), grid, kind = about["shape"], about["chunk_grid"], about["data_type"]
        plain = names == ["bytes", "crc32c"] and endian == "little" and kind in _KINDS
        if not plain or grid["name"] != "regular" or about["chunk_key_encoding"] != _KEYS:
            return None
        (chunk,) = grid["configuration"]["chunk_shape"]
        if about.get("storage_transformers") or size < 0 or chunk < 1:
            return None
        return PlainArray(path, np.dtype(kind), int(size), int(chunk), float(about["fill_value"]))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        return None


def attributes_of(path: Path) -> dict[str, Any]:
    """The attributes of the group in a folder. Raises FileNotFoundError or ValueError where there is none."""
    about = _read(path, "group")
    attributes = None if about is None else about.get("attributes", {})
    return attributes if isinstance(attributes, dict) else dict(zarr.open_group(path, mode="r").attrs)


def _read(path: Path, kind: str) -> dict[str, Any] | None:
    try:
        about = json.loads((path / _NAME).read_bytes())
    except NotADirectoryError:  # it may lead into a pack
        found = member(path)
        if found is None:
            return None
        about = {**found[1], "pack": str(found[0])}
    except (OSError, ValueError):
        return None
    whole = isinstance(about, dict) and about.get("zarr_format") == 3 and about.get("node_type") == kind
    return about if whole else None


def _write(folder: Path, about: Mapping[str, Any]) -> None:
    work = folder / f"{_NAME}.partial"  # whoever is killed here leaves the file whole
    work.write_text(json.dumps(about))
    work.replace(folder / _NAME)
