"""Training that begins from a model's weights: the same optimum, sooner; DiSMEC's setting."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.executed import fit_cut
from helpers.problems import TIGHT, dense_weights, problem, tight
from helpers.trainings import kill_when, train
from sklearn.svm import LinearSVC

import xmc_stream as xs
from xmc_stream.datasets.split import split
from xmc_stream.errors import InputError, ResumeError
from xmc_stream.kernels.blocks import CSR
from xmc_stream.linear.kernels.dcd import ONCE, Ramp
from xmc_stream.ppdsparse.kernels.active import start_alpha, start_scores
from xmc_stream.runtime.plan import Cuts


@pytest.mark.parametrize("ramp", [Ramp(0.7, np.inf, 2.1, np.inf), Ramp(7.0, 0.7, 21.0, 2.1)])
def test_alpha_of_given_weights_is_that_of_their_margins(ramp: Ramp) -> None:
    rng = np.random.default_rng(0)
    X, W, bias = rng.normal(size=(20, 6)), rng.normal(size=(6, 3)), rng.normal(size=3)
    X, W = np.where(rng.random(X.shape) < 0.5, X, 0), np.where(rng.random(W.shape) < 0.6, W, 0)
    members = [[0, 3, 19], [], [1, 2, 3, 4, 18]]
    ptr = np.cumsum([7, *map(len, members)]).astype(np.int64)  # a part of some larger sets
    at = np.array([row for of_class in members for row in of_class])
    sign = rng.choice(np.array([-1, 1], np.int8), len(at))
    x, w = sp.csr_matrix(X.astype(np.float32)), sp.csc_matrix(W.astype(np.float32))
    alpha, dense = np.full(len(at), np.nan), np.zeros(6, np.float32)
    start_scores(
        CSR(w.indptr.astype(np.int64), w.indices, w.data), bias, ptr, at,
        CSR(x.indptr.astype(np.int64), x.indices, x.data), dense, alpha,
    )  # fmt: skip
    z = x.toarray().astype(np.float64) @ w.toarray() + bias
    scores = np.array([z[i, c] for c, of_class in enumerate(members) for i in of_class])
    assert np.allclose(alpha, scores, atol=1e-12)
    start_alpha(ptr, sign, at, np.full(3, np.inf), ramp, ONCE, alpha)
    slope, upper = np.where((sign > 0)[:, None], ramp[2:], ramp[:2]).T
    assert np.allclose(alpha, np.minimum(slope * np.maximum(0, 1 - sign * scores), upper), atol=1e-12)
    assert not dense.any()


@pytest.mark.parametrize("weight", [1.0, 4.0])
@pytest.mark.parametrize("loss", ["squared_hinge", "hinge"])
def test_from_the_optimum_of_the_same_problem_there_is_little_left(loss: str, weight: float) -> None:
    X, Y = problem(n=120, k=5, seed=2)
    options = {
        **TIGHT,
        "tol": 1e-4,
        "loss": loss,
        "added": 120,
        "lam": 0.02,
        "positive_weight": weight,
        "memory_limit": "2GB",
    }
    cold = xs.PPDSparse(**options).fit(X, Y)
    warm = xs.PPDSparse(**options).fit(X, Y, warm_start=cold.model_)
    assert warm.report_["violation"] <= 1e-4
    assert warm.report_["objective"] == pytest.approx(cold.report_["objective"], rel=1e-5)
    if loss == "squared_hinge":  # alpha follows from the weights: nothing moves
        assert warm.report_["rounds"] == 1
        one = {**options, "epochs": 1, "max_rounds": 1, "last_epochs": 1}
        at_once = xs.PPDSparse(**one).fit(X, Y, warm_start=cold.model_)
        assert abs(at_once.report_["duality_gap"]) < 1e-6
        assert xs.PPDSparse(**one).fit(X, Y).report_["duality_gap_mean"] > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("before", [{"C": 0.8}, {"positive_weight": 0.8}])
@pytest.mark.parametrize("loss", ["squared_hinge", "hinge"])
def test_from_another_weight_of_the_loss_the_optimum_is_reached_sooner(loss: str, before: dict[str, float]) -> None:
    X, Y = problem(n=150, d=20, k=3, seed=7)
    options = {**TIGHT, "tol": 1e-4, "loss": loss, "lam": 0.02, "memory_limit": "2GB"}
    other = xs.PPDSparse(**{**options, **before}).fit(X, Y)
    cold = xs.PPDSparse(**options).fit(X, Y)
    warm = xs.PPDSparse(**options).fit(X, Y, warm_start=other.model_)
    W, bias = dense_weights(warm.model_)
    W_cold, bias_cold = dense_weights(cold.model_)
    assert np.abs(W - W_cold).max() < 1e-3
    assert np.abs(bias - bias_cold).max() < 1e-3
    # with so few epochs that they decide, the warm start is closer
    few = {**options, "epochs": 2, "max_rounds": 2, "last_epochs": 2, "added": 150}
    gaps = [
        xs.PPDSparse(**few).fit(X, Y, warm_start=start).report_["duality_gap_mean"] for start in (other.model_, None)
    ]
    assert gaps[0] < gaps[1] / 2


@pytest.mark.slow
def test_bibtex_from_another_lam_takes_fewer_rounds(real: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    data, _ = real("bibtex")
    options = {"tol": 1e-2, "max_rounds": None, "epochs": 20, "memory_limit": "2GB"}
    other = xs.PPDSparse(**{**options, "lam": 0.012}).fit(data, model=tmp_path / "other")
    cold = xs.PPDSparse(**options).fit(data, model=tmp_path / "cold").report_
    warm = xs.PPDSparse(**options).fit(data, model=tmp_path / "warm", warm_start=other.model_).report_
    assert warm["objective"] == pytest.approx(cold["objective"], rel=1e-4)
    assert warm["rounds"] < cold["rounds"]


@pytest.fixture(scope="module")
def other(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model to begin from."""
    path = tmp_path_factory.mktemp("other") / "m"
    xs.PPDSparse(C=0.5, max_rounds=1, prune=0, memory_limit="2GB").fit(small, model=path)
    return path


