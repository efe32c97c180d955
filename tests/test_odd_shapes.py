"""Sets of odd shapes: every estimator trains on them, or says what to change, and that helps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.soak import first

import xmc_stream as xs
from xmc_stream.errors import InputError
from xmc_stream.pdsparse.memory import plan_pass
from xmc_stream.pdsparse.parameters import PDSparseParameters
from xmc_stream.runtime.plan import MIB, MemoryPlan

LIMIT = "8GB"  # whatever is refused under it is not refused for want of memory

# rows, features, labels
SHAPES = [
    (1, 1, 1), (1, 2, 2), (1, 50, 3), (1, 3, 1200), (2, 1, 1), (3, 50, 3), (3, 50, 50), (3, 2, 1500), (40, 1, 5), (40, 7, 1),
    (40, 3, 1100), (30, 300, 40),
]  # fmt: skip
OTHERS = [1, 5, 7, 11]  # of these shapes, which are much like others
KINDS = ["dense", "empty rows", "no values", "no positives", "all positive"]
ESTIMATORS: list[tuple[str, dict[str, Any]]] = [
    ("PPDSparse", {}),
    ("PDSparse", {}),
    ("PDSparse", {"held_out": 0.0, "max_passes": 2}),
    ("PDSparse", {"held_out": 0.5, "max_passes": 2, "parts": 1000, "rate": 0, "post_solve": True}),
    ("LEML", {}),
    ("LEML", {"rank": 3, "loss": "logistic", "alternations": 2, "held_out": 0.5}),
    ("CPLST", {}),
    ("GroupLasso", {"loss": "multitask", "lam": 0.01}),
    ("GroupLasso", {"loss": "label-ranking", "mix": 0.5, "algorithm": "sparsa", "debias": 0.1, "max_passes": 3}),
    ("MEMOIR", {}),
    (
        "MEMOIR",
        {"variant": "l1", "oracle": "sw-graph", "truncate": 0.1, "held_out": 0.0, "steps": 5, "sampling": "row"},
    ),
    ("MEMOIR", {"variant": "lsh", "oracle": "simple-lsh", "rank": 3, "held_out": 0.5, "steps": 5, "update": "all"}),
    ("LabelTree", {}),
    ("LabelTree", {"max_leaf": 1, "root": 2, "branching": 8, "n_trees": 2, "beam": 2, "C": 1.0}),
]


def odd_set(n: int, d: int, k: int, kind: str) -> tuple[Any, Any]:
    rng = np.random.default_rng([n, d, k])
    X = rng.standard_normal((n, d)).astype(np.float32)
    Y = rng.random((n, k)) < min(0.5, 3 / k)
    if kind == "empty rows":
        X[rng.random(n) < 0.5] = 0
    elif kind == "no values":
        X[:] = 0
    elif kind == "no positives":
        Y[:] = False
    elif kind == "all positive":
        Y[:] = True
        Y[0] = rng.random(k) < 0.5
    return sp.csr_matrix(X), sp.csr_matrix(Y.astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("others", first([False, True]))
@pytest.mark.parametrize("number", range(len(ESTIMATORS)), ids=lambda number: str(ESTIMATORS[number]))
def test_every_estimator_trains_on_odd_shapes(number: int, others: bool) -> None:
    name, options = ESTIMATORS[number]
    for at, shape in enumerate(SHAPES):
        if (at in OTHERS) != others:
            continue
        kind = KINDS[(at + number) % len(KINDS)]
        X, Y = odd_set(*shape, kind)
        try:
            clf = getattr(xs, name)(memory_limit=LIMIT, threads=1, **options).fit(X, Y)
        except InputError as error:
            if "has one label" not in str(error):
                raise
            continue
        labels, scores = clf.predict_topk(X, 1)
        assert ((labels >= -1) & (labels < shape[2])).all(), (shape, kind)
        assert np.isfinite(scores[labels >= 0]).all(), (shape, kind)


@pytest.mark.parametrize(("n", "d", "k"), [(200, 5000, 10), (300, 40, 500)])
def test_rows_that_are_long_or_have_many_active_labels(n: int, d: int, k: int) -> None:
    """Neither takes more than is planned for: all labels of all rows are, where there is memory."""
    rng = np.random.default_rng(0)
    X = sp.csr_matrix(rng.standard_normal((n, d)).astype(np.float32) / np.float32(d**0.5))
    Y = sp.csr_matrix((rng.random((n, k)) < 0.5).astype(np.float32))
    options: dict[str, Any] = {"held_out": 0.0, "max_passes": 2, "memory_limit": LIMIT}
    clf = xs.PDSparse(**options, C=1e-3, lam=0.0, most=k).fit(X, Y)
    assert clf.report_["history"][-1]["active_labels"] > min(k, 64) / 2


@pytest.mark.parametrize("parts", [1, 3, 2000])
def test_tables_grow_up_to_all_labels_of_all_features(parts: int, tmp_path: Any) -> None:
    """And not beyond what is planned for them."""
    rng = np.random.default_rng(0)
    X, Y = rng.standard_normal((60, 3)).astype(np.float32), rng.random((60, 2000)) < 0.6
    dataset = xs.convert(sp.csr_matrix(X), tmp_path / "data.xmc", labels=sp.csr_matrix(Y.astype(np.float32)))
    p = PDSparseParameters(lam=0.0, held_out=0.0, max_passes=3, most=2000, parts=parts, post_solve=True)
    plan = plan_pass(MemoryPlan(2**40, 2**30, 1), dataset, p)
    assert not plan.dense
    assert plan.tables < 64 * MIB
    clf = xs.PDSparse(**p.to_dict(), memory_limit=LIMIT).fit(dataset)
    assert clf.report_["nnz"] == 3 * 2000 or parts > 3  # a search among few labels brings in few
