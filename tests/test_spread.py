"""C and the weight of positives where they are not given: larger for rows that lie close together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.executed import fit_cut
from helpers.problems import tight

import xmc_stream as xs
from xmc_stream.linear.weights import LinearWeights
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.ppdsparse.problem import settled, spread
from xmc_stream.ppdsparse.start import weights_of_terms
from xmc_stream.runtime.plan import Cuts


def dense(n: int, d: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows around one point, and the label each belongs to."""
    rng = np.random.default_rng(0)
    X = 1.0 + noise * rng.standard_normal((n, d))
    Y = np.eye(4)[np.argmax(X[:, :4], axis=1)]
    return (X / np.linalg.norm(X, axis=1, keepdims=True)).astype(np.float32), Y.astype(np.float32)


@pytest.fixture(scope="module")
def close(tmp_path_factory: pytest.TempPathFactory) -> xs.Dataset:
    """Rows that spread by about a tenth."""
    X, Y = dense(1200, 12, 0.35)
    return xs.convert(sp.csr_matrix(X), tmp_path_factory.mktemp("close") / "d.xmc", labels=sp.csr_matrix(Y))


def weights(model: Path) -> bytes:
    stored = LinearWeights(model)
    block = stored.classes(0, stored.n_labels)
    values = np.ones(0) if block.data is None else block.data
    return block.indptr.tobytes() + block.indices.tobytes() + values.tobytes()


def exact(X: np.ndarray) -> float:
    return float(np.square(X - X.mean(axis=0)).sum(axis=1).mean())


def test_the_spread_is_that_of_the_rows_about_their_mean(close: xs.Dataset, tmp_path: Path) -> None:
    X, _ = dense(1200, 12, 0.35)
    assert spread(close) == pytest.approx(exact(X), rel=0.15)
    assert 0.05 < exact(X) < 0.2  # not that of the rows about 0, which is 1
    sparse = sp.random(900, 60, 0.1, format="csr", dtype=np.float32, random_state=1)
    data = xs.convert(sparse, tmp_path / "s.xmc", labels=sparse[:, :3])
    assert spread(data) == pytest.approx(exact(sparse.toarray()), rel=0.1)


def test_the_spread_is_what_pairs_of_rows_say(tmp_path: Path) -> None:
    rows = sp.random(400, 50, 0.2, dtype=np.float32, random_state=2).toarray()
    rows[::7] = 0  # rows without entries too
    X = sp.csr_matrix(rows)
    data = xs.convert(X, tmp_path / "p.xmc", labels=X[:, :3])
    rows, rng, total = rows.astype(np.float64), np.random.default_rng(0), 0.0
    for _ in range(256):
        i, j = int(rng.integers(400)), int(rng.integers(399))
        total += 0.5 * float(np.square(rows[i] - rows[j + (j >= i)]).sum())
    assert spread(data) == pytest.approx(total / 256, rel=1e-12)


@pytest.mark.parametrize(
    ("of_rows", "C", "weight"),
    [
        (80.0, 1.0, 1.0),
        (1.0, 1.0, 1.0),
        (0.5, 1.0, 1.0),
        (0.4, 1.25, 1.25),
        (0.1, 5.0, 2.0),
        (1e-9, 100.0, 2.0),
        (0.0, 1.0, 1.0),
    ],
)
def test_C_and_the_weight_of_positives_are_one_at_least(of_rows: float, C: float, weight: float) -> None:
    assert PPDSparseParameters.C_for(of_rows) == pytest.approx(C)
    assert PPDSparseParameters.positive_weight_for(of_rows) == pytest.approx(weight)


def test_one_row_and_equal_rows_have_a_C_of_one(tmp_path: Path) -> None:
    for n in (1, 5):
        X = sp.csr_matrix(np.tile(np.array([[1.0, 2.0]], np.float32), (n, 1)))
        data = xs.convert(X, tmp_path / f"{n}.xmc", labels=sp.csr_matrix(np.ones((n, 1), np.float32)))
        for given in ({}, {"C": 3.0}, {"positive_weight": 0.5}, {"C": 3.0, "positive_weight": 0.5}):
            p = settled(PPDSparseParameters(**given), data)
            assert {"C": p.C, "positive_weight": p.positive_weight} == {"C": 1.0, "positive_weight": 1.0, **given}