@pytest.fixture(scope="module")
def warm(small: Path, other: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that began from it."""
    path = tmp_path_factory.mktemp("warm") / "m"
    xs.PPDSparse(threads=1, memory_limit="4GB").fit(small, model=path, warm_start=other)
    return path


@pytest.mark.slow
def test_any_cut_gives_the_same_model_and_the_start_is_told(
    small: Path, trained: Path, warm: Path, tmp_path: Path, other: Path
) -> None:
    whole, cold = xs.load_model(warm), xs.load_model(trained)
    cuts = Cuts(classes=300, rows=240, solve_rows=400, interval=130)
    pieces = fit_cut(xs.PPDSparse(threads=2, memory_limit=tight()), small, tmp_path / "pieces", cuts, other)
    assert pieces.model_.digest() == whole.digest()
    assert whole.attributes["warm_start"] == xs.load_model(other).digest()
    assert "warm_start" not in cold.attributes
    assert cold.digest() != whole.digest()
    assert whole.attributes["run"]["passes"] < cold.attributes["run"]["passes"]


@pytest.mark.slow
def test_approximate_searches_and_a_warm_start_go_together(small: Path, tmp_path: Path, other: Path) -> None:
    # under a cap a warm start has one round, and the searches that decide are exact
    options = {"delta": 3, "min_value": 0.15, "max_rounds": None, "tol": 0.5, "memory_limit": "2GB"}
    clf = xs.PPDSparse(**options).fit(small, model=tmp_path / "m", warm_start=other)
    assert clf.report_["rounds"] > 1
    assert clf.report_["search_work"] < 0.9 * clf.report_["search_work_exact"]


@pytest.fixture(scope="module")
def whole(small: Path, other: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the run that nobody killed."""
    path = tmp_path_factory.mktemp("whole") / "m"
    train(small, path, more=("--warm-start", other))
    return xs.load_model(path).digest()


@pytest.mark.slow
def test_killed_at_every_stage_it_ends_with_the_same_model(
    small: Path, tmp_path: Path, other: Path, whole: str
) -> None:
    model, more = tmp_path / "m", ("--warm-start", other)
    for ready in ("start/0", "cut/0", "solve/0/0", "search/1/"):
        assert kill_when(small, model, ready, 0.0, more=more), ready
    figures = train(small, model, limit="600MB", threads=1, more=more)
    assert figures["resumed"]
    assert figures["warm_start"] == xs.load_model(other).digest()
    assert xs.load_model(model).digest() == whole


@pytest.mark.slow
def test_another_start_is_refused(small: Path, trained: Path, warm: Path, tmp_path: Path, other: Path) -> None:
    shutil.copytree(trained, tmp_path / "m")
    shutil.copytree(warm, tmp_path / "n")
    clf = xs.PPDSparse(memory_limit="2GB")
    assert clf.fit(small, model=tmp_path / "m").model_.digest() == xs.load_model(trained).digest()
    with pytest.raises(ResumeError, match="warm_start"):
        clf.fit(small, model=tmp_path / "m", warm_start=other)
    assert clf.fit(small, model=tmp_path / "n", warm_start=other).model_.digest() == xs.load_model(warm).digest()
    with pytest.raises(ResumeError, match="warm_start"):
        clf.fit(small, model=tmp_path / "n")
    with pytest.raises(ResumeError, match="warm_start"):
        clf.fit(small, model=tmp_path / "n", warm_start=tmp_path / "n")


def test_a_model_of_other_sizes_is_refused(small: Path, tmp_path: Path, other: Path) -> None:
    X, Y = problem()
    with pytest.raises(InputError, match="a model of 800 features"):
        xs.PPDSparse(memory_limit="2GB").fit(X, Y, warm_start=other)


def test_classes_without_positives_drop_the_weights_they_had() -> None:
    X, Y = problem(k=3)
    first = xs.PPDSparse(memory_limit="2GB").fit(X, Y)
    Y = Y.tolil()
    Y[:, 1] = 0
    clf = xs.PPDSparse(memory_limit="2GB").fit(X, sp.csr_matrix(Y), warm_start=first.model_)
    assert clf.model_.bias()[1] == -np.inf
    assert clf.model_.to_scipy()[:, [1]].nnz == 0
    assert clf.report_["n_empty"] == 1


@pytest.mark.slow
def test_dismec_is_liblinear_without_its_small_weights() -> None:
    X, Y = problem()
    settings: dict[str, Any] = {**TIGHT, "added": 60, "memory_limit": "2GB"}
    whole, pruned = (xs.PPDSparse.dismec(**settings, **change).fit(X, Y) for change in ({"prune": 0}, {}))
    W, bias = dense_weights(whole.model_)
    for k in range(Y.shape[1]):
        y = 2 * Y[:, k].toarray().ravel() - 1
        peer = LinearSVC(
            loss="squared_hinge", dual=True, C=1, intercept_scaling=1, tol=1e-10, max_iter=2_000_000, random_state=0
        ).fit(X.astype(np.float64), y)
        assert np.abs(W[:, k] - peer.coef_[0]).max() < 1e-4
        assert abs(bias[k] - peer.intercept_[0]) < 1e-4
    W[np.abs(W) < 0.01] = 0
    assert np.array_equal(pruned.model_.to_scipy().toarray(), W)
    assert pruned.report_["solver"] == "ppdsparse"
    assert pruned.report_["params"]["prune"] == 0.01


@pytest.mark.slow
def test_dismec_on_the_command_line(
    real: Callable[[str], tuple[Path, Path]], tmp_path: Path, commands: Callable[..., Any]
) -> None:
    data, test = real("bibtex")
    figures = commands("train", data, tmp_path / "m", "--solver", "dismec", "--set", "prune=0.02")
    wanted = {"lam": 0.0, "tau": 1.0, "C": 2.0, "guide": 0.0, "prune": 0.02}
    assert {name: figures["params"][name] for name in wanted} == wanted
    assert xs.evaluate(tmp_path / "m", xs.open_dataset(test))["P@1"] == pytest.approx(63.7, abs=0.3)


ONE: dict[str, Any] = {"memory_limit": "2GB", "threads": 1, "all_rows": False}


@pytest.fixture(scope="module")
def bibtex(
    real: Callable[[str], tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Callable[..., xs.PPDSparse]]:
    """The training set, and what was trained on it with some settings, once each, and from nothing."""
    (data, _), folder = real("bibtex"), tmp_path_factory.mktemp("bibtex")

    @cache
    def cold(**settings: float) -> xs.PPDSparse:
        name = "-".join(["cold", *(f"{name}{value}" for name, value in settings.items())])
        return xs.PPDSparse(**ONE, **settings).fit(data, model=folder / name)

    return data, cold


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"C": 1.0}, {"C": 2.0}),
        ({}, {}),
        ({"lam": 0.03}, {"lam": 0.01}),
        ({"lam": 0.01}, {"lam": 0.03}),  # w shrinks, and rows come to matter that it did not violate
        ({"C": 2.0}, {"C": 1.0}),
    ],
)
def test_a_warm_start_is_as_good_as_a_cold_one_and_gathers_less(
    bibtex: tuple[Path, Callable[..., xs.PPDSparse]], tmp_path: Path, old: dict[str, float], new: dict[str, float]
) -> None:
    data, trained = bibtex
    cold = trained(**new).report_
    warm = xs.PPDSparse(**ONE, **new).fit(data, model=tmp_path / "warm", warm_start=trained(**old).model_).report_
    assert warm["rounds"] == 1
    assert warm["objective"] <= 1.0002 * cold["objective"]
    assert warm["duality_gap_mean"] <= cold["duality_gap_mean"] + 1e-4
    assert warm["passes"] <= cold["passes"]
    assert warm["bytes_gathered"] < cold["bytes_gathered"]


@pytest.mark.slow
def test_a_start_from_fewer_rows_is_as_good_as_a_cold_one(
    bibtex: tuple[Path, Callable[..., xs.PPDSparse]], tmp_path: Path
) -> None:
    data, trained = bibtex
    split(data, tmp_path / "nine.xmc", tmp_path / "one.xmc", fraction=0.1)
    start = xs.PPDSparse(**ONE).fit(tmp_path / "nine.xmc", model=tmp_path / "start")
    cold = trained().report_
    warm = xs.PPDSparse(**ONE).fit(data, model=tmp_path / "warm", warm_start=start.model_).report_
    assert warm["rounds"] == 1
    assert warm["objective"] <= 1.0002 * cold["objective"]
    assert warm["bytes_gathered"] < cold["bytes_gathered"]
