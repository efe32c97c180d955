"""Models of few rows of W, written without a method: prediction, figures, export, digest, damage, memory, forecasts."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.damage import damage, flip
from helpers.executed import evaluated, ranked
from helpers.problems import tight
from helpers.row_sparse import by_blocks, finished, rows_and_labels, weights, written
from helpers.spoiling import note_crcs, seal_again, values_of, write_chunk

import xmc_stream as xs
from xmc_stream.errors import InputError, MemoryLimitError, StoreError
from xmc_stream.grouplasso.predict import RowsTask, plan_rows
from xmc_stream.grouplasso.rows import write_rows
from xmc_stream.models import Execution
from xmc_stream.models.decisions import Decision
from xmc_stream.models.runs import Wanted
from xmc_stream.runtime.job import Notes, run_here
from xmc_stream.runtime.plan import MIB, Cuts, MemoryPlan
from xmc_stream.store.encoding import folder_bytes
from xmc_stream.store.predictions import Predictions, begin_predictions, finish_predictions
from xmc_stream.training.plan import plan_prediction

N, D, K, SELECTED = 2500, 300, 70, 41
LIMIT = "4GB"  # bounds the whole process of the tests
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> xs.Dataset:
    X, Y = rows_and_labels(N, D, K)
    path = tmp_path_factory.mktemp("rows") / "d.xmc"
    return xs.convert(X, path, labels=Y, normalize="none", memory_limit=LIMIT)


@pytest.fixture(scope="module")
def W() -> Any:
    return weights(D, K, SELECTED)


@pytest.fixture(scope="module")
def model(data: xs.Dataset, W: Any, tmp_path_factory: pytest.TempPathFactory) -> xs.Model:
    return written(tmp_path_factory.mktemp("rows") / "m", data, W)


def dense_scores(data: xs.Dataset, W: Any) -> Any:
    """In float32, entry after entry, as scores are defined: dense X times W sums in the order of the features."""
    x = data.X_rows().block(0, data.n_samples)
    X = sp.csr_matrix((x.values, x.indices, x.indptr), shape=(data.n_samples, data.n_features)).toarray()
    scores = np.zeros((len(X), W.shape[1]), np.float32)
    for j in np.flatnonzero(W.any(axis=1)):
        scores += X[:, j : j + 1] * W[j]
    return scores


def best(scores: Any, k: int) -> Any:
    """The k best classes, ties to the lower one."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


# ---- the rows on disk


@pytest.mark.parametrize("step", [1, 7, 300])
def test_rows_are_read_as_they_were_written_without_those_of_zeros(
    step: int, data: xs.Dataset, W: Any, tmp_path: Path
) -> None:
    model: Any = finished(tmp_path / "m", data, by_blocks(W, step))
    chosen = np.flatnonzero(W.any(axis=1))
    assert (model.n_selected, model.nnz) == (SELECTED, np.count_nonzero(W))
    np.testing.assert_array_equal(model.row_features(), chosen)
    np.testing.assert_array_equal(model.rows(0, SELECTED), W[chosen])
    np.testing.assert_array_equal(model.rows(3, 30, 11, 60), W[chosen[3:30], 11:60])
    np.testing.assert_array_equal(np.concatenate([block for _, block in model.all_rows()]), W[chosen])


def test_only_rows_in_the_order_of_features_are_taken(tmp_path: Path) -> None:
    def write(features: list[int], shape: tuple[int, int]) -> None:
        blocks = [(np.array([1]), np.ones((1, K))), (np.array(features), np.ones(shape))]
        write_rows(tmp_path / "rows", D, K, blocks)

    for features, shape in (([2, 1], (2, K)), ([0], (1, K)), ([5, 5], (2, K)), ([D], (1, K)), ([7], (1, K + 1))):
        with pytest.raises(ValueError, match="after 1"):
            write(features, shape)
    assert not (tmp_path / "rows").exists()


# ---- what it predicts


def test_scores_are_those_of_dense_weights(data: xs.Dataset, model: xs.Model, W: Any) -> None:
    scores = dense_scores(data, W)
    labels, found = model.predict_topk(data, 6, memory_limit=LIMIT)
    np.testing.assert_array_equal(labels, best(scores, 6))
    np.testing.assert_array_equal(found, np.take_along_axis(scores, best(scores, 6), axis=1))


