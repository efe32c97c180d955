"""Approximate and narrow searches: any cut gives the same model, figures are exact in the end, the optimum is reached."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.executed import fit_cut
from helpers.problems import TIGHT, dense_weights, problem, tight
from helpers.trainings import kill_when, train

import xmc_stream as xs
from xmc_stream.errors import InputError
from xmc_stream.runtime.plan import Cuts

CUT, DELTA, MIN_VALUE = {"cut": 0.3}, {"delta": 3.0}, {"min_value": 0.15}
BOTH = {**DELTA, **MIN_VALUE}
EACH = pytest.mark.parametrize("change", [CUT, DELTA, MIN_VALUE, BOTH], ids=["cut", "delta", "min_value", "both"])


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, CUT], ids=["drawn", "cut and drawn"])
def test_any_cut_gives_the_same_model_and_the_same_work(small: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    change = {**BOTH, **more, "max_rounds": 3}
    whole = xs.PPDSparse(threads=1, memory_limit="4GB", **change).fit(small, model=tmp_path / "whole")
    cuts = Cuts(classes=300, rows=600, solve_rows=1600, interval=520)
    pieces = fit_cut(xs.PPDSparse(threads=2, memory_limit=tight(), **change), small, tmp_path / "pieces", cuts)
    assert pieces.report_["class_blocks"] >= 4
    assert pieces.report_["rounds"] == 3
    assert pieces.model_.digest() == whole.model_.digest()
    for name in ("search_work", "search_work_exact"):
        assert pieces.report_[name] == whole.report_[name]


@pytest.mark.slow
@EACH
def test_approximation_changes_the_model_and_saves_work(
    small: Path, trained: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    exact = xs.load_model(trained)
    approximate = xs.PPDSparse(memory_limit="2GB", **change).fit(small, model=tmp_path / "approximate")
    assert (approximate.model_.to_scipy() != exact.to_scipy()).nnz
    done, instead = approximate.report_["search_work"], approximate.report_["search_work_exact"]
    assert instead / 3 < done < 0.9 * instead  # the check, one search of three, is exact
    assert "search_work" not in exact.attributes["run"]


def multiply_adds(data: Path, model: xs.Model) -> int:
    """What scoring all rows with all weights takes."""
    dataset = xs.open_dataset(data)
    return int(dataset.feature_counts() @ np.diff(model.to_scipy().tocsr().indptr))


@pytest.mark.slow
def test_the_work_that_is_told_is_that_of_the_weights(small: Path, tmp_path: Path) -> None:
    # nothing is that small: every search is approximate in name, and takes what an exact one does
    clf = xs.PPDSparse(min_value=1e-30, max_rounds=2, prune=0.0, memory_limit="2GB").fit(small, model=tmp_path / "m")
    assert clf.report_["search_work"] == clf.report_["search_work_exact"]
    one = xs.PPDSparse(min_value=0.15, max_rounds=1, prune=0.0, memory_limit="2GB").fit(small, model=tmp_path / "one")
    assert one.report_["search_work"] == one.report_["search_work_exact"] == multiply_adds(small, one.model_)
    # nothing is that large: a search between rounds takes nothing, and the check all
    none = xs.PPDSparse(min_value=1e30, max_rounds=2, prune=0.0, memory_limit="2GB").fit(small, model=tmp_path / "none")
    last = multiply_adds(small, none.model_)
    assert none.report_["search_work"] == last < none.report_["search_work_exact"]


@pytest.mark.slow
def test_searches_that_leave_nothing_out_change_nothing(small: Path, trained: Path, tmp_path: Path) -> None:
    exact = xs.load_model(trained)
    for n, change in enumerate([{"cut": 1e-12}, {"delta": 1e-6}, {"min_value": 1e-30}]):
        same = xs.PPDSparse(memory_limit="2GB", **change).fit(small, model=tmp_path / str(n)).model_
        assert (same.to_scipy() != exact.to_scipy()).nnz == 0
        assert np.array_equal(same.bias(), exact.bias())


OF_LOSS: dict[str, Any] = {**TIGHT, "tol": 1e-4, "added": 20, "memory_limit": "2GB"}


@pytest.fixture(scope="module")
def least() -> dict[str, float]:
    """The objective at the optimum, by loss."""
    X, Y = problem(n=400, d=30, k=4, seed=5)
    losses = ("squared_hinge", "hinge")
    return {loss: xs.PPDSparse(**OF_LOSS, loss=loss).fit(X, Y).report_["objective"] for loss in losses}


@EACH
@pytest.mark.parametrize("loss", ["squared_hinge", "hinge"])
def test_without_a_cap_on_rounds_the_optimum_is_reached(
    change: dict[str, Any], loss: str, least: dict[str, float]
) -> None:
    X, Y = problem(n=400, d=30, k=4, seed=5)
    approximate = xs.PPDSparse(**OF_LOSS, loss=loss, **change).fit(X, Y)
    assert approximate.report_["n_open"] == 0
    assert approximate.report_["violation"] <= 1e-4
    assert approximate.report_["duality_gap"] < 1e-3
    assert approximate.report_["objective"] == pytest.approx(least[loss], rel=1e-4)


@pytest.mark.parametrize(
    "change", [CUT, DELTA, MIN_VALUE, BOTH, {}], ids=["cut", "delta", "min_value", "both", "narrow"]
)
def test_figures_are_those_of_an_exact_search(change: dict[str, Any]) -> None:
    X, Y = problem(n=300, d=20, k=3, seed=4)
    clf = xs.PPDSparse(lam=0.05, memory_limit="2GB", added=10, max_rounds=2, **change).fit(X, Y)
    W, bias = (a.astype(np.float64) for a in dense_weights(clf.model_))
    scores = X.toarray().astype(np.float64) @ W + bias
    losses = 0.5 * np.maximum(0, 1 - (2 * Y.toarray() - 1) * scores) ** 2
    objective = 0.05 * np.abs(W).sum() + 0.5 * ((W**2).sum() + (bias**2).sum()) + losses.sum()
    assert clf.report_["objective"] == pytest.approx(objective, rel=1e-5)


def found_in(model: Path, prefix: str) -> dict[str, int]:
    """Classes with violators in each search whose key begins so: rounds, with /approximate or /narrow if it was."""
    found: dict[str, int] = {}
    for line in (model / "ledger.jsonl").read_text().splitlines():
        entry = json.loads(line.rpartition("\t")[0])
        if entry["key"].startswith(prefix):
            search = entry["key"].rsplit("/", 2)[0]
            found[search] = found.get(search, 0) + entry["receipt"]["found"]
    return found


def rare_class() -> tuple[sp.csr_matrix, sp.csr_matrix]:
    """A class of few positives, whose bias comes close to -1."""
    X, _ = problem(n=400, d=30, k=1, seed=5)
    scores = X @ np.random.default_rng(0).normal(size=(30, 1))
    return X, sp.csr_matrix((scores > np.quantile(scores, 0.95)).astype(np.float32))


def test_an_exact_search_decides_when_a_rough_one_sees_nothing_left() -> None:
    # a search that sees no entry at all gives every row the bias
    clf = xs.PPDSparse(lam=0, tol=0.4, min_value=1e30, max_rounds=None, epochs=200, added=5, memory_limit="2GB")
    clf.fit(*rare_class())
    found = found_in(clf.model_.path, "search/")
    assert found["search/2/approximate"] == 0 < found["search/2"]
    assert found["search/3"] == 0
    assert clf.report_["n_open"] == 0
    assert clf.report_["violation"] <= 0.4


def test_searches_before_the_check_are_narrow_and_without_a_cap_none_is() -> None:
    X, Y = problem(n=400, d=30, k=4, seed=5)
    kinds = {}
    for max_rounds in (1, 2, 6, None):
        clf = xs.PPDSparse(max_rounds=max_rounds, C=0.1, added=10, memory_limit="2GB").fit(X, Y)
        kinds[max_rounds] = sorted(found_in(clf.model_.path, "search/"))
    assert kinds[1] == ["search/1"]
    assert kinds[2] == ["search/1/narrow", "search/2"]
    assert kinds[6] == ["search/1/narrow", "search/2/narrow", "search/3"]
    assert all(re.fullmatch("search/[0-9]+", search) for search in kinds[None])


def test_an_exact_search_decides_when_a_narrow_one_sees_nothing_left() -> None:
    X, Y = problem(n=50, d=30, k=4, seed=5)
    clf = xs.PPDSparse(C=1, epochs=200, memory_limit="2GB").fit(X, Y)
    found = found_in(clf.model_.path, "search/")
    assert found.pop("search/1/narrow") > 0
    assert found == {"search/2/narrow": 0, "search/2": 0}
    assert clf.report_["rounds"] == 2
    assert clf.report_["n_open"] == 0
    W, bias = (a.astype(np.float64) for a in dense_weights(clf.model_))
    losses = 0.5 * np.maximum(0, 1 - (2 * Y.toarray() - 1) * (X.toarray() @ W + bias)) ** 2
    objective = 0.01 * np.abs(W).sum() + 0.5 * ((W**2).sum() + (bias**2).sum()) + losses.sum()
    assert clf.report_["objective"] == pytest.approx(objective, rel=1e-5)


def test_rough_searches_that_bring_in_what_is_of_no_use_give_way_to_exact_ones() -> None:
    clf = xs.PPDSparse(lam=0, tol=0.2, min_value=1e30, max_rounds=30, epochs=200, added=5, memory_limit="2GB")
    clf.fit(*rare_class())
    found = found_in(clf.model_.path, "search/")
    exact = [search for search in found if not search.endswith("approximate")]
    assert f"{exact[0]}/approximate" not in found
    assert min(n for search, n in found.items() if search.endswith("approximate")) > 0
    assert clf.report_["n_open"] == 0
    assert clf.report_["violation"] <= 0.2


OPTIONS = ("--set", "cut=0.1", "--set", "delta=3", "--set", "min_value=0.15")


@pytest.fixture(scope="module")
def whole(small: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the run that nobody killed."""
    path = tmp_path_factory.mktemp("whole") / "m"
    train(small, path, more=OPTIONS)
    return xs.load_model(path).digest()


