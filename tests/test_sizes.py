"""Bytes of stores on disk: those of their values, of the descriptions of arrays and of the logs of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.problems import LIMIT
from helpers.tools import load_tool

import xmc_stream as xs
from xmc_stream.linear import weights
from xmc_stream.linear.weights import new_unit
from xmc_stream.store import encoding
from xmc_stream.store.chunks import plain_arrays
from xmc_stream.store.encoding import MatrixWriter, folder_bytes
from xmc_stream.store.inventory import take_inventory
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.store.nodes import Group

DESCRIPTION = 600  # bytes of a zarr.json
LOGS = ("events.jsonl", "ledger.jsonl")


def sizes(store: Path) -> tuple[int, int]:
    """Bytes of all values, and of all that is neither a value nor a log."""
    values = sum(array.size * array.dtype.itemsize for array in plain_arrays(store))
    logs = sum((store / name).stat().st_size for name in LOGS if (store / name).exists())
    return values, folder_bytes(store) - values - logs


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.xmc"
    load_tool("make_synthetic").make_synthetic(path, n_samples=200, n_features=50, n_labels=30, features_per_sample=8)
    return path


@pytest.mark.parametrize(
    "fit",
    [
        lambda data, path: xs.PPDSparse(guide=1.0, memory_limit=LIMIT).fit(data, model=path),
        lambda data, path: xs.LEML(rank=3, alternations=1, memory_limit=LIMIT).fit(data, model=path),
        lambda data, path: xs.GroupLasso(loss="multitask", memory_limit=LIMIT).fit(data, model=path),
        lambda data, path: xs.LabelTree(max_leaf=8, memory_limit=LIMIT).fit(data, model=path),
    ],
    ids=["linear", "lowrank", "rowsparse", "tree"],
)
def test_a_small_model_takes_little_more_than_its_values(
    tiny: Path, tmp_path: Path, fit: Callable[[Path, Path], Any]
) -> None:
    fit(tiny, tmp_path / "m")
    n_arrays = len(list(plain_arrays(tmp_path / "m")))
    values, beside = sizes(tmp_path / "m")
    assert values > 1000
    # an attribute list of some thousand bytes, a description of each array and group, four bytes of checksum
    assert beside < 8000 + (n_arrays + 6) * DESCRIPTION


@pytest.mark.parametrize("n", [1000, 2**15, 2**15 + 1, 2**16, 2**16 + 1, 5 * 2**15 + 100, 3 * 2**16 - 5])
def test_chunks_of_a_large_unit_have_little_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    monkeypatch.setattr(weights, "CHUNK_BYTES", 2**17)  # 32,768 weights, 65,536 indices
    monkeypatch.setattr(encoding, "_EVEN", 2**12)
    values = np.arange(n, dtype=np.float32)
    lengths = np.full(10, n // 10)
    lengths[0] += n % 10
    features = np.concatenate([np.arange(length) for length in lengths])
    with new_unit(tmp_path / "u", 60_000, 10) as writer:
        writer.weights.append(lengths, features, values)
    matrix = SparseMatrix(tmp_path / "u/weights").expect((60_000, 10), "csc_matrix", np.float32)
    block = matrix.block(0, 10)
    np.testing.assert_array_equal(block.indices, features)
    np.testing.assert_array_equal(block.values, values)
    assert not list(tmp_path.rglob("*.again"))
    assert take_inventory(tmp_path / "u").damage == []
    for array in plain_arrays(tmp_path / "u/weights"):
        assert array.n_chunks * array.chunk_bytes <= max(1.125 * array.size * array.dtype.itemsize, 2**12)
        for k in range(array.n_chunks):
            array.verify_chunk(k)
    whole = MatrixWriter(Group(tmp_path / "w", {}), "csc_matrix", (60_000, 10), chunk_bytes=2**20, narrow=True)
    whole.append(lengths, features, values)
    whole.close()
    assert matrix.fingerprint == whole.fingerprint


def test_a_small_dataset_too(tiny: Path) -> None:
    n_arrays = len(list(plain_arrays(tiny)))
    values, beside = sizes(tiny)
    assert values > 200 * 8 * 8
    assert beside < 4000 + (n_arrays + 8) * DESCRIPTION
