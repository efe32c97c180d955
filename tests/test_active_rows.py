"""Active rows on disk: those that memory would hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from xmc_stream.linear.weights import Unit
from xmc_stream.ppdsparse.active_rows import DiskRows, rows_on_disk
from xmc_stream.ppdsparse.candidates import Found
from xmc_stream.ppdsparse.kernels.active import start_sets
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.ppdsparse.problem import LossWeights, Problem, Share
from xmc_stream.ppdsparse.solver import start_sizes
from xmc_stream.ppdsparse.state import RoundSets
from xmc_stream.runtime.plan import MemoryPlan
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.new_dataset import new_dataset


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """3,000 rows; class 1 has the rows that divide by three."""
    path, n = tmp_path_factory.mktemp("active") / "data.xmc", 3000
    with new_dataset(path, 4, 3, {}) as writer:
        positive = np.arange(n) % 3 == 0
        y = np.concatenate([[0], np.cumsum(positive)])
        writer.append(
            np.arange(n + 1), np.zeros(n, np.int32), np.ones(n, np.float32), y, np.ones(n, np.int32)[positive]
        )
    return Dataset(path)


def all_of(active: DiskRows) -> list[np.ndarray]:
    return [np.concatenate(values) for values in zip(*active.parts(0), strict=True)]


def test_a_class_on_disk_starts_with_the_rows_that_memory_draws(labelled: Dataset, tmp_path: Path) -> None:
    n, seed, Y = labelled.n_samples, 5, labelled.Y_columns()
    positives = Y.gather(np.array([1]))
    size = int(start_sizes(np.array([len(positives.indices)]), n)[0])
    ptr, rows = np.zeros(2, np.int64), np.empty(len(positives.indices) + size, np.int64)
    start_sets(positives.indptr, positives.indices, np.array([size]), 1, n, seed, ptr, rows)
    problem = Problem(
        str(labelled.path), PPDSparseParameters(), seed, MemoryPlan(2**30, 2**30, 1), LossWeights(None, n)
    )
    sets = RoundSets(problem, labelled, 0, Share(0, 3, Unit(0, 3)), None, Found())
    active = rows_on_disk(tmp_path / "d", sets, 1)
    got = all_of(active)
    active.close()
    np.testing.assert_array_equal(got[0], rows)
    np.testing.assert_array_equal(got[1] > 0, rows % 3 == 0)
    assert not got[2].any()
