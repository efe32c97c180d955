"""Other beams than that of the training: all labels scored against plain NumPy, commands, memory, and what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.compiler import needs_compiler
from helpers.executed import predicted
from helpers.forked import forked_command
from helpers.problems import LIMIT, tight
from helpers.rankings import pairs_csr
from helpers.tiles import rows_of
from helpers.trees import stored, topics, unpacked
from numpy.typing import NDArray
from reference import tree as twin

import xmc_stream as xs
from xmc_stream.kernels.calibration import UNSEEN
from xmc_stream.models import Execution
from xmc_stream.models.calibration import Calibration
from xmc_stream.runtime.plan import MIB, Cuts, MemoryPlan
from xmc_stream.store.model import CALIBRATION
from xmc_stream.store.predictions import Predictions
from xmc_stream.tree.guide import CLUSTERINGS, NO_GROUPS, read_groups
from xmc_stream.tree.nodes import GUIDE
from xmc_stream.tree.predict import TreeTask, TreeWeights
from xmc_stream.tree.scoring import UNREACHED

pytestmark = needs_compiler

UNSEEN_LABELS = (0, 1, 40)
TREE = {"max_leaf": 3, "root": 4, "branching": 2, "beam": 2, "C": 2}  # 16 leaves
SEEN = 48 - len(UNSEEN_LABELS)


@pytest.fixture(scope="module", params=[2, 1], ids=["several labels a row", "one label a row"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[xs.Model, xs.Dataset, Any]:
    """A model of one tree, its dataset, and the dataset's rows."""
    folder = tmp_path_factory.mktemp("model")
    X, Y = topics(labels=request.param, unseen=UNSEEN_LABELS)
    data = stored(folder, X, Y)
    made: xs.Model = xs.LabelTree(**TREE, memory_limit=LIMIT).fit(data, model=folder / "m").model_
    assert made.attributes.get("implied", {"pairs": 0})["pairs"] == 0
    return made, data, X


def level_twin(of: TreeWeights, tree: int, number: int, ptr: Any) -> twin.LevelTwin:
    """The weights of a level, from what lies on disk."""
    structures = of.structures()
    units = [of.unit(unit, structures) for unit, _ in of.tiles_of(tree, number)]
    scale, bias = (np.concatenate([getattr(panels, name) for panels in units]) for name in ("scale", "bias"))
    whole = np.zeros((of.n_features, len(scale)), np.float32)
    for panels in units:
        for features, children, values in unpacked(panels):
            whole[features, children] = np.rint(values / scale[children])
    return twin.LevelTwin(ptr.tolist(), whole, scale, bias)


def by_the_twin(model: xs.Model, X: Any) -> NDArray[np.float32]:
    """The scores of all labels (n, K), -inf for those without training rows."""
    of = TreeWeights(model.path)
    (structure,) = of.structures()
    tree = twin.TreeTwin(
        [level_twin(of, 0, level.number, level.ptr) for level in structure.levels], structure.order.tolist()
    )
    rule, weight = (of.score["short"], of.score["path"]), of.score["guide"]
    groups = read_groups(of.path, of.n_labels) if weight else NO_GROUPS
    guide = level_twin(of, GUIDE, 0, np.array([0])) if weight else None
    scores = np.full((X.shape[0], of.n_labels), -np.inf, np.float32)
    for i, row in enumerate(rows_of(X.toarray())):
        says = np.zeros(0) if guide is None else twin.hints(guide, row, weight / CLUSTERINGS)
        for label, score, _ in tree.best(row, 10**6, of.n_labels, rule, groups, says):
            scores[i, label] = score
    return scores


def in_places(labels: NDArray[Any], scores: NDArray[Any]) -> NDArray[Any]:
    """Scores by label (n, K)."""
    found = np.full_like(scores, np.nan)
    np.put_along_axis(found, labels.astype(np.int64), scores, axis=1)
    return found


def auc(scores: NDArray[Any], true: NDArray[np.bool_]) -> float:
    """The mean over rows of the pairs of a true and another label in order; ties count 1/2."""
    rows = []
    for s, y in zip(scores.astype(np.float64), true, strict=True):
        a, b = s[y][:, None], s[~y][None, :]
        rows.append(float(((a > b) + (a == b) / 2).mean()) if y.any() and not y.all() else 0.0)
    return float(np.mean(rows))