def test_every_class_is_ranked_and_a_filter_leaves_pairs_out(
    data: xs.Dataset, model: xs.Model, W: Any, tmp_path: Path
) -> None:
    scores = dense_scores(data, W)
    barred = best(scores, 1)[:, 0]
    (tmp_path / "pairs.txt").write_text("".join(f"{row} {label}\n" for row, label in enumerate(barred)))
    xs.predict(model, data, tmp_path / "p.npz", K, memory_limit=LIMIT, filter=tmp_path / "pairs.txt")
    labels = np.load(tmp_path / "p.npz")["labels"]
    scores[np.arange(N), barred] = -np.inf
    np.testing.assert_array_equal(labels[:, :-1], best(scores, K - 1))
    assert (labels[:, -1] == -1).all()


EXECUTIONS = [
    Execution(LIMIT, 2),
    Execution("2GB", 2, cuts=Cuts(rows=97)),
    Execution("2GB", 1, cuts=Cuts(classes=9)),
    Execution("2GB", 2, cuts=Cuts(classes=1, rows=333)),
]


def test_any_limit_threads_and_cuts_give_the_same_bits(data: xs.Dataset, model: xs.Model) -> None:
    whole = ranked(model, data, 5, EXECUTIONS[0])
    figures = evaluated(model.path, data, Execution(tight(), 1), data)
    for execution in EXECUTIONS:
        for one, other in zip(whole, ranked(model, data, 5, execution), strict=True):
            np.testing.assert_array_equal(one, other)
        assert evaluated(model.path, data, execution, data) == figures


def test_figures_are_those_of_the_same_weights_by_class(data: xs.Dataset, model: xs.Model, W: Any) -> None:
    got = xs.evaluate(model.path, data, memory_limit=LIMIT, threshold=0.2)
    block = data.Y_rows().block(0, N)
    Y = sp.csr_matrix((np.ones(len(block.indices)), block.indices, block.indptr), shape=(N, K)).toarray() > 0
    scores = dense_scores(data, W)
    predicted = scores.astype(np.float64) > 0.2
    assert got["hamming_loss"] == pytest.approx((predicted != Y).mean(), rel=1e-12)
    first = Y[np.arange(N), best(scores, 1)[:, 0]]
    assert got["P@1"] == pytest.approx(100 * first.mean(), rel=1e-12)
    auc = 0.0
    for s, y in zip(scores, Y, strict=True):
        above = (s[y][:, None] > s[~y]).sum() + 0.5 * (s[y][:, None] == s[~y]).sum()
        auc += above / max(y.sum() * (~y).sum(), 1)
    assert got["average_auc"] == pytest.approx(auc / N, rel=1e-9)


@pytest.mark.parametrize(("k", "selected"), [(1, 5), (3, 0), (5, D)])
def test_one_class_no_feature_and_all_features(k: int, selected: int, tmp_path: Path) -> None:
    X, Y = rows_and_labels(200, D, k)
    data = xs.convert(X, tmp_path / "d.xmc", labels=Y, normalize="none", memory_limit=LIMIT)
    W = weights(D, k, selected)
    model = written(tmp_path / "m", data, W)
    scores = dense_scores(data, W)
    labels, found = model.predict_topk(data, k, memory_limit=LIMIT)
    np.testing.assert_array_equal(labels, best(scores, k))
    np.testing.assert_array_equal(found, np.take_along_axis(scores, labels, axis=1))
    assert xs.evaluate(model.path, data, ks=(1,), memory_limit=LIMIT)["n_samples"] == 200
    np.testing.assert_array_equal(model.to_scipy().toarray(), W)
    assert damage(model.path) == []


def test_data_of_another_width_or_other_labels_are_refused(model: xs.Model, tmp_path: Path) -> None:
    X, Y = rows_and_labels(20, D + 1, K + 1)
    wide = xs.convert(X, tmp_path / "wide.xmc", labels=Y[:, :K], normalize="none", memory_limit=LIMIT)
    more = xs.convert(X[:, :D], tmp_path / "more.xmc", labels=Y, normalize="none", memory_limit=LIMIT)
    for refused in (
        lambda: model.predict_topk(wide, 1, memory_limit=LIMIT),
        lambda: xs.evaluate(model.path, more, memory_limit=LIMIT),
        lambda: plan_prediction(model, wide, 1, Execution(LIMIT)),
    ):
        with pytest.raises(InputError, match="convert the data again with like"):
            refused()


# ---- what it says of itself


