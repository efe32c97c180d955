"""Whole trainings of label trees: one model for any limit, threads, cut and kill; predictions, and figures of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.compiler import needs_compiler
from helpers.cuts import CutError, CutLedger
from helpers.executed import predicted, ranked
from helpers.forked import forked_command, run_forked
from helpers.problems import LIMIT, tight
from helpers.trees import PLAN, finished, run_tree, solved, stored, topics

import xmc_stream as xs
from xmc_stream.models import Execution
from xmc_stream.runtime.plan import MIB, Cuts, MemoryPlan
from xmc_stream.store.predictions import Predictions
from xmc_stream.tree import beams, clustering, nodes, plan, streaming
from xmc_stream.tree.beams import BeamJob
from xmc_stream.tree.choice import ChoiceJob
from xmc_stream.tree.clustering import SplitJob, VectorsJob
from xmc_stream.tree.parameters import TreeParameters
from xmc_stream.tree.solve import SolveJob
from xmc_stream.tree.streaming import StreamJob
from xmc_stream.tree.units import UnitJob

pytestmark = needs_compiler

P = TreeParameters(max_leaf=6, root=4, branching=2, beam=3)
KINDS: dict[str, tuple[TreeParameters, dict[str, Any]]] = {
    "several labels": (P, {}),
    "one label": (P, {"labels": 1, "unseen": (3, 4)}),
    "two trees": (replace(P, n_trees=2, C=1.0, max_leaf=7), {"k": 50}),
    "one level": (replace(P, max_leaf=60), {}),
}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many units, jobs, strips, ranges of rows and windows of vectors in small sets."""
    monkeypatch.setattr(nodes, "CHILDREN", 16)
    monkeypatch.setattr(plan, "JOB_ENTRIES", 1 << 10)
    monkeypatch.setattr(beams, "_LEAST", 128)
    monkeypatch.setattr(streaming, "STRIP_BYTES", 1 << 10)
    monkeypatch.setattr(plan, "LARGE", 1 << 11)  # of some parents rows stream by
    monkeypatch.setattr(clustering, "WINDOW", 10)
    monkeypatch.setattr(plan, "WINDOW", 10)
    monkeypatch.setattr(plan, "_EACH", 10)


