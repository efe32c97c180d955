"""Sentences of the docs that say what comes out: each is computed on small data. The name of a test says which page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from reference import grouplasso as group_lasso_twin

import xmc_stream as xs
from xmc_stream.convert import convert
from xmc_stream.linear.kernels.guide import guide_row
from xmc_stream.store.names import open_vectorizer

LIMIT = "2GB"


@pytest.mark.parametrize(
    ("z", "sure"), [(-1.0, -7.0), (0.0, 0.0), (0.5, 0.875), (1.0, 1.0), (1.5, 1.005), (3.0, 1.02), (101.0, 2.0)]
)
def test_ppdsparse_a_score_with_groups(z: float, sure: float) -> None:
    """1 - (1 - z)^3 below 1, 1 + (z - 1) / 100 above; less what the groups doubt."""
    terms = np.array([[0.0, -0.25, -0.5, 0.0]], np.float32)  # of four groups, in two clusterings
    scores = np.full(2, z, np.float32)
    guide_row(scores, 0, terms, np.array([[0, 1], [3, 2]], np.uint8))
    np.testing.assert_allclose(scores, [sure, sure - 0.75], rtol=1e-6)


@pytest.mark.parametrize("kind", [xs.PPDSparse, xs.PDSparse, xs.MEMOIR, xs.GroupLasso])
@pytest.mark.parametrize("n_classes", [2, 3])
def test_estimators_shapes_of_coef(kind: Any, n_classes: int) -> None:
    """coef_ is (K, D), intercept_ (K,); of two classes (1, D) and (1,), the second's less the first's."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(150, 6)), rng.integers(0, n_classes, 150)
    clf = kind(memory_limit=LIMIT).fit(X, y)
    n = n_classes if n_classes > 2 else 1
    assert (clf.coef_.shape, clf.intercept_.shape) == ((n, 6), (n,))
    unit = X / np.linalg.norm(X, axis=1, keepdims=True)
    scores = unit @ clf.coef_.toarray().T + clf.intercept_
    np.testing.assert_allclose(clf.decision_function(X), scores[:, 0] if n == 1 else scores, atol=1e-4)


def test_group_lasso_gradients_at_zero_are_not_the_largest_but_decide() -> None:
    """A lam above all norms of the gradient's rows at W = 0 selects nothing; elsewhere gradients may be larger."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(60, 5)).astype(np.float32), rng.integers(0, 3, 60)
    Y, W = np.eye(3)[y] > 0, rng.normal(size=(5, 3))

    def norms(at: Any) -> Any:
        return np.linalg.norm(group_lasso_twin.gradient("multiclass", X.astype(np.float64), Y, at), axis=1)

    least = float(norms(np.zeros((5, 3))).max())
    assert norms(W).max() > 2 * least
    for share, selected in ((1.001, 0), (0.9, 1)):
        clf = xs.GroupLasso(lam=share * least, normalize=None, memory_limit=LIMIT).fit(X, y)
        assert min(clf.report_["n_selected"], 1) == selected


def test_mips_recall_of_sw_graph_has_no_floor() -> None:
    """Among random sparse vectors recall@1 is 0.59 to 0.79, and the score found 0.96 of the best or more."""
    ids, found = np.arange(4_000), {}
    for seed in range(2):
        rng = np.random.default_rng(seed)
        W = sp.random_array((4_000, 5_000), density=0.01, format="csr", rng=rng, dtype=np.float32)
        X = sp.random_array((500, 5_000), density=0.005, format="csr", rng=rng, dtype=np.float32)
        for oracle in ("exact", "sw-graph"):
            index = xs.InnerProductIndex(n_ids=4_000, n_features=5_000, oracle=oracle, memory_limit=LIMIT, seed=0)
            index.add(ids, W)
            found[oracle] = index.query(X)
        assert 0.5 < (found["exact"][0] == found["sw-graph"][0]).mean() < 0.85
        assert 0.95 < (found["sw-graph"][1] / found["exact"][1]).mean() < 1.0


def test_convert_idf_comes_from_all_rows_held_out_ones_too(tmp_path: Path) -> None:
    """`split`, and so `tune` and --calibrate, hold out rows of a dataset whose idf is there already."""
    rng = np.random.default_rng(0)
    texts = [{f"w{word}" for word in rng.integers(0, 12, 4)} for _ in range(200)]
    lines = [f'{{"text": "{" ".join(sorted(words))}", "labels": ["l{i % 4}"]}}' for i, words in enumerate(texts)]
    (tmp_path / "t.jsonl").write_text("\n".join(lines) + "\n")
    convert(tmp_path / "t.jsonl", tmp_path / "t.xmc", memory_limit=LIMIT)
    xs.split(tmp_path / "t.xmc", tmp_path / "train.xmc", tmp_path / "held.xmc", fraction=0.5)
    n_held = xs.open_dataset(tmp_path / "held.xmc").n_samples
    assert 50 < n_held < 150
    words = xs.open_dataset(tmp_path / "t.xmc").feature_names()
    assert words is not None
    names = words[:] if isinstance(words, list) else [name.decode() for name in words.read_bytes(0, 12)]
    of_all = [1 + np.log(201 / (1 + sum(name in text for text in texts))) for name in names]
    for part in ("t", "train", "held"):
        vectorizer = open_vectorizer(tmp_path / f"{part}.xmc")
        assert vectorizer is not None
        np.testing.assert_allclose(vectorizer[1].read(0, 12), of_all, rtol=1e-6)


def test_calibration_is_made_for_precision_and_average_auc_may_fall() -> None:
    """Labels far below a row's best come by frequency beyond the cap: their order is no longer that of their scores."""
    from xmc_stream.models.calibration import Calibration

    calibration = Calibration((2.0, 0.0), 0.2, (0.0, 0.0), 1, 1.0)
    slope, shift, cap, top = calibration.by(np.array([10, 1000]))
    z = slope * np.array([2.0, 1.0]) + shift
    scores = np.where(z > cap, top + 0.01 * (z - cap), z)
    np.testing.assert_allclose(scores, [1 + np.log(11) + 0.03, 1 + np.log(1001) + 0.01], rtol=1e-6)
    assert scores[0] < scores[1]  # the more frequent first, though the rarer scores more