def test_what_a_model_is(data: xs.Dataset, model: xs.Model, W: Any, tmp_path: Path) -> None:
    assert (
        repr(model) == f"Model({str(model.path)!r}: group-lasso, 300 x 70, 41 features selected, {model.nnz} weights)"
    )
    np.testing.assert_array_equal(model.selected_features(), np.flatnonzero(W.any(axis=1)))
    np.testing.assert_array_equal(model.to_scipy().toarray(), W)
    np.testing.assert_array_equal(model.bias(), np.zeros(K, np.float32))
    assert model.selected_names() is None
    with pytest.raises(InputError, match="no factors"):
        model.factors()
    copy = pickle.loads(pickle.dumps(xs.load_model(model.path)))
    assert copy.digest() == model.digest()
    assert written(tmp_path / "again", data, W, step=300).digest() == model.digest()
    changed = W.copy()
    changed[model.selected_features()[-1], K - 1] += 1
    assert written(tmp_path / "changed", data, changed).digest() != model.digest()
    moved = np.roll(W, 1, axis=0)
    assert written(tmp_path / "moved", data, moved).digest() != model.digest()


def test_a_model_of_its_own_folder_is_pickled_whole(data: xs.Dataset, model: xs.Model, tmp_path: Path) -> None:
    shutil.copytree(model.path, tmp_path / "folder" / "m")
    own = xs.load_model(tmp_path / "folder" / "m")
    own.own(tmp_path / "folder")
    copy = pickle.loads(pickle.dumps(own))
    assert copy.path != own.path
    assert copy.digest() == model.digest()


def test_export_writes_the_weights_that_are_not_zero(model: xs.Model, W: Any, tmp_path: Path) -> None:
    figures = xs.export(model.path, tmp_path / "w.npz", memory_limit=LIMIT)
    exported = sp.load_npz(tmp_path / "w.npz")
    assert exported.nnz == figures["nnz"] == np.count_nonzero(W)
    np.testing.assert_array_equal(exported.toarray(), W)
    assert not np.load(tmp_path / "w.npz")["bias"].any()


def test_a_calibrated_model_ranks_by_calibrated_scores(data: xs.Dataset, W: Any, tmp_path: Path) -> None:
    model = written(tmp_path / "m", data, W)
    about = {"applied": True, "slope": [1.0, 0.1], "least": 0.1, "shift": [0.3, -0.2], "fewest": 1, "cap": 0.9}
    model.set_calibration(about)
    from xmc_stream.models.calibration import Calibration, Candidates

    calibration = Calibration.of(model.path, model.attributes)
    assert calibration is not None
    scores, labels = dense_scores(data, W), np.tile(np.arange(K), (N, 1))
    counts = np.tile(data.label_counts(), (N, 1))
    calibrated = Candidates(labels, scores, counts, labels > 0).calibrated(calibration)
    found, values = ranked(model, data, 3, Execution("2GB", cuts=Cuts(classes=20)))
    np.testing.assert_allclose(values, -np.sort(-calibrated, axis=1)[:, :3], rtol=1e-6)
    np.testing.assert_allclose(np.take_along_axis(calibrated, found, axis=1), values, rtol=1e-6)


# ---- damage


def test_damage_is_found_and_named(model: xs.Model, data: xs.Dataset, tmp_path: Path) -> None:
    assert damage(model.path) == []
    for name in ("features", "weights"):
        path = tmp_path / name
        shutil.copytree(model.path, path)
        flip(path / "units/rows" / name / "c/0", 9)
        assert any(f"rows/{name}/c/0 fails its checksum" in line for line in damage(path))
        with pytest.raises(StoreError, match=f"rows/{name}/c/0 fails its checksum"):
            xs.load_model(path).predict_topk(data, 1, memory_limit=LIMIT)
        shutil.rmtree(path / "units/rows" / name)
        assert any(f"rows/{name} is missing" in line for line in damage(path))
        with pytest.raises(StoreError, match="changed or is missing"):
            xs.load_model(path).predict_topk(data, 1, memory_limit=LIMIT)


def _spoilt(model: xs.Model, path: Path, name: str, change: Callable[[Any], None]) -> Path:
    """As one who means harm would do it: with checksums and seal made anew."""
    shutil.copytree(model.path, path)
    file = path / "units/rows" / name / "c/0"
    values = values_of(file)
    change(values)
    write_chunk(file, values)
    note_crcs(file.parent.parent)
    seal_again(path)
    return path


