"""The writer of arrays: any sizes around the bounds of chunks come back through zarr, and nothing stays open."""

from __future__ import annotations

import gc
import hashlib
import os
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import zarr

from xmc_stream.store.chunks import open_array
from xmc_stream.store.encoding import ArrayWriter
from xmc_stream.store.nodes import Group

CHUNK = 2**17
CHUNK_ITEMS = CHUNK // 4


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("n_appends", [1, 3])
@pytest.mark.parametrize(
    "size",
    [
        0, 1, 1023, 1024, 1025, CHUNK_ITEMS - 1, CHUNK_ITEMS, CHUNK_ITEMS + 1,
        2 * CHUNK_ITEMS - 1, 2 * CHUNK_ITEMS, 2 * CHUNK_ITEMS + 1, 5 * CHUNK_ITEMS + 7,
    ],
)  # fmt: skip
def test_any_size_comes_back_in_chunks_that_are_full(tmp_path: Path, size: int, n_appends: int) -> None:
    group = Group(tmp_path / "g", {})
    values = np.random.default_rng(size).integers(-(2**31), 2**31, size, np.int32)
    writer = ArrayWriter(group, "a", np.int32, CHUNK)
    for part in np.array_split(values, n_appends):
        writer.append(part)
        writer.append(part[:0])
    assert writer.close() == hashlib.sha256(values.tobytes()).hexdigest()

    array: Any = zarr.open_array(tmp_path / "g/a", mode="r")
    assert (array[:] == values).all()  # zarr compares the checksums
    assert (open_array(tmp_path / "g/a").read(0, size) == values).all()
    # one chunk is as large as the array; several are of the size that was asked for
    chunk = CHUNK_ITEMS if size > CHUNK_ITEMS else max(1, size)
    assert array.chunks == (chunk,)
    files = sorted((tmp_path / "g/a/c").iterdir(), key=lambda file: int(file.name))
    assert [file.name for file in files] == [str(k) for k in range(-(-size // chunk))]
    padded = np.zeros(len(files) * chunk, np.int32)
    padded[:size] = values
    for k, file in enumerate(files):
        raw = padded[k * chunk : (k + 1) * chunk].tobytes()
        assert file.read_bytes() == raw + google_crc32c.value(raw).to_bytes(4, "little")


def test_values_are_stored_little_endian_and_of_the_type_asked_for(tmp_path: Path) -> None:
    group = Group(tmp_path / "g", {})
    values = np.arange(100, dtype=">i4")
    writer = ArrayWriter(group, "a", np.int64)
    writer.append(values[::-1])
    assert writer.close() == hashlib.sha256(values[::-1].astype("<i8").tobytes()).hexdigest()
    array: Any = zarr.open_array(tmp_path / "g/a", mode="r")
    assert array.dtype == np.int64
    assert (array[:] == np.arange(100)[::-1]).all()


def test_what_has_the_name_is_replaced_whole(tmp_path: Path) -> None:
    group = Group(tmp_path / "g", {})
    for size in (3 * CHUNK_ITEMS + 1, 5):
        writer = ArrayWriter(group, "a", np.int32, CHUNK)
        writer.append(np.arange(size))
        writer.close()
        array: Any = zarr.open_array(tmp_path / "g/a", mode="r")
        assert (array[:] == np.arange(size)).all()
    assert [file.name for file in (tmp_path / "g/a/c").iterdir()] == ["0"]


def test_a_killed_writer_leaves_no_array(tmp_path: Path) -> None:
    group = Group(tmp_path / "g", {})
    writer = ArrayWriter(group, "a", np.int32, CHUNK)
    writer.append(np.arange(3 * CHUNK_ITEMS))
    assert "a" not in zarr.open_group(tmp_path / "g", mode="r")


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are counted in /proc")
@pytest.mark.parametrize("size", [1, CHUNK_ITEMS, CHUNK_ITEMS + 1])
def test_no_file_stays_open(tmp_path: Path, size: int) -> None:
    group = Group(tmp_path / "g", {})
    gc.collect()
    before = open_files()
    ended = ArrayWriter(group, "ended", np.int32, CHUNK)
    ended.append(np.arange(size))
    ended.close()
    assert open_files() == before
    abandoned = [ArrayWriter(group, f"a{i}", np.int32, CHUNK) for i in range(20)]
    for writer in abandoned:
        writer.append(np.arange(size))
    assert open_files() == before + 20 * (size % CHUNK_ITEMS > 0)
    del writer, abandoned
    gc.collect()
    assert open_files() == before
