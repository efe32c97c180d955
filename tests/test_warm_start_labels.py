"""Warm starts on data that grew: labels matched by name or id, new and gone ones, groups of labels that are taken over."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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
from xmc_stream.linear.guide import Guide
from xmc_stream.linear.kernels.dcd import ONCE, Ramp
from xmc_stream.linear.weights import LinearWeights
from xmc_stream.ppdsparse import solver
from xmc_stream.ppdsparse.kernels.active import start_alpha
from xmc_stream.runtime.plan import Cuts
from xmc_stream.store.dataset import Dataset

EXACT = {**TIGHT, "tol": 1e-4, "added": 200, "lam": 0.02, "memory_limit": "2GB"}


def converted(path: Path, X: Any, Y: Any, labels: Sequence[str] = (), features: Sequence[str] = ()) -> Dataset:
    options: dict[str, Any] = {}
    for name, words in (("label_names", labels), ("feature_names", features)):
        if words:
            options[name] = path.with_suffix(f".{name}")
            options[name].write_text("".join(f"{word}\n" for word in words))
    return xs.convert(X, path, labels=sp.csr_matrix(Y), **options)


def gaps(model: xs.Model) -> np.ndarray:
    """Of each label, the gap over the objective."""
    weights = LinearWeights(model.path)
    gap, objective = (
        np.concatenate([weights.unit_array(unit, name) for unit in weights.units])
        for name in ("duality_gap", "objective")
    )
    return np.asarray(gap / objective)


# ---- alpha


def test_alpha_gives_each_class_the_bias_that_is_wanted() -> None:
    rng = np.random.default_rng(0)
    ptr, sign = np.array([5, 35, 40, 60]), rng.choice(np.array([-1, 1], np.int8), 55)
    scores, wanted = rng.normal(size=55), np.array([-3.0, np.nan, np.inf])
    ramp, alpha = Ramp(0.7, np.inf, 2.1, np.inf), scores.copy()
    start_alpha(ptr, sign, np.arange(55), wanted, ramp, ONCE, alpha)
    slope = np.where(sign > 0, 2.1, 0.7)
    first, second, third = (slice(a - 5, b - 5) for a, b in itertools.pairwise(ptr))
    assert (sign[first] * alpha[first]).sum() == pytest.approx(-3.0, abs=1e-6)
    on = alpha[first] > 0
    shift = (sign[first] * (1 - alpha[first] / slope[first]) - scores[first])[on]
    assert np.ptp(shift) < 1e-9
    assert (sign[first] * (scores[first] + shift[0]) >= 1 - 1e-9)[~on].all()
    assert not alpha[second].any()
    assert np.allclose(alpha[third], slope[third] * np.maximum(0, 1 - sign[third] * scores[third]))


# ---- labels


def test_labels_are_matched_by_name_in_whatever_order(tmp_path: Path) -> None:
    X, Y = problem(n=120, k=5, seed=2)
    old = converted(tmp_path / "old.xmc", X, Y[:, [0, 1, 2, 3]], ["a", "b", "c", "d"])
    new = converted(tmp_path / "new.xmc", X, Y[:, [3, 4, 1, 0]], ["d", "e", "b", "a"])
    start = xs.PPDSparse(**EXACT).fit(old).model_
    cold = xs.PPDSparse(**EXACT).fit(new).model_
    warm = xs.PPDSparse(**EXACT).fit(new, warm_start=start)
    assert warm.report_["warm_start_labels"] == {"by_name": True, "kept": 3, "new": 1, "gone": 1}
    assert warm.report_["violation"] <= 1e-4
    W, bias = dense_weights(warm.model_)
    W_cold, bias_cold = dense_weights(cold)
    assert np.abs(W - W_cold).max() < 1e-3  # c is gone, and e is what a cold run makes of it
    assert np.abs(bias - bias_cold).max() < 1e-3
    # those that were kept were at their optimum already
    one = {**EXACT, "epochs": 1, "max_rounds": 1, "last_epochs": 1}
    at_once = gaps(xs.PPDSparse(**one).fit(new, warm_start=start).model_)
    assert np.abs(at_once[[0, 2, 3]]).max() < 1e-5
    assert at_once[1] > 1e-3


def test_without_names_more_labels_are_new_and_fewer_are_refused(tmp_path: Path) -> None:
    X, Y = problem(n=120, k=5, seed=2)
    few, all_ = converted(tmp_path / "few.xmc", X, Y[:, :3]), converted(tmp_path / "all.xmc", X, Y)
    start = xs.PPDSparse(**EXACT).fit(few).model_
    warm = xs.PPDSparse(**EXACT).fit(all_, warm_start=start)
    assert warm.report_["warm_start_labels"] == {"by_name": False, "kept": 3, "new": 2, "gone": 0}
    W, W_cold = (dense_weights(model)[0] for model in (warm.model_, xs.PPDSparse(**EXACT).fit(all_).model_))
    assert np.abs(W - W_cold).max() < 1e-3
    with pytest.raises(InputError, match="without names of labels"):
        xs.PPDSparse(**EXACT).fit(few, warm_start=warm.model_)


@pytest.mark.parametrize("names", [["a", "a", "b"], ["x", "y", "z"]])
def test_names_that_tell_nothing_are_refused(tmp_path: Path, names: list[str]) -> None:
    X, Y = problem(k=3)
    start = xs.PPDSparse(**EXACT).fit(converted(tmp_path / "old.xmc", X, Y, ["a", "b", "c"])).model_
    new = converted(tmp_path / "new.xmc", X, Y, names)
    with pytest.raises(InputError, match="same name"):
        xs.PPDSparse(**EXACT).fit(new, warm_start=start)


@pytest.mark.parametrize("before", [0, 60])
def test_a_label_of_no_row_or_of_all_begins_from_nothing_when_that_changes(tmp_path: Path, before: int) -> None:
    X, Y = problem(k=3)
    other = Y.tolil()
    other[:, 1] = before > 0
    start = xs.PPDSparse(**EXACT).fit(converted(tmp_path / "old.xmc", X, other)).model_
    data = converted(tmp_path / "new.xmc", X, Y)
    warm, cold = xs.PPDSparse(**EXACT).fit(data, warm_start=start), xs.PPDSparse(**EXACT).fit(data)
    assert warm.report_["warm_start_labels"]["new"] == 1
    assert warm.report_["objective"] == pytest.approx(cold.report_["objective"], rel=1e-5)
    W, W_cold = dense_weights(warm.model_)[0], dense_weights(cold.model_)[0]
    assert np.abs(W - W_cold).max() < 1e-3


@pytest.mark.parametrize("cuts", [None, Cuts(solve_rows=20)], ids=["held", "streamed"])
def test_a_large_new_label_begins_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: Cuts | None
) -> None:
    """alpha of a label without weights is 0: a single epoch then ends where that of a cold run does."""
    monkeypatch.setattr(solver, "LARGE_BYTES", 1)  # all labels are large
    X, Y = problem(k=3)
    options = {**EXACT, "rounds": 1, "max_rounds": 1, "epochs": 1, "last_epochs": 1}
    start = xs.PPDSparse(**EXACT).fit(converted(tmp_path / "old.xmc", X, Y[:, :2])).model_
    data = converted(tmp_path / "new.xmc", X, Y)
    cold = fit_cut(xs.PPDSparse(**{**options, "last_epochs": 2}), data, tmp_path / "cold", cuts)
    warm = fit_cut(xs.PPDSparse(**options), data, tmp_path / "warm", cuts, start)
    W, W_cold = dense_weights(warm.model_)[0], dense_weights(cold.model_)[0]
    np.testing.assert_array_equal(W[:, 2], W_cold[:, 2])


def test_lists_of_labels_widen_by_what_they_are_called() -> None:
    X, Y = problem(n=120, k=4, seed=2)
    called = np.array(["a", "b", "c", "d"])
    rows = [called[Y[i].indices].tolist() for i in range(Y.shape[0])]
    few = [[label for label in row if label != "b"] for row in rows]
    start = xs.PPDSparse(**EXACT).fit(X, few)
    warm = xs.PPDSparse(**EXACT).fit(X, rows, warm_start=start.model_)
    assert warm.report_["warm_start_labels"] == {"by_name": True, "kept": 3, "new": 1, "gone": 0}
    assert warm.classes_.tolist() == ["a", "b", "c", "d"]


# ---- features


def test_features_may_be_more_behind_those_of_the_model(tmp_path: Path) -> None:
    X, Y = problem(n=120, k=3, seed=2)
    words = [f"word {j}" for j in range(X.shape[1])]
    start = xs.PPDSparse(**EXACT).fit(converted(tmp_path / "old.xmc", X[:, :12], Y, (), words[:12])).model_
    data = converted(tmp_path / "new.xmc", X, Y, (), words)
    warm, cold = xs.PPDSparse(**EXACT).fit(data, warm_start=start), xs.PPDSparse(**EXACT).fit(data)
    W, W_cold = dense_weights(warm.model_)[0], dense_weights(cold.model_)[0]
    assert np.abs(W - W_cold).max() < 1e-3
    with pytest.raises(InputError, match=r"15 features, and .* has 12"):
        xs.PPDSparse(**EXACT).fit(tmp_path / "old.xmc", warm_start=warm.model_)
    renamed = converted(tmp_path / "other.xmc", X, Y, (), [*words[:3], "another", *words[4:]])
    with pytest.raises(InputError, match=r"feature 3 of .* another name"):
        xs.PPDSparse(**EXACT).fit(renamed, warm_start=warm.model_)


# ---- runs


@pytest.fixture(scope="module")
def narrow(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the small set without its last labels and rows, with groups of labels."""
    folder, data = tmp_path_factory.mktemp("narrow"), xs.open_dataset(small)
    x, y = data.X_rows().block(0, 1400), data.Y_rows().block(0, 1400)
    X = sp.csr_matrix((x.values, x.indices, x.indptr), shape=(1400, data.n_features))
    Y = sp.csr_matrix((np.ones(len(y.indices)), y.indices, y.indptr), shape=(1400, data.n_labels))
    options: dict[str, Any] = {"prune": 0, "guide": 2.0, "memory_limit": "2GB"}
    xs.PPDSparse(**options).fit(converted(folder / "narrow.xmc", X, Y[:, :1000]), model=folder / "m")
    return folder / "m"