def _set(at: Any, value: Any) -> Callable[[Any], None]:
    def change(values: Any) -> None:
        values[at] = value

    return change


@pytest.mark.parametrize(
    ("name", "at", "value", "said"),
    [
        ("features", 3, D, "ascending"), ("features", 0, -1, "ascending"), ("features", 2, 10**15, "ascending"),
        ("weights", 5, np.nan, "not finite"), ("weights", 5, np.inf, "not finite"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_are_found_before_a_kernel_gets_them(
    model: xs.Model, data: xs.Dataset, tmp_path: Path, name: str, at: int, value: float, said: str
) -> None:
    path = _spoilt(model, tmp_path / "m", name, _set(at, value))
    assert any(said in line for line in damage(path))
    with pytest.raises(StoreError, match=said):
        xs.load_model(path).predict_topk(data, 1, memory_limit=LIMIT)
    with pytest.raises(StoreError, match=said):
        xs.load_model(path).digest()


def test_a_row_of_zeros_and_another_number_of_weights_are_damage(model: xs.Model, tmp_path: Path) -> None:
    path = _spoilt(model, tmp_path / "m", "weights", _set(slice(K, 2 * K), 0))
    found = damage(path)
    assert any(f"the row of feature {model.selected_features()[1]} is all zeros" in line for line in found)
    assert any("the attribute nnz" in line for line in found)


@pytest.mark.parametrize("value", [0, SELECTED + 1, 2**40, "x", None])
def test_a_number_of_features_that_is_not_theirs_is_refused(
    model: xs.Model, data: xs.Dataset, tmp_path: Path, value: Any
) -> None:
    shutil.copytree(model.path, tmp_path / "m")
    about = json.loads((tmp_path / "m/zarr.json").read_bytes())
    about["attributes"]["n_selected"] = value
    (tmp_path / "m/zarr.json").write_text(json.dumps(about))
    seal_again(tmp_path / "m")
    assert damage(tmp_path / "m")
    with pytest.raises((StoreError, MemoryLimitError)):
        xs.load_model(tmp_path / "m").predict_topk(data, 1, memory_limit=LIMIT)


# ---- memory and forecasts


def test_plans_keep_within_the_budget_and_say_what_is_least(model: xs.Model) -> None:
    for threads in (1, 2, 8):
        least = 0
        with pytest.raises(MemoryLimitError, match=f"predicting on {threads} threads needs .*: set memory_limit to"):
            plan_rows(MemoryPlan(4 * MIB, 4 * MIB, threads), model, N, 5)  # type: ignore[arg-type]
        for budget in (8 * MIB, 16 * MIB, 64 * MIB, 1024 * MIB):
            plan = MemoryPlan(budget, budget, threads)
            try:
                sizes = plan_rows(plan, model, N, 5)  # type: ignore[arg-type]
            except MemoryLimitError:
                assert not least
                continue
            least = least or budget
            held = sizes.rows * (4 * sizes.width + 40) + sizes.row_bytes + sizes.rows_per_job * 5 * 28
            assert sizes.cache_bytes >= 4 * sizes.width * sizes.height
            assert threads * held + sizes.cache_bytes <= budget


def test_tiles_that_do_not_stay_give_the_same_bits(tmp_path: Path) -> None:
    """5 MB of weights in 2 MB: each of several row blocks reads tiles of a part of W anew."""
    n, d, k = 3000, 2000, 600
    X, Y = rows_and_labels(n, d, k, 0.01)
    data = xs.convert(X, tmp_path / "d.xmc", labels=Y, normalize="none", memory_limit=LIMIT)
    model = written(tmp_path / "m", data, weights(d, k, d), step=500)
    found = []
    for budget in (8 * MIB, 256 * MIB):
        plan, folder = MemoryPlan(2**40, budget, 1), tmp_path / str(budget)
        folder.mkdir()
        out = begin_predictions(folder / "p", n, k, 5)
        wanted = Wanted(out, decision=Decision(0.0), folder=folder)
        figures = run_here(RowsTask(model, data, 5, evaluate=True).loop(plan, wanted), Notes())
        begin_predictions(folder / "q", n, k, 5)
        done = run_here(RowsTask(model, data, 5).loop(plan, Wanted(folder / "q.partial")), Notes())
        finish_predictions(folder / "q.partial", folder / "q", {}, False)
        sizes = plan_rows(plan, model, n, 5)  # type: ignore[arg-type]
        found.append((figures, *Predictions(folder / "q").rows(0, n)))
        assert sizes.keeps_tiles == (budget == 256 * MIB)
        assert done["row_blocks"] > 2
        assert sizes.height < d / 2 or sizes.keeps_tiles
    assert found[0][0] == found[1][0]
    for one, other in zip(found[0][1:], found[1][1:], strict=True):
        np.testing.assert_array_equal(one, other)


CHILD = """
import json, sys
import xmc_stream as xs
from xmc_stream.system.memory import peak_resident
from xmc_stream.training.plan import plan_prediction
path, data, out, limit, threads = sys.argv[1:]
from xmc_stream.models import Execution
model, data = xs.load_model(path), xs.open_dataset(data)
limits = {'memory_limit': limit, 'threads': int(threads)}
foreseen = [plan_prediction(model, data, 2, Execution(**limits), evaluate=evaluate) for evaluate in (False, True)]
done = xs.predict(model, data, out, 2, **limits)
figures = xs.evaluate(path, data, ks=(1, 2), **limits)
print(json.dumps([foreseen, done, figures, peak_resident()]))
"""
WIDE = 20_000, 18_500, 5_000  # features, those that are selected, classes: 370 MB of weights
TIGHT = 360 * 10**6


def line_of(n: int) -> Any:
    """A row of W; the others are multiples of it."""
    return np.random.default_rng(0).standard_normal(n).astype(np.float32)


@pytest.fixture(scope="module")
def beyond(tmp_path_factory: pytest.TempPathFactory, model: xs.Model, data: xs.Dataset) -> list[Any]:
    """What two children foresaw, predicted and needed by one model, larger than the limit of the first."""
    xs.evaluate(model.path, data, memory_limit=LIMIT)  # compiles what the children load
    folder, (d, selected, k), n = tmp_path_factory.mktemp("wide"), WIDE, 400
    X = sp.random(n, d, 0.002, format="csr", dtype=np.float32, random_state=1)
    Y = sp.csr_matrix((np.ones(n), (np.arange(n), np.arange(n) * 11 % k)), shape=(n, k), dtype=np.float32)
    wide = xs.convert(X, folder / "d.xmc", labels=Y, normalize="none", memory_limit=LIMIT)
    every = (np.arange(first, first + 500) for first in range(0, selected, 500))
    finished(folder / "m", wide, ((some, np.outer(1 + some % 7, line_of(k)).astype(np.float32)) for some in every))
    assert folder_bytes(folder / "m") > TIGHT
    runs = []
    for limit, threads in ((TIGHT, 2), (1500 * 10**6, 1)):
        out = folder / f"{limit}.npz"
        command = [sys.executable, "-c", CHILD, *map(str, (folder / "m", wide.path, out, limit, threads))]
        child = subprocess.run(command, capture_output=True, text=True, check=False)
        assert child.returncode == 0, child.stderr
        with np.load(out) as found:
            runs.append((*json.loads(child.stdout), found["labels"], found["scores"]))
    shutil.rmtree(folder)
    return runs


@pytest.mark.slow
@on_linux
def test_weights_beyond_the_limit_are_predicted_by_within_it(beyond: list[Any]) -> None:
    (_, _, figures, peak, labels, scores), (_, _, others, _, *same) = beyond
    assert peak <= TIGHT
    assert figures == others
    np.testing.assert_array_equal([labels, scores], same)
    positive = scores[:, 0] > 0  # all but rows without selected features
    assert positive.sum() > 390
    seen = np.arange(400) * 11 % WIDE[-1]  # labels without training rows come last
    assert (labels[positive, 0] == seen[line_of(WIDE[-1])[seen].argmax()]).all()


@pytest.mark.slow
@on_linux
@pytest.mark.parametrize("number", [0, 1])
def test_what_is_foreseen_of_prediction_and_evaluation_comes_true(beyond: list[Any], number: int) -> None:
    (predict, evaluate), done, _, peak, *_ = beyond[number]
    assert predict["fits"]
    assert evaluate["fits"]
    for name in ("bytes_read", "row_blocks"):
        assert predict[name] == done[name]
    assert done["peak_rss"] <= predict["peak_rss"] <= 1.4 * done["peak_rss"]
    assert evaluate["tiles_made"] == (2 * evaluate["row_blocks"] if number == 0 else 1)
    assert peak <= max(evaluate["peak_rss"], done["peak_rss"]) * 1.05
    assert evaluate["peak_rss"] <= 1.4 * peak