def test_the_model_says_what_was_taken(close: xs.Dataset, tmp_path: Path) -> None:
    report = xs.PPDSparse(memory_limit="2GB").fit(close, model=tmp_path / "m").report_
    assert report["params"]["C"] is None
    assert report["C"] == pytest.approx(1 / (2 * spread(close)))
    assert report["positive_weight"] == 2.0
    for i, some in enumerate(
        ({"C": report["C"]}, {"positive_weight": 2.0}, {"C": report["C"], "positive_weight": 2.0})
    ):
        given = xs.PPDSparse(memory_limit="2GB", **some).fit(close, model=tmp_path / f"{i}").report_
        assert weights(tmp_path / "m") == weights(tmp_path / f"{i}")
        assert report["objective"] == given["objective"]
    terms = weights_of_terms(LinearWeights(tmp_path / "m"))  # a warm start begins from these
    assert {name: terms[name] for name in ("C", "positive_weight")} == {"C": report["C"], "positive_weight": 2.0}
    xs.PPDSparse.dismec(memory_limit="2GB").fit(close, model=tmp_path / "d")
    assert weights_of_terms(LinearWeights(tmp_path / "d"))["positive_weight"] == 1.0


def test_the_C_taken_does_not_depend_on_the_cut(close: xs.Dataset, tmp_path: Path) -> None:
    whole = xs.PPDSparse(memory_limit="2GB").fit(close, model=tmp_path / "whole")
    cuts = Cuts(classes=3, rows=130, solve_rows=300, interval=90)
    cut = fit_cut(xs.PPDSparse(memory_limit=tight(), threads=2), close, tmp_path / "cut", cuts)
    assert cut.model_.digest() == whole.model_.digest()


def test_rows_that_spread_train_as_with_a_C_of_one(tmp_path: Path) -> None:
    X = sp.random(600, 80, 0.1, format="csr", dtype=np.float32, random_state=2)
    data = xs.convert(X, tmp_path / "d.xmc", labels=(X[:, :5] > 0).astype(np.float32), normalize="l2")
    report = xs.PPDSparse(memory_limit="2GB").fit(data, model=tmp_path / "m").report_
    xs.PPDSparse(memory_limit="2GB", C=1.0, positive_weight=1.0).fit(data, model=tmp_path / "one")
    assert report["C"] == report["positive_weight"] == 1.0
    assert weights(tmp_path / "m") == weights(tmp_path / "one")


def test_classes_far_from_their_optimum_get_more_epochs_where_C_is_large() -> None:
    def epochs(C: float, tau: float = 1.0, weight: float = 1.0) -> list[int]:
        return [PPDSparseParameters(C=C, tau=tau, positive_weight=weight).epochs_of(round_) for round_ in range(5)]

    assert epochs(1.0) == epochs(2.0) == [2, 2, 6, 6, 6]
    assert epochs(20.0) == [2, 2, 6, 60, 60]
    assert epochs(20.0, tau=20.0) == [2, 2, 6, 6, 6]  # the same problem as C = 1
    assert epochs(5.0, weight=4.0) == epochs(20.0, weight=0.5) == [2, 2, 6, 60, 60]


@pytest.mark.slow
def test_a_large_C_comes_near_its_optimum(close: xs.Dataset, tmp_path: Path) -> None:
    options = {"memory_limit": "2GB", "C": 20.0}
    report = xs.PPDSparse(**options).fit(close, model=tmp_path / "m").report_
    best = xs.PPDSparse(**options, max_rounds=None, epochs=40, tol=1e-3).fit(close, model=tmp_path / "best").report_
    assert report["rounds"] > 3
    assert report["objective"] < 1.02 * best["objective"]


@pytest.mark.slow
def test_few_dense_features_are_learned_better(real: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    train, _ = real("letter")
    xs.split(train, tmp_path / "fit.xmc", tmp_path / "valid.xmc", fraction=0.2)
    valid = xs.open_dataset(tmp_path / "valid.xmc")
    truth = valid.Y_rows().block(0, valid.n_samples).indices  # one label a row
    first, of_three = {}, {}
    for name, options in (
        ("default", {}),
        ("alike", {"positive_weight": 1.0}),
        ("one", {"C": 1.0, "positive_weight": 1.0}),
    ):
        clf = xs.PPDSparse(memory_limit="2GB", **options).fit(tmp_path / "fit.xmc", model=tmp_path / name)
        right = clf.predict_topk(valid, k=3)[0] == truth[:, None]
        first[name], of_three[name] = float(right[:, 0].mean()), float(right.any(axis=1).mean())
    assert first["default"] > first["one"] + 0.005
    assert of_three["default"] > of_three["alike"] + 0.002
