"""A search of classes that hold many rows each takes what was planned for it: with intervals, little."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

import xmc_stream as xs
from xmc_stream.linear.tiles import TileRange
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.ppdsparse.plan import SearchSize, search_needs
from xmc_stream.ppdsparse.run import PPDSparseRun
from xmc_stream.ppdsparse.search import SearchJob
from xmc_stream.runtime.job import Notes
from xmc_stream.runtime.plan import MIB, Cuts, MemoryPlan
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.model import begin_model

N, K = 20_000, 200


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Every class has 3 to 40 of 100 rows: what they want is more than X."""
    rng = np.random.default_rng(0)
    X = sp.random(N, 60, 0.05, format="csr", dtype=np.float32, random_state=0)
    Y = sp.csr_matrix((rng.random((N, K)) < np.linspace(0.03, 0.4, K)).astype(np.float32))
    return xs.convert(X, tmp_path_factory.mktemp("heavy") / "heavy.xmc", labels=Y)


def searched(data: Dataset, work: Path, interval: int) -> tuple[int, int, int]:
    """Peak bytes of the first search, bytes that were planned for it, rows that it found."""
    begin_model(work)
    plan = MemoryPlan(2**33, 1024 * MIB, 1, cuts=Cuts(interval=interval))
    loop = PPDSparseRun(data, work, PPDSparseParameters(max_rounds=2, all_rows=False), 0, plan, Notes()).loop()
    (solve,) = next(loop).jobs
    spans = solve.run()["tile_ranges"]
    (search,) = loop.send([{"tile_ranges": spans, "inside": 1.0, "open": K}]).jobs
    assert isinstance(search, SearchJob)
    search.run()  # compiled and imported what it needs
    tracemalloc.start()
    found = search.run()["found"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    pieces = [SearchSize(TileRange(*span[:4]), *span[4:]) for span in spans if span[:2] == [0, K]]
    return peak, sum(search_needs(plan, pieces, data.n_features, N).values()), found


@pytest.mark.slow
def test_what_a_search_holds_was_planned_and_legs_make_it_little(heavy: Dataset, tmp_path: Path) -> None:
    whole, planned, found = searched(heavy, tmp_path / "whole", 0)
    assert whole <= planned
    assert whole > 12 * found
    in_intervals, planned_intervals, found_intervals = searched(heavy, tmp_path / "intervals", 1000)
    assert in_intervals <= planned_intervals
    assert in_intervals < whole / 3
    assert found <= found_intervals < 2 * found