@pytest.mark.slow
def test_groups_of_labels_are_taken_over_and_new_labels_join_the_nearest(small: Path, narrow: Path) -> None:
    options: dict[str, Any] = {"guide": 2.0, "memory_limit": "2GB"}
    model = xs.PPDSparse(**options).fit(small, warm_start=narrow).model_
    mine, theirs = Guide.of(LinearWeights(model.path)), Guide.of(LinearWeights(narrow))
    matched = mine.groups_of(0, 1000) == theirs.groups_of(0, 1000)
    assert matched.all(axis=0).mean() > 0.5  # others have many more rows now, or fewer
    W = mine.weights().block(0, 32)
    G = sp.csc_matrix((W.values, W.indices, W.indptr), shape=(model.n_features, 32))
    assert np.array_equal(W.values, np.float16(theirs.weights().block(0, 32).values))
    data = xs.open_dataset(small)
    for label in [*np.flatnonzero(~matched.all(axis=0))[:5].tolist(), 1000, 1050, 1099]:
        rows = data.Y_columns().block(label, label + 1).indices.astype(np.int64)
        if not 0 < len(rows) <= 64:
            continue
        x = data.X_rows().gather(rows)
        X = sp.csr_matrix((x.values, x.indices, x.indptr), shape=(len(rows), model.n_features))
        mean = ((X @ np.float64(theirs_dense(theirs, G.shape))).mean(axis=0) + theirs.bias()).reshape(8, 4)
        assert np.array_equal(mine.groups_of(label, label + 1)[:, 0], np.arange(8) * 4 + mean.argmax(axis=1))


