"""MEMOIR: steps against plain NumPy, the optimum, draws, the SVD, what is held out; what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.cuts import CutError
from helpers.problems import LIMIT, overlapping

import xmc_stream as xs
from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.factors.factors import Begun
from xmc_stream.factors.products import Learned
from xmc_stream.factors.rowblocks import ROW_BYTES
from xmc_stream.memoir.draws import Copies, Steps, held_out_of
from xmc_stream.memoir.parameters import MEMOIRParameters
from xmc_stream.memoir.reduction import Reduction
from xmc_stream.memoir.run import MEMOIRRun
from xmc_stream.runtime import plan as portion
from xmc_stream.runtime.job import Notes, run_here
from xmc_stream.runtime.plan import MIB, MemoryPlan
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.model import KIND, begin_model, finish_model, model_attributes

PLAIN: dict[str, Any] = {"held_out": 0.0, "cosine": False}
BIAS: dict[str, Any] = {**PLAIN, "bias": True}


def solve(X: Any, Y: Any, folder: Path, **options: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Train without an engine: weights (D x K), bias, and what the run says."""
    data = folder / "data.xmc"
    dataset = Dataset(data) if data.exists() else xs.convert(X, data, labels=Y, memory_limit=LIMIT)
    p, work, notes = MEMOIRParameters(**options), folder / "model.partial", Notes()
    begin_model(work)
    result = run_here(MEMOIRRun(dataset, work, p, 0, MemoryPlan(2**40, 2**30, 1), notes).loop(), notes)
    kind = "low-rank" if p.variant == "lsh" else "linear"
    finish_model(work, folder / "model", {**model_attributes(dataset, p.solver, p.to_dict(), 0, result), KIND: kind})
    model = xs.load_model(folder / "model")
    if kind == "low-rank":
        return *model.factors(), result
    return model.to_scipy().toarray().astype(np.float64), model.bias().astype(np.float64), result


def objective(X: Any, Y: Any, W: Any, lam: float) -> float:
    """lam/2 ||W||^2 + the mean Crammer-Singer hinge of copies."""
    losses = []
    for x, labels in zip(X.toarray().astype(np.float64), Y.toarray() > 0, strict=True):
        z = x @ W
        losses += [max(0.0, 1 + np.delete(z, y).max() - z[y]) for y in np.flatnonzero(labels)]
    return 0.5 * lam * float((W**2).sum()) + float(np.mean(losses))


def test_with_the_exact_oracle_it_is_pegasos_and_comes_to_the_optimum(tmp_path: Path) -> None:
    from sklearn.svm import LinearSVC

    X, Y = overlapping(60, 10, 4, True)
    lam, y = 0.05, Y.toarray().argmax(axis=1)
    options = {
        "variant": "l2",
        "sampling": "row",
        "schedule": "pegasos",
        "batch": 60,
        "steps": 2000,
        "lam": lam,
        "bias": False,
    }
    W, _, result = solve(X, Y, tmp_path, **PLAIN, **options)
    svm = LinearSVC(multi_class="crammer_singer", fit_intercept=False, C=1 / (lam * 60), tol=1e-8, max_iter=10**6)
    best = objective(X, Y, svm.fit(X.toarray().astype(np.float64), y).coef_.T, lam)
    assert objective(X, Y, W, lam) == pytest.approx(best, rel=1e-3)
    assert result["steps"] == 2000


def next_by_hand(W: Any, X: Any, p: MEMOIRParameters, copies: Copies, step: int) -> Any:
    """A step on a dense W (K x D + 1), straight from the formulas; no two scores are equal."""
    exact, k, draws = np.hstack([X.toarray().astype(np.float64), np.ones((X.shape[0], 1))]), len(W), p.draws
    moved, eta = np.zeros_like(W), p.rate(step)
    for i, y in zip(*copies.draw(draws, 0, step, p.sampling == "class"), strict=True):
        z = W @ exact[i]
        others = np.delete(np.arange(k), y)
        r = others[z[others].argmax()]
        if z[y] - z[r] < 1 or p.update == "all":
            moved[y] += eta / draws * exact[i]
            moved[r] -= eta / draws * exact[i]
    if p.variant == "l2":
        W = W * max(0.0, 1 - eta * p.penalty) + moved
        return W * min(1.0, 1 / np.sqrt(p.penalty * (W**2).sum()))
    W, touched = W + moved, np.flatnonzero(moved.any(axis=1))
    t = p.gamma * p.penalty * eta * k / len(touched)
    W[touched] = np.sign(W[touched]) * np.maximum(np.abs(W[touched]) - t, 0)
    order = np.argsort(np.abs(W), axis=None)
    cut = np.sqrt(np.cumsum(np.sort(np.abs(W), axis=None) ** 2)) <= p.truncate * np.linalg.norm(W)
    W.flat[order[cut]] = 0
    return W