def test_without_a_beam_every_label_has_its_score(model: tuple[xs.Model, xs.Dataset, Any], tmp_path: Path) -> None:
    """Bit for bit, also where blocks are small; as by any beam that is as wide as the widest level."""
    made, data, X = model
    want = np.maximum(by_the_twin(made, X), UNSEEN)
    exact = made.with_beam(None)
    labels, scores = exact.predict_topk(X, 48)
    assert in_places(labels, scores).tobytes() == want.tobytes()
    assert labels[:, SEEN:].tolist() == [list(UNSEEN_LABELS)] * 300
    for beam in (16, 17, 1000):
        wide = made.with_beam(beam).predict_topk(X, 48)
        assert wide[0].tobytes() == labels.tobytes()
        assert wide[1].tobytes() == scores.tobytes()
    for execution in (Execution(LIMIT, 2, cuts=Cuts(rows=13)), Execution(tight(), 1)):
        predicted(exact, data, tmp_path / "p", 48, execution, overwrite=True)
        stored_labels, stored_scores = Predictions(tmp_path / "p").rows(0, 300)
        assert np.array_equal(stored_labels, labels)
        assert stored_scores.tobytes() == scores.tobytes()
    narrow = made.with_beam(15).predict_topk(X, 48)[1]
    assert ((narrow == UNREACHED).sum(axis=1) > 0).all()


def test_models_of_several_beams_live_beside_each_other(model: tuple[xs.Model, xs.Dataset, Any]) -> None:
    """Each by its own, whatever is in memory, copied or pickled."""
    made, _, X = model
    wider, exact = made.with_beam(5), made.with_beam(5).with_beam(None)
    assert (TreeWeights(made.path).beam, wider.beam, exact.beam) == (2, 5, None)  # type: ignore[attr-defined]
    assert "beam" not in repr(made)
    assert "1 tree, beam 5, " in repr(wider)
    assert "1 tree, beam none, " in repr(exact)
    for _ in range(2):
        for of, least in ((made, 30), (wider, 18), (exact, 0)):
            for one in (of, pickle.loads(pickle.dumps(of)), copy.copy(of), of.reopened()):
                scores = one.predict_topk(X, 48)[1]
                unreached = (scores == UNREACHED).sum(axis=1)
                assert repr(one) == repr(of)
                assert (unreached >= least).all()
                assert unreached.any() == (of is not exact)
    assert exact.digest() == made.digest()


def test_the_beam_of_the_training_is_any_beam(model: tuple[xs.Model, xs.Dataset, Any]) -> None:
    made, _, X = model
    for one, other in zip(made.predict_topk(X, 9), made.with_beam(np.int64(2)).predict_topk(X, 9), strict=True):  # type: ignore[arg-type]
        assert one.tobytes() == other.tobytes()


def test_an_estimator_with_another_beam(tmp_path: Path) -> None:
    """It has a score for each label, and probabilities; labels that no beam reached have one score, and are not likely."""
    X, Y = topics(n=400, unseen=UNSEEN_LABELS)
    clf = xs.LabelTree(**TREE, memory_limit=LIMIT).fit(X, Y, calibrate=0.3)
    exact = clf.with_beam(None)
    assert (clf.beam, exact.beam, type(exact)) == (2, 2, xs.LabelTree)
    scores, every = clf.decision_function(X[:50]), exact.decision_function(X[:50])
    seen = np.setdiff1d(np.arange(48), UNSEEN_LABELS)
    assert scores.shape == every.shape == (50, 48)
    unreached = scores == UNREACHED
    assert (unreached.sum(axis=1) >= 48 - 2 * 3 - 3).all()
    assert (scores[~unreached & (scores != UNSEEN)] > -1e30).all()
    assert (every[:, seen] > -1e30).all()
    assert (every[:, UNSEEN_LABELS] == scores[:, UNSEEN_LABELS]).all()
    assert (every[:, UNSEEN_LABELS] == UNSEEN).all()
    assert np.array_equal(every[~unreached], scores[~unreached])
    likely, each = clf.predict_proba(X[:50]), exact.predict_proba(X[:50])
    assert (likely[unreached] == 0.0).all()
    assert (likely[:, UNSEEN_LABELS] == 0.0).all()
    assert np.array_equal(likely[~unreached], each[~unreached])
    assert ((each[:, seen] > 0) & (each[:, seen] < 1)).all()
    del clf
    again = pickle.loads(pickle.dumps(exact))  # with the files of the model
    assert np.array_equal(again.decision_function(X[:50]), every)
    with pytest.raises(xs.InputError, match=r"The .beam. of .* must be an int from 1 to 2147483647\. Got 0 instead"):
        exact.with_beam(0)