@pytest.mark.slow
@pytest.mark.parametrize("ready", ["cut/1/approximate", "search/2/approximate/", "search/3/"])
def test_killed_at_any_stage_ends_with_the_same_model(small: Path, tmp_path: Path, whole: str, ready: str) -> None:
    model = tmp_path / "m"
    assert kill_when(small, model, ready, 0.0, more=OPTIONS)
    figures = train(small, model, limit="600MB", threads=1, more=OPTIONS)
    assert figures["resumed"]
    assert xs.load_model(model).digest() == whole


@pytest.mark.slow
def test_killed_around_the_change_to_exact_searches(small: Path, tmp_path: Path) -> None:
    more = [word for name in ("tol=0.5", "min_value=1e30", "max_rounds=none") for word in ("--set", name)]
    train(small, tmp_path / "whole", more=more)
    digest = xs.load_model(tmp_path / "whole").digest()
    found = found_in(tmp_path / "whole", "search/")
    change = next(search for search in found if search.endswith("approximate") and found[search] == 0)
    exact = change.removesuffix("/approximate")
    assert found[exact] > 0
    for ready in (f"{change}/", exact.replace("search", "cut") + '"', exact.replace("search", "solve")):
        assert kill_when(small, tmp_path / "m", ready, 0.0, more=more)
        train(small, tmp_path / "m", limit="600MB", threads=1, more=more)
        assert xs.load_model(tmp_path / "m").digest() == digest
        shutil.rmtree(tmp_path / "m")


