"""How many rounds a class gets: those of all, more where that pays, and an end where nothing is gained any more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import xmc_stream as xs
from xmc_stream.jobs.plan import Cuts


@pytest.fixture(scope="module")
def few_rows(tmp_path_factory: pytest.TempPathFactory) -> xs.Dataset:
    """Classes of three rows each among many rows that look like theirs: three rounds bring too few of these."""
    rng = np.random.default_rng(0)
    n, d, k = 3000, 60, 40
    X = sp.random(n, d, 0.2, format="csr", dtype=np.float32, random_state=0)
    Y = sp.lil_matrix((n, k), dtype=np.float32)
    for c in range(k):
        Y[rng.choice(n, 3, replace=False), c] = 1
    return xs.convert(X, tmp_path_factory.mktemp("few") / "d.xmc", labels=Y.tocsr(), normalize="l2")


@pytest.fixture(scope="module")
def gone_on(few_rows: xs.Dataset, tmp_path_factory: pytest.TempPathFactory) -> xs.PPDSparse:
    """The defaults, on classes of few rows."""
    return xs.PPDSparse(memory_limit="2GB", C=4.0).fit(few_rows, model=tmp_path_factory.mktemp("on") / "m")


def test_classes_far_from_their_optimum_go_on(few_rows: xs.Dataset, gone_on: xs.PPDSparse, tmp_path: Path) -> None:
    options = {"memory_limit": "2GB", "C": 4.0}
    capped = xs.PPDSparse(**options, max_rounds=3).fit(few_rows, model=tmp_path / "three").report_
    optimum = xs.PPDSparse(**options, max_rounds=None, tol=1e-3).fit(few_rows, model=tmp_path / "best").report_
    assert capped["rounds"] == 3
    assert capped["objective"] > 1.05 * optimum["objective"]
    assert 3 < gone_on.report_["rounds"] <= 6
    assert gone_on.report_["objective"] < 1.02 * optimum["objective"]


def test_which_classes_go_on_does_not_depend_on_the_cut(
    few_rows: xs.Dataset, gone_on: xs.PPDSparse, tmp_path: Path
) -> None:
    cut = xs.PPDSparse(C=4.0, threads=2, memory_limit="3GB").fit(
        few_rows, model=tmp_path / "cut", cuts=Cuts(classes=7, rows=130, solve_rows=300, interval=90)
    )
    assert cut.model_.digest() == gone_on.model_.digest()
    # losses are rounded so that their sums are exact: no cut shows in the figures either
    names = ("objective", "duality_gap", "duality_gap_mean", "violation", "n_open", "rounds")
    assert [cut.report_[name] for name in names] == [gone_on.report_[name] for name in names]


@pytest.mark.slow
def test_rounds_that_are_not_worth_it_are_left_out(real: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    data, _ = real("bibtex")
    for all_rows, rounds in ((False, 3), (None, 1)):
        clf = xs.PPDSparse(memory_limit="2GB", threads=1, all_rows=all_rows)
        clf.fit(data, model=tmp_path / "m", overwrite=True)
        report = clf.report_
        assert report["rounds"] == report["passes"] == rounds
        assert report["duality_gap_mean"] < 0.02


@pytest.mark.slow
def test_without_a_cap_a_run_ends_where_it_makes_no_progress(tmp_path: Path, cli: Callable[..., Any]) -> None:
    rng = np.random.default_rng(1)
    X = rng.integers(0, 16, size=(1500, 16)).astype(np.float32)  # far from length one
    Y = np.zeros((1500, 3), np.float32)
    Y[np.arange(1500), np.argmax(X[:, :3] + rng.normal(scale=8, size=(1500, 3)), axis=1)] = 1
    data = xs.convert(sp.csr_matrix(X), tmp_path / "d.xmc", labels=sp.csr_matrix(Y))
    clf = xs.PPDSparse(max_rounds=None, memory_limit="2GB").fit(data, model=tmp_path / "m")
    assert clf.report_["n_open"] > 0
    assert clf.report_["rounds"] <= 40