@pytest.mark.parametrize(
    "options",
    [
        {"variant": "l2"}, {"variant": "l2", "sampling": "class"}, {"variant": "l2", "lam": 40.0, "sampling": "class"},
        {"variant": "l2", "lam": 1e-3, "eta0": 30.0, "update": "all"}, {"variant": "l2", "lam": 10.0, "eta0": 0.1}, {},
        {"variant": "l1", "lam": 1.0, "eta0": 0.1, "gamma": 1e-3},
        {"variant": "l1", "lam": 1.0, "eta0": 0.1, "truncate": 0.3},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)  # fmt: skip
def test_a_step_is_that_of_the_formulas(options: dict[str, Any], tmp_path: Path) -> None:
    X, Y = overlapping(60, 10, 4, True)
    found = []
    for steps in (6, 7):
        (tmp_path / str(steps)).mkdir()
        W, bias, _ = solve(X, Y, tmp_path / str(steps), **BIAS, batch=20, steps=steps, **options)
        found.append(np.vstack([W, bias]).T)
    p = MEMOIRParameters(**BIAS, batch=20, steps=7, **options).resolved(4, Y.nnz)
    copies = Copies(Dataset(tmp_path / "7" / "data.xmc"), 0, 0.0)
    wanted = next_by_hand(found[0], X, p, copies, 6)
    assert np.abs(wanted - found[0]).max() > 1e-4
    np.testing.assert_allclose(found[1], wanted, atol=3e-6 * max(1.0, np.abs(wanted).max()))
    if p.variant == "l2":
        assert np.linalg.norm(found[1]) <= (1 + 1e-6) / np.sqrt(p.penalty)
    if options.get("truncate"):
        assert (found[1] == 0).any()


def test_draws_are_uniform_over_classes_or_over_copies(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    Y = sp.csr_matrix((rng.random((400, 6)) < np.array([0.6, 0.3, 0.1, 0.05, 0.02, 0.0])).astype(np.float32))
    dataset = xs.convert(
        sp.csr_matrix(np.eye(400, 5, dtype=np.float32)), tmp_path / "d.xmc", labels=Y, memory_limit=LIMIT
    )
    copies, n = Copies(dataset, 3, 0.25), 60_000
    left = ~held_out_of(np.arange(400), 3, 0.25)
    assert len(copies.rows) == Y[left].nnz
    counts = np.asarray(Y[left].sum(axis=0)).ravel()
    assert copies.classes.tolist() == np.flatnonzero(counts).tolist()
    for by_class in (True, False):
        rows, labels = copies.draw(n, 3, 0, by_class)
        assert (np.asarray(Y[rows, labels]).ravel() == 1).all()
        assert left[rows].all()
        share = (counts > 0) / (counts > 0).sum() if by_class else counts / counts.sum()
        assert np.abs(np.bincount(labels, minlength=6) / n - share).max() < 5 * 0.5 / np.sqrt(n)
        of_first = np.bincount(rows[labels == 0], minlength=400)[np.asarray(Y[:, [0]].todense()).ravel() * left > 0]
        assert of_first.min() > 0.5 * of_first.mean()
    again, _ = copies.draw(n, 3, 0, False)
    assert np.array_equal(rows, again)
    assert not np.array_equal(rows, copies.draw(n, 3, 1, False)[0])
    assert not np.array_equal(rows, copies.draw(n, 4, 0, False)[0])


def test_rows_of_draws_are_those_of_x(tmp_path: Path) -> None:
    X, Y = overlapping(50, 8, 5)
    dataset = xs.convert(X, tmp_path / "d.xmc", labels=Y, memory_limit=LIMIT)
    copies = Copies(dataset, 0, 0.0)
    seen = []
    for step, drawn in Steps(dataset, copies, 30, 0, True, dataset.X_rows().gather).of(2, 9):
        seen.append(step)
        got = sp.csr_matrix((drawn.rows.values, drawn.rows.indices, drawn.rows.indptr), (drawn.rows.n, 8)).toarray()
        assert np.array_equal(got, X[drawn.numbers].toarray())
        rows, labels = copies.draw(30, 0, step, True)
        assert sorted(zip(rows, labels, strict=True)) == list(
            zip(drawn.numbers[drawn.places], drawn.labels, strict=True)
        )
        assert np.array_equal(np.diff(drawn.own.indptr), np.diff(Y[drawn.numbers].indptr))
    assert seen == list(range(2, 9))


@pytest.mark.parametrize("mask", [True, False])
def test_true_labels_are_wrong_classes_only_without_the_mask(mask: bool, tmp_path: Path) -> None:
    """Every row has labels 0 and 1, and shares its features with nobody: only these two ever have a positive score."""
    X = sp.csr_matrix(np.eye(40, dtype=np.float32))
    Y = np.tile(np.array([1, 1, 0, 0], np.float32), (40, 1))
    Y[39, 2] = Y[38, 3] = 1
    W, _, _ = solve(
        X,
        sp.csr_matrix(Y),
        tmp_path,
        **PLAIN,
        mask=mask,
        steps=60,
        batch=40,
        bias=False,
        sampling="row",
        lam=1e-3,
        eta0=0.1,
    )
    both = W[:38, :2].min(axis=1) > 0
    assert both.all() if mask else not both.all()


def test_the_svd_is_that_of_numpy(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    X = sp.csr_matrix(
        (rng.normal(size=(90, 12)) @ rng.normal(size=(12, 40)) + 0.05 * rng.normal(size=(90, 40))).astype(np.float32)
    )
    Y = sp.csr_matrix((rng.integers(0, 3, 90)[:, None] == np.arange(3)).astype(np.float32))
    dataset = xs.convert(X, tmp_path / "d.xmc", labels=Y, memory_limit=LIMIT)
    found = []
    for threads in (1, 3):
        work, notes = tmp_path / f"{threads}.partial", Notes()
        begin_model(work)
        learned, plan = Learned.of(dataset, 0.0, 0, True), MemoryPlan(2**40, 2**30, threads)
        reduction = Reduction(learned, 8, work, plan, notes)
        said = run_here(reduction.loop(), notes)
        coordinates: Any = run_here(reduction.project(), Notes())
        V, lines = reduction.vectors().read(0, 41), coordinates.gather(np.array([0, 3, 4, 89]))
        found.append((V, lines))
        exact = np.hstack([X.toarray().astype(np.float64), np.ones((90, 1))])
        _, s, vt = np.linalg.svd(exact, full_matrices=False)
        np.testing.assert_allclose(said["singular_values"], s[:8], rtol=1e-4)
        np.testing.assert_allclose(np.abs((V * vt[:8].T).sum(axis=0)), 1, atol=1e-3)
        np.testing.assert_allclose(V.T @ V, np.eye(8), atol=1e-5)
        np.testing.assert_allclose(lines, exact[[0, 3, 4, 89]] @ V, rtol=1e-4, atol=1e-4)
    assert np.array_equal(found[0][0], found[1][0])
    assert np.array_equal(found[0][1], found[1][1])


@pytest.mark.parametrize("stays", [True, False])
def test_the_svd_goes_on_from_any_block_of_rows(stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut after each block: the same V bit for bit, whether X stays in memory or is read again."""
    X = sp.random(5000, 60, 0.2, format="csr", dtype=np.float32, random_state=0)
    dataset = xs.convert(X, tmp_path / "d.xmc", labels=np.arange(5000) % 3, memory_limit=LIMIT)
    learned, write = Learned.of(dataset, 0.0, 0, False), Begun._write

    def vectors(folder: Path) -> tuple[Any, int]:
        """V, and how many sessions it took."""
        begin_model(folder)
        ledger, sessions = Notes(), 1
        while True:
            reduction = Reduction(learned, 30, folder, MemoryPlan(2**40, 2**30, 2), ledger)
            try:
                run_here(reduction.loop(), ledger)
            except CutError:
                sessions += 1
                continue
            return reduction.vectors().read(0, 60), sessions

    def cut_there(begun: Begun, state: Any) -> None:
        write(begun, state)
        raise CutError

    whole, _ = vectors(tmp_path / "whole.partial")
    monkeypatch.setattr(portion, "SECONDS", 0.0)
    monkeypatch.setattr(Begun, "_write", cut_there)
    if stays:
        monkeypatch.setattr("xmc_stream.factors.rowblocks._LINE_BYTES", ROW_BYTES // 1000)
    else:
        monkeypatch.setattr("xmc_stream.memoir.reduction.entries_bytes", lambda *_: 2**60)
    cut, sessions = vectors(tmp_path / "cut.partial")
    assert sessions > 3 * 3  # three blocks or more, three iterations
    assert np.array_equal(cut, whole)


@pytest.mark.parametrize("variant", ["l1", "l2", "lsh"])
def test_the_best_of_the_held_out_rows_is_the_model(variant: str, tmp_path: Path) -> None:
    """It is that of so many steps alone, and what it predicts is as good as the run says."""
    X, Y = overlapping(300, 20, 5)
    options = {"variant": variant, "batch": 30, "steps": 40, "held_out": 0.3, "patience": 3, "rank": 6}
    *_, result = solve(X, Y, tmp_path, **options)
    f1 = [entry["macro_F1"] for entry in result["history"]]
    best = int(np.argmax(f1))
    assert result["best_step"] == result["history"][best]["steps"]
    assert len(f1) == min(20, best + 4)
    assert result["held_out_macro_F1"] == f1[best]
    model = xs.load_model(tmp_path / "model")
    rows = np.flatnonzero(held_out_of(np.arange(300), 0, 0.3))
    assert result["held_out_n_held_out"] == len(rows)
    labels, _ = model.predict_topk(X[rows], k=1)
    copies = np.repeat(np.arange(len(rows)), np.diff(Y[rows].indptr))
    hits = Y[rows].indices == labels[copies, 0]
    assert result["held_out_accuracy"] == pytest.approx(100 * hits.mean(), abs=0.5)


def test_gamma_and_truncation_make_the_weights_of_l1_fewer(tmp_path: Path) -> None:
    X, Y = overlapping(300, 200, 6, True)
    found = []
    for gamma, truncate in ((0.0, 0.0), (3e-2, 0.0), (3e-2, 0.05)):
        options = {
            "variant": "l1",
            "gamma": gamma,
            "truncate": truncate,
            "batch": 50,
            "steps": 30,
            "lam": 1.0,
            "eta0": 0.1,
        }
        W, _, result = solve(X, Y, tmp_path, **PLAIN, **options)
        found.append(np.count_nonzero(W))
        (tmp_path / "model").rename(tmp_path / f"{gamma}-{truncate}")
        assert result["history"][-1]["nnz"] == np.count_nonzero(W)
    assert found[0] > 1.1 * found[1] > 1.1 * found[2] > 0


def test_rules_fill_in_what_is_not_given() -> None:
    p = MEMOIRParameters().resolved(100, 7000)
    assert (p.batch, p.steps, p.lam, p.eta0, p.oracle) == (200, 350, 1 / 7000, 200.0, "exact")
    assert p.resolved(5, 5) == p
    assert MEMOIRParameters().resolved(10_000, 7000).batch == 1000
    lsh = MEMOIRParameters(variant="lsh")
    assert [lsh.resolved(k, 7000).oracle for k in (7999, 8000)] == ["exact", "simple-lsh"]
    given = MEMOIRParameters(batch=3, steps=4, lam=5.0, eta0=6.0, oracle="sw-graph")
    assert given.resolved(100, 7000) == given


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"variant": "l3"}, "one of l1, l2, lsh"),
        ({"oracle": "simple-lsh"}, "cannot be simple-lsh with variant=l1"),
        ({"oracle": "sw-graph", "variant": "lsh"}, "cannot be sw-graph with variant=lsh"),
        ({"bits": 320}, "64, 128, 192 or 256"),
        ({"lam": 0}, "'lam' parameter"),
    ],
)
def test_parameters_are_checked(values: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        MEMOIRParameters.of(values)


def test_one_label_is_refused(tmp_path: Path) -> None:
    X = sp.csr_matrix(np.eye(4, dtype=np.float32))
    data = xs.convert(X, tmp_path / "d.xmc", labels=sp.csr_matrix(np.ones((4, 1))), memory_limit=LIMIT)
    with pytest.raises(InputError, match="has one label: MEMOIR learns labels against each other"):
        xs.MEMOIR(memory_limit=LIMIT).fit(data)


def test_a_batch_beyond_the_limit_is_refused_before_the_work(tmp_path: Path) -> None:
    X, Y = overlapping(60, 10, 4)
    dataset = xs.convert(X, tmp_path / "d.xmc", labels=Y, memory_limit=LIMIT)
    run = MEMOIRRun(
        dataset, tmp_path / "m.partial", MEMOIRParameters(batch=10**7), 0, MemoryPlan(2**28, 64 * MIB, 1), Notes()
    )
    begin_model(tmp_path / "m.partial")
    with pytest.raises(MemoryLimitError, match="MEMOIR needs"):
        run_here(run.loop(), Notes())