def with_ties() -> tuple[Any, Any]:
    """A label implies another; rows are so long that their labels score as much as labels can."""
    rng, rows = np.random.default_rng(0), np.arange(300)
    first, second = rng.integers(0, 4, 300), rng.integers(4, 8, 300)
    X, Y = (rng.random((300, 12)) < 0.2).astype(np.float32), np.zeros((300, 10), np.float32)
    X[:, :8] = 0.0
    for labels in (first, second):
        X[rows, labels] = Y[rows, labels] = 1.0
    Y[rows, 8 + first // 2] = 1.0
    return sp.csr_matrix(X * rng.choice([1.0, 1.5, 4.0], (300, 1)), dtype=np.float32), sp.csr_matrix(Y)


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_the_same_for_any_threads_limit_and_interruption(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, options = KINDS[kind]
    if kind == "one label":
        monkeypatch.setattr(plan, "LARGE", 1500)
    data = stored(tmp_path, *topics(**options))
    whole = run_tree(data, tmp_path / "whole", p)
    monkeypatch.setattr(plan, "_VECTOR", 4 * MIB)  # vectors are many bytes: they stream, and nodes are split by jobs
    monkeypatch.setattr(plan, "WINDOW", 4)
    monkeypatch.setattr(streaming, "_SECONDS", -1.0)  # jobs leave off wherever they can
    monkeypatch.setattr(streaming, "_LEFT_BYTES", 1e30)
    small = MemoryPlan(2**40, 140 * MIB, 2, processes=2)
    cut = run_tree(data, tmp_path / "small", p, plan=small)
    ledger = CutLedger()
    while True:  # with another plan each time
        ledger.left = 5
        try:
            resumed = run_tree(data, tmp_path / "cut", p, plan=(small, PLAN)[len(ledger) % 2], notes=ledger)
        except CutError:
            continue
        break
    digests = [finished(run).digest() for run in (whole, cut, resumed)]
    assert digests[1:] == digests[:1] * 2
    if kind != "one level":
        assert len(whole.of(VectorsJob)) < len(cut.of(VectorsJob))
        assert len(whole.of(SplitJob)) < len(cut.of(SplitJob))
        assert max(job.begin for job in cut.of(SplitJob)) > 0
        assert any(job.held < data.n_labels for job in cut.of(SplitJob))
        assert len(whole.of(BeamJob)) == 3 * 2 * p.n_trees  # by the data alone
        assert len(whole.of(SolveJob)) > 2 * p.n_trees
        assert len(whole.of(UnitJob)) > 2 * p.n_trees
        assert any(job.level for job in whole.of(StreamJob))
    else:
        assert len(whole.of(StreamJob)) == 1 + 2  # of labels, of the guide, 48 at a time
    assert bool(whole.of(ChoiceJob)) == (p.C is None)
    assert whole.result["C"] == cut.result["C"] == resumed.result["C"]
    assert finished(run_tree(data, tmp_path / "seed", p, seed=1)).digest() != digests[0]


def test_threads_and_limits_of_the_estimator(tmp_path: Path) -> None:
    data, told = stored(tmp_path, *topics(n=600)), []
    for number, (limit, threads) in enumerate((("4GB", 1), ("4GB", 2), (tight(), 2))):
        clf = xs.LabelTree(max_leaf=6, root=4, branching=2, beam=3, memory_limit=limit, threads=threads)
        clf.fit(data, model=tmp_path / f"{number}")
        told.append((clf.model_.digest(), clf.report_["C"], clf.report_["C_tried"]))
    assert told[1:] == told[:1] * 2
    assert len(told[0][2]) >= 3


@pytest.mark.parametrize("max_leaf", [6, 60])
def test_a_label_of_every_training_row_is_sure(tmp_path: Path, max_leaf: int) -> None:
    X, Y = topics(labels=3)
    Y = sp.lil_matrix(Y)
    Y[:, 7] = 1.0
    run = run_tree(stored(tmp_path, X, sp.csr_matrix(Y)), tmp_path, replace(P, max_leaf=max_leaf))
    structure = run.structure()
    for level in structure.levels:
        W, bias = solved(run, level.number)
        node = structure.nodes_of_labels(level.number)[7]
        assert bias[node] == 1e6
        assert not W[:, node].any()
        assert (np.delete(bias, node) < 2.0).all()
        assert np.count_nonzero(W.any(axis=0)) >= level.n_children - 2
    labels, scores = finished(run).predict_topk(X, k=2)
    assert (labels[:, 0] == 7).all()
    assert (scores[:, 0] == 0.0).all()


def test_leaves_without_training_rows(tmp_path: Path) -> None:
    """Half of the tree has nothing to learn from; rows still find their labels."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 8, 200)
    X = sp.csr_matrix(np.eye(8, dtype=np.float32)[y])
    Y = sp.csr_matrix((np.ones(200, np.float32), (np.arange(200), 8 * y + 3)), (200, 64))
    clf = xs.LabelTree(max_leaf=2, root=2, branching=2, beam=4, C=4, memory_limit=LIMIT)
    clf.fit(stored(tmp_path, X, Y), model=tmp_path / "m")
    labels, _ = clf.predict_topk(X, k=64)
    assert labels[:, 0].tolist() == (8 * y + 3).tolist()
    assert (np.sort(labels[:, :8], axis=1) == 8 * np.arange(8) + 3).all()


# ----------------------------------------------------------------------------------------------------------------------
# kills and limits of commands

WORDS = ["--solver", "tree", "--set", "max_leaf=10", "--set", "root=4", "--set", "branching=4", "--json"]


@pytest.fixture(scope="module")
def undisturbed(small: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a model by a command."""
    path = tmp_path_factory.mktemp("undisturbed") / "m"
    run_forked("train", small, path, *WORDS, "--memory-limit", "4GB", "--threads", 2)
    return xs.load_model(path).digest()


@pytest.mark.slow
@pytest.mark.parametrize("ready", ['"split', '"beam/0/1', '"choice/'])
def test_a_killed_training_goes_on_to_the_same_model(
    ready: str, undisturbed: str, small: Path, tmp_path: Path, commands: Callable[..., Any]
) -> None:
    ledger = tmp_path / "m.partial" / "ledger.jsonl"
    with forked_command("train", small, tmp_path / "m", *WORDS, "--memory-limit", "1GB", "--threads", 1) as run:
        assert run.wait_until(lambda: ledger.exists() and ready in ledger.read_text(errors="replace"))
        run.kill()
    assert not (tmp_path / "m").exists()
    words = [word for word in WORDS if word != "--json"]
    told = commands("train", small, tmp_path / "m", *words, "--memory-limit", "400MB", "--threads", 2)
    assert told["resumed"]
    assert told["peak_rss"] <= 400e6
    assert xs.load_model(tmp_path / "m").digest() == undisturbed
    assert not (tmp_path / "m.partial").exists()


@pytest.mark.slow
@pytest.mark.parametrize("damaged", ["0-0-0", "guide-0-0", "tree-0"])
def test_what_is_damaged_is_made_again_though_what_it_was_made_from_is_gone(
    damaged: str, undisturbed: str, small: Path, tmp_path: Path, commands: Callable[..., Any]
) -> None:
    work = tmp_path / "m.partial"
    ledger = work / "ledger.jsonl"
    with forked_command("train", small, tmp_path / "m", *WORDS, "--memory-limit", "1GB", "--threads", 1) as run:
        seen = '"finalise/guide' if damaged == "guide-0-0" else '"choice/'  # the guide is written beside labels
        assert run.wait_until(lambda: ledger.exists() and seen in ledger.read_text(errors="replace"))
        run.kill()
    assert not [*(work / "state" / "vectors").iterdir(), *(work / "state" / "split").iterdir()]
    written = [path.name for path in (work / "units").iterdir()]
    assert damaged in written
    if damaged == "guide-0-0":  # as it is when these labels are solved
        for pack in (work / "state" / "solve").glob("-1_*"):
            pack.unlink()
    packs = {pack.name.rpartition("_")[0] for pack in (work / "state" / "solve").iterdir()}
    assert packs <= ({"0_4"} if damaged == "guide-0-0" else {"-1_0_0"})
    file = max(
        (path for path in (work / "units" / damaged).rglob("*") if path.is_file()), key=lambda f: f.stat().st_size
    )
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 4
    file.write_bytes(content)
    words = [word for word in WORDS if word != "--json"]
    told = commands("train", small, tmp_path / "m", *words, "--memory-limit", "400MB", "--threads", 2)
    assert told["resumed"]
    assert xs.load_model(tmp_path / "m").digest() == undisturbed
    events = [json.loads(line) for line in (tmp_path / "m" / "events.jsonl").read_text().splitlines()]
    assert any(event["event"] == "again" for event in events)


# ----------------------------------------------------------------------------------------------------------------------
# predictions


MODELS: dict[str, dict[str, Any]] = {
    "one tree": {"beam": 2}, "two trees": {"beam": 8, "n_trees": 2}, "one label": {"beam": 2}, "ties": {"beam": 2, "C": 4},
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[xs.Model, xs.Dataset, Any]:
    folder, kind = tmp_path_factory.mktemp("model"), request.param
    X, Y = with_ties() if kind == "ties" else topics(labels=1 if kind == "one label" else 2)
    data = stored(folder, X, Y)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "CHILDREN", 16)
        clf = xs.LabelTree(max_leaf=6, root=4, branching=2, memory_limit=LIMIT, **{"C": 1, **MODELS[kind]})
        clf.fit(data, model=folder / "m")
    assert (clf.model_.attributes.get("implied", {"pairs": 0})["pairs"] > 0) == (kind == "ties")
    return clf.model_, data, X


def in_store(model: xs.Model, data: xs.Dataset, out: Path, k: int, execution: Execution, **more: Any) -> Any:
    predicted(model, data, out, k, execution, overwrite=True, **more)
    return Predictions(out).rows(0, data.n_samples)


def test_predictions_in_memory_are_those_of_the_engine(
    model: tuple[xs.Model, xs.Dataset, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, data, X = model
    executions = [Execution(LIMIT, 2, cuts=Cuts(rows=13)), Execution(tight(), 1)]
    for k in (1, 7, made.n_labels):
        labels, scores = made.predict_topk(X, k)
        for execution in executions:
            for found in (ranked(made, data, k, execution), in_store(made, data, tmp_path / "p", k, execution)):
                assert np.array_equal(found[0], labels)
                assert found[1].tobytes() == scores.tobytes()
        alone = [made.predict_topk(X[i], k) for i in range(0, 300, 50)]
        assert all(np.array_equal(one, labels[i]) for i, ((one,), _) in zip(range(0, 300, 50), alone, strict=True))


def test_as_many_labels_as_one_likes_begin_alike(model: tuple[xs.Model, xs.Dataset, Any]) -> None:
    """Few labels of a row are the first of more."""
    made, _, X = model
    many, scores = made.predict_topk(X, made.n_labels)
    for k in {1, 3, min(20, made.n_labels - 1), made.n_labels - 1}:
        labels, of_labels = made.predict_topk(X, k)
        assert np.array_equal(labels, many[:, :k])
        assert of_labels.tobytes() == np.ascontiguousarray(scores[:, :k]).tobytes()


@pytest.mark.parametrize("filtered", [False, True])
def test_figures_of_a_model_are_those_of_its_predictions(
    model: tuple[xs.Model, xs.Dataset, Any], tmp_path: Path, filtered: bool
) -> None:
    """Of rows that have lost some of their labels: it matters which of them stand where."""
    made, data, X = model
    rng, Y = np.random.default_rng(0), data.Y_rows().block(0, 300)
    some = sp.csr_matrix(
        (rng.random(len(Y.indices)) < 0.6, Y.indices, Y.indptr), (300, made.n_labels), dtype=np.float32
    )
    some.eliminate_zeros()
    (tmp_path / "test").mkdir()
    test = stored(tmp_path / "test", X, some)
    options: dict[str, Any] = {}
    if filtered:
        best, _ = made.predict_topk(X, 2)
        lines = [f"{i} {best[i, i % 2]}\n" for i in range(0, 300, 2)]
        (tmp_path / "f.txt").write_text("".join(lines))
        options["filter"] = tmp_path / "f.txt"
    for limit, threads, ks in ((LIMIT, 2, (1, 3, min(20, made.n_labels - 1))), (tight(), 1, (1,))):
        how = {"memory_limit": limit, "threads": threads}
        of_model = xs.evaluate(made, test, data, ks=ks, **how, **options)
        xs.predict(made, test, tmp_path / "p", max(ks), overwrite=True, **how, **options)
        of_predictions = xs.evaluate(tmp_path / "p", test, data, ks=ks, **how, **options)
        assert {name: of_model[name] for name in of_predictions} == of_predictions
        assert "macro_F1" in of_model
