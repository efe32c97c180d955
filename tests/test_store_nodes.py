"""Descriptions of plain groups and arrays: what zarr itself would write, and read as zarr reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.codecs import BytesCodec, Crc32cCodec, ZstdCodec

from xmc_stream.errors import StoreError
from xmc_stream.store.nodes import Group, PlainArray, attributes_of, plain_array


def by_zarr(folder: Path, dtype: str = "<i4", fill_value: float = 0, **options: Any) -> None:
    given: dict[str, Any] = {"shape": (10,), "chunks": (4,), "compressors": [Crc32cCodec()], "filters": None, **options}
    zarr.open_group(folder.parent).create_array(folder.name, dtype=dtype, fill_value=fill_value, **given)


def described(folder: Path) -> list[tuple[str, str]]:
    """The files under a folder, and what they hold, with the types of numbers."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return [(str(file.relative_to(folder)), repr(json.loads(file.read_bytes()))) for file in files]


@pytest.mark.parametrize(
    ("dtype", "fill_value"), [("<i8", 0), ("<i4", 0), ("<f8", 0), ("<f4", 1), ("u1", 0), ("<u2", 0)]
)
def test_an_array_is_described_as_zarr_does(tmp_path: Path, dtype: str, fill_value: float) -> None:
    by_zarr(tmp_path / "theirs", dtype, fill_value)
    PlainArray(tmp_path / "ours", np.dtype(dtype), 10, 4, fill_value).write()
    assert described(tmp_path / "ours") == described(tmp_path / "theirs")
    for name in ("ours", "theirs"):
        assert plain_array(tmp_path / name) == PlainArray(tmp_path / name, np.dtype(dtype), 10, 4, fill_value)


def test_groups_are_described_as_zarr_does(tmp_path: Path) -> None:
    attributes = {"a": 1, "b": ["x", None, 0.5, "\u00e9"], "c": {"d": 2**60}}
    ours, theirs = Group(tmp_path / "ours", attributes), zarr.create_group(tmp_path / "theirs", attributes=attributes)
    for root in (ours, theirs):
        root.create_group("x/y")
        root.create_group("x/z").update_attributes({"e": 3})
        root.update_attributes({"f": 4, "a": 2})
    assert described(tmp_path / "ours") == described(tmp_path / "theirs")
    assert len(described(tmp_path / "ours")) == 4
    assert attributes_of(tmp_path / "ours") == {**attributes, "f": 4, "a": 2}
    assert attributes_of(tmp_path / "ours/x/z") == {"e": 3}


@pytest.mark.parametrize(
    "options",
    [
        {"compressors": [ZstdCodec()]},
        {"compressors": [ZstdCodec(), Crc32cCodec()]},
        {"compressors": []},
        {"serializer": BytesCodec(endian="big")},
        {"shape": (10, 2), "chunks": (4, 2)},
        {"shards": (8,)},
        {"chunk_key_encoding": {"name": "default", "separator": "."}},
        {"chunk_key_encoding": {"name": "v2", "separator": "/"}},
        {"dtype": "bool"},
    ],
)
def test_what_is_not_plain_is_left_to_zarr(tmp_path: Path, options: dict[str, Any]) -> None:
    by_zarr(tmp_path / "plain")
    assert plain_array(tmp_path / "plain") is not None
    by_zarr(tmp_path / "other", **options)
    assert plain_array(tmp_path / "other") is None
    assert plain_array(tmp_path / "missing") is None


def test_groups_of_an_older_format_are_left_to_zarr_and_missing_ones_refused(tmp_path: Path) -> None:
    zarr.create_group(tmp_path / "old", zarr_format=2, attributes={"a": 1})
    assert attributes_of(tmp_path / "old") == {"a": 1}
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn/zarr.json").write_text('{"zarr_format": 3, "node_')
    with pytest.raises((FileNotFoundError, ValueError)):
        attributes_of(tmp_path / "missing")
    with pytest.raises(StoreError, match=r"torn/zarr\.json is not what it must be .*Unterminated"):
        attributes_of(tmp_path / "torn")
