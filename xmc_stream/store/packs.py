"""Packs: groups and arrays in one file, for what a run keeps between its jobs.

In folders of its own an array takes two files and two folders, and each of them an fsync of some milliseconds; a pack
takes one. It is read as a folder is: `nodes` describes what lies at PACK/active/indices as if PACK were a folder.

Chunks of 256 KiB (an array that has one only: of its size) stand in the order in which they were full, each with its
crc32c behind it, at multiples of eight. Behind the last one stands the index, a JSON object: of each member what its
zarr.json would say, of an array also where its chunks begin (`places`). Then, little-endian, the length of the index
(8 bytes) and the crc32c of index and length (4 bytes). This reads packs; `packing` writes them.
"""

from __future__ import annotations

import functools
import json
import os
import stat
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from xmc_stream.errors import StoreError
from xmc_stream.system.files import regular

LENGTH_BYTES, CHECKSUM_BYTES = 8, 4
_END = LENGTH_BYTES + CHECKSUM_BYTES

Index = dict[str, dict[str, Any]]


def member(path: Path) -> tuple[Path, dict[str, Any]] | None:
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
    with open(pack, "rb", opener=regular) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _END))
        end = file.read(_END)
        length = int.from_bytes(end[:LENGTH_BYTES], "little")
        if len(end) < _END or length > size - _END:
            raise _unreadable(pack)
        file.seek(size - _END - length)
        text = file.read(length)
    if google_crc32c.value(text + end[:LENGTH_BYTES]) != int.from_bytes(end[LENGTH_BYTES:], "little"):
        raise _unreadable(pack)
    index: Index = json.loads(text)
    return index


def pack_damage(pack: Path) -> str:
    """What is first found to be damaged in a pack, or nothing: its index, or a chunk."""
    try:
        index = read_index(pack)
        with open(pack, "rb") as file:
            for about in index.values():
                for place in about.get("places", ()):
                    file.seek(place)
                    chunk = file.read(about["chunk"] * np.dtype(about["data_type"]).itemsize)
                    if google_crc32c.value(chunk) != int.from_bytes(file.read(CHECKSUM_BYTES), "little"):
                        return f"{pack} fails its checksum"
    except StoreError:
        return f"{pack} fails its checksum"
    except OSError as error:
        return f"{pack} cannot be read ({error.strerror})"
    return ""


def _unreadable(pack: Path) -> StoreError:
    return StoreError(f"{pack} fails its checksum: it was cut short or changed while the run was at it; run it again")