@pytest.mark.slow
def test_accuracy_stays(real: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    train_set, test = (xs.open_dataset(path) for path in real("rcv1_topics"))
    clf = xs.PPDSparse(delta=2, min_value=0.1, memory_limit="2GB").fit(train_set, model=tmp_path / "m")
    assert xs.evaluate(clf.model_.path, test)["P@1"] >= 95.78
    assert clf.report_["search_work"] < 0.8 * clf.report_["search_work_exact"]


@pytest.mark.parametrize("name", ["prune", "cut", "delta", "min_value"])
def test_bad_options_are_named_and_options_at_zero_are_not_told(name: str) -> None:
    X, Y = problem()
    for value in (-1, float("nan"), "a", *([1] if name == "cut" else [])):
        with pytest.raises(InputError, match=f"'{name}'"):
            xs.PPDSparse(**{name: value}).fit(X, Y)
    unused = None if name == "prune" else 0
    assert name not in xs.PPDSparse(**{name: unused}).parameters().to_dict()
    assert xs.PPDSparse(**{name: 0.5}).parameters().to_dict()[name] == 0.5


@pytest.mark.slow
def test_small_weights_are_left_out_of_the_model_and_counted_in_its_figures() -> None:
    X, Y = problem(k=5)
    Y = sp.csr_matrix(sp.hstack([Y, sp.csr_matrix((Y.shape[0], 1))]))
    whole = xs.PPDSparse(memory_limit="2GB").fit(X, Y)
    pruned = xs.PPDSparse(prune=0.2, memory_limit="2GB").fit(X, Y)
    W = whole.model_.to_scipy().toarray()
    W[np.abs(W) < 0.2] = 0
    assert np.array_equal(pruned.model_.to_scipy().toarray(), W)
    assert pruned.report_["nnz"] == np.count_nonzero(W) < whole.report_["nnz"]
    assert np.array_equal(pruned.model_.bias(), whole.model_.bias())
    assert pruned.report_["objective"] == whole.report_["objective"]
    nothing = xs.PPDSparse(prune=1e9, memory_limit="2GB").fit(X, Y)
    assert nothing.model_.to_scipy().nnz == 0
    assert np.array_equal(nothing.model_.bias(), whole.model_.bias())