def theirs_dense(guide: Guide, shape: tuple[int, int]) -> np.ndarray:
    W = guide.weights().block(0, 32)
    return np.asarray(sp.csc_matrix((W.values, W.indices, W.indptr), shape=shape).todense())


@pytest.fixture(scope="module")
def grown(small: Path, narrow: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the run that nobody killed."""
    path = tmp_path_factory.mktemp("grown") / "m"
    train(small, path, more=("--warm-start", narrow, "--set", "guide=2"))
    return xs.load_model(path).digest()


@pytest.mark.slow
@pytest.mark.parametrize("ready", ['"key":"match"', '"key":"guide"', "start/0", "solve/0/0"])
def test_killed_at_any_stage_ends_with_the_same_model(
    small: Path, tmp_path: Path, narrow: Path, grown: str, ready: str
) -> None:
    model, more = tmp_path / "m", ("--warm-start", narrow, "--set", "guide=2")
    assert kill_when(small, model, ready, 0.0, more=more)
    figures = train(small, model, limit="600MB", threads=1, more=more)
    assert figures["resumed"]
    assert figures["warm_start_labels"]["new"] >= 100 - figures["n_empty"]
    assert xs.load_model(model).digest() == grown


@pytest.mark.slow
def test_any_cut_gives_the_same_model(small: Path, tmp_path: Path, narrow: Path) -> None:
    digests = set()
    for options in (
        {"threads": 1, "cuts": None},
        {"threads": 2, "cuts": Cuts(classes=300, rows=240, solve_rows=400, interval=130)},
    ):
        clf = xs.PPDSparse(threads=options["threads"], memory_limit=tight(), guide=2.0)
        fit_cut(clf, small, tmp_path / str(options["threads"]), options["cuts"], narrow)
        digests.add(clf.model_.digest())
    assert len(digests) == 1
