"""Bytes of stores on disk: those of their values, of the descriptions of arrays and of the logs of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.problems import LIMIT
from helpers.tools import load_tool

import xmc_stream as xs
from xmc_stream.store.chunks import plain_arrays
from xmc_stream.store.encoding import folder_bytes

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
    ],
    ids=["linear", "lowrank", "rowsparse"],
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


def test_a_small_dataset_too(tiny: Path) -> None:
    n_arrays = len(list(plain_arrays(tiny)))
    values, beside = sizes(tiny)
    assert values > 200 * 8 * 8
    assert beside < 4000 + (n_arrays + 8) * DESCRIPTION