def test_probabilities_of_classes_sum_to_one() -> None:
    X, Y = topics(labels=1, n=400)
    clf = xs.LabelTree(**TREE, memory_limit=LIMIT).fit(X, Y.indices, calibrate=0.3)
    for beam, most in ((2, 6), (None, 48)):
        of = clf.with_beam(beam)
        likely, scores = of.predict_proba(X[:50]), of.decision_function(X[:50])
        assert ((likely > 0) == (scores > UNREACHED)).all()
        assert ((likely > 0).sum(axis=1) <= most).all()
        np.testing.assert_allclose(likely.sum(axis=1), 1, rtol=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# figures


def some_true(data: xs.Dataset, X: Any, folder: Path) -> tuple[xs.Dataset, NDArray[np.bool_]]:
    """The rows with half of their labels and some others, and which these are (n, K)."""
    rng, block = np.random.default_rng(0), data.Y_rows().block(0, 300)
    true = sp.csr_matrix((np.ones(len(block.indices), np.bool_), block.indices, block.indptr), (300, 48)).toarray()
    true = (true & (rng.random(true.shape) < 0.5)) | (rng.random(true.shape) < 0.03)
    return stored(folder, X, sp.csr_matrix(true, dtype=np.float32)), true


@pytest.mark.parametrize("calibrated", [False, True])
def test_average_auc_is_that_of_all_scores(
    calibrated: bool, model: tuple[xs.Model, xs.Dataset, Any], tmp_path: Path
) -> None:
    """Also under a tight limit, and without the pairs of a filter."""
    made, data, X = model
    test, true = some_true(data, X, tmp_path)
    if calibrated:
        made = made_calibrated(made, tmp_path / "m")
    exact = made.with_beam(None)
    scores = in_places(*exact.predict_topk(X, 48))
    rng = np.random.default_rng(1)
    pairs = [set(rng.choice(48, 5, replace=False).tolist()) for _ in range(300)]
    (tmp_path / "f.txt").write_text("".join(f"{i} {label}\n" for i, of_row in enumerate(pairs) for label in of_row))
    for execution in ({"memory_limit": LIMIT, "threads": 2}, {"memory_limit": tight(), "threads": 1}):
        told = xs.evaluate(exact, test, ks=(1, 5), **execution)
        assert told["average_auc"] == pytest.approx(auc(scores, true), rel=1e-9)
        without = xs.evaluate(exact, test, ks=(1, 5), filter=tmp_path / "f.txt", **execution)
        left, of_row = scores.copy(), true.copy()
        rows = np.repeat(np.arange(300), np.diff(pairs_csr(pairs)[0]))
        left[rows, pairs_csr(pairs)[1]], of_row[rows, pairs_csr(pairs)[1]] = -np.inf, False
        assert without["average_auc"] == pytest.approx(auc(left, of_row), rel=1e-9)
        xs.predict(exact, test, tmp_path / "p", 5, overwrite=True, **execution)
        of_predictions = xs.evaluate(tmp_path / "p", test, ks=(1, 5))
        assert {name: told[name] for name in of_predictions} == of_predictions
        wide = xs.evaluate(made.with_beam(99), test, ks=(1, 5), **execution)
        assert wide == told
        assert "average_auc" not in xs.evaluate(made.with_beam(15), test, ks=(1, 5), **execution)


def made_calibrated(model: xs.Model, path: Path) -> xs.Model:
    """A copy whose scores depend on how frequent a label is."""
    from xmc_stream.models.copies import copy_model

    copy_model(model.path, path, False)
    made = xs.load_model(path)
    of = Calibration((0.5, 0.3), 0.1, (-1.0, 0.4), 0, 1.0)
    about = {"slope": of.slope, "least": of.least, "shift": of.shift, "fewest": of.fewest, "cap": of.cap}
    made.set_calibration({**about, "applied": True})
    assert made.attributes[CALIBRATION]["applied"]
    return xs.load_model(path)


def notes(*arguments: Any) -> str:
    """What a command says on stderr."""
    with forked_command(*arguments) as command:
        assert command.wait() == 0
        return str(command.stderr)


def test_several_trees_have_no_score_of_every_label(tmp_path: Path) -> None:
    data = stored(tmp_path, *topics())
    clf = xs.LabelTree(**TREE, n_trees=2, memory_limit=LIMIT).fit(data, model=tmp_path / "m")
    labels, scores = clf.with_beam(None).predict_topk(data, 48)
    assert ((scores > UNREACHED).sum(axis=1) <= 2 * 20).all()
    assert (np.sort(labels, axis=1) == np.arange(48)).all()
    assert "average_auc" not in xs.evaluate(clf.with_beam(None).model_, data)
    said = notes("evaluate", tmp_path / "m", data.path, "--beam", "none")
    assert "note: average_auc is left out: of 2 trees the 20 best labels of each are joined" in said


def test_settings_are_not_compared_by_what_is_left_out(tmp_path: Path) -> None:
    data = stored(tmp_path, *topics(n=400))
    grid = {**{name: [value] for name, value in TREE.items()}, "C": [1.0]}
    with pytest.raises(xs.InputError, match="average_auc is left out of the figures of tree, as not every label has"):
        xs.tune(data, solver="tree", grid=grid, metric="average_auc", held_out=0.3, memory_limit=LIMIT)
    grid["beam"] = [16]
    report = xs.tune(data, solver="tree", grid=grid, metric="average_auc", held_out=0.3, memory_limit=LIMIT)
    assert all(0.5 < one["figures"]["average_auc"] <= 1 for one in report["settings"])


# ----------------------------------------------------------------------------------------------------------------------
# commands, which take models of both kinds the same way

of_several = pytest.mark.parametrize("model", [2], ids=["several labels a row"], indirect=True)


@of_several
def test_commands_take_a_beam(
    model: tuple[xs.Model, xs.Dataset, Any], tmp_path: Path, commands: Callable[..., Any]
) -> None:
    made, data, X = model
    for beam, of, limit in (
        ("none", made.with_beam(None), "400MB"),
        ("5", made.with_beam(5), "4GB"),
        ("", made, "4GB"),
    ):
        words = ["--beam", beam] if beam else []
        labels, scores = of.predict_topk(X, 7)
        told = commands(
            "predict", made.path, data.path, tmp_path / "p", "-k", 7, "--overwrite", *words, "--memory-limit", limit
        )
        assert told["peak_rss"] <= told["memory_limit"]
        predictions = Predictions(tmp_path / "p")
        assert predictions.attributes["beam"] == (2 if not beam else beam if beam == "none" else int(beam))
        found = predictions.rows(0, 300)
        assert np.array_equal(found[0], labels)
        assert found[1].tobytes() == scores.tobytes()
        figures = commands("evaluate", made.path, data.path, *words)
        assert figures == xs.evaluate(of, data)
        assert ("average_auc" in figures) == (beam == "none")
    for command in (("predict", made.path, data.path, tmp_path / "q"), ("evaluate", made.path, data.path)):
        assert commands("plan", *command, "--beam", "none")["fits"]
    left_out = "note: average_auc is left out: it needs the scores of all labels, which beam none gives"
    assert left_out in notes("evaluate", made.path, data.path)
    assert "left out" not in notes("evaluate", made.path, data.path, "--beam", "none")


@of_several
def test_what_has_no_beam_refuses_one(
    model: tuple[xs.Model, xs.Dataset, Any], small: Path, trained: Path, tmp_path: Path, commands: Callable[..., Any]
) -> None:
    made, data, _ = model
    linear = f"{trained} is a linear model, which has no beam: leave out"
    with pytest.raises(xs.InputError) as caught:
        xs.load_model(trained).with_beam(None)
    assert str(caught.value) == f"{linear} beam"
    for words in (("predict", trained, small, tmp_path / "p"), ("evaluate", trained, small)):
        for before in ((), ("plan",)):
            assert commands(*before, *words, "--beam", 50, fails=True) == f"xmc-stream: {linear} --beam"
    xs.predict(made, data, tmp_path / "p", memory_limit=LIMIT)
    for before in ((), ("plan",)):
        told = commands(*before, "evaluate", tmp_path / "p", data.path, "--beam", "none", fails=True)
        assert f"{tmp_path / 'p'} is no model, and --beam says how a model predicts" in told
    for beam in ("0", "-3", "all", "2.5"):
        told = commands("predict", made.path, data.path, tmp_path / "q", f"--beam={beam}", fails=True)
        assert "Invalid value for '--beam'" in told


# ----------------------------------------------------------------------------------------------------------------------
# memory


@pytest.mark.parametrize("evaluate", [False, True])
def test_rows_that_go_down_together_are_fewer_where_beams_are_wide(
    evaluate: bool, model: tuple[xs.Model, xs.Dataset, Any]
) -> None:
    """What they take is planned for every width, one row if it must be."""
    made, data, _ = model
    for widest in (16, 10**3, 10**5, 10**6):
        task = TreeTask(made.with_beam(None), data, 5, evaluate=evaluate)  # type: ignore[arg-type]
        task.model.levels = [[4, widest, 48]]
        assert task.of_row >= 24 * widest + (4 * 48 if evaluate else 0)
        for budget, threads in ((40 * MIB, 1), (200 * MIB, 2), (2000 * MIB, 2)):
            plan = MemoryPlan(2**40, budget, threads)
            if threads * (task.of_row + task.model.shape_bytes + 7 * MIB) > budget * 4 // 5:
                continue
            sizes = task.sizes(plan)
            assert sizes.rows >= 1
            assert threads * sizes.rows * task.of_row <= budget
            assert sizes.beam == widest
            assert sizes.every == evaluate
    assert sum(made.with_beam(None).held_needs(1 << 40).values()) < 80 * MIB
