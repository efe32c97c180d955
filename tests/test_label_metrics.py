"""Figures that need every score: kernels and sums against the plain twin, a model's against scikit-learn, any cut."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.executed import evaluated
from helpers.problems import tight
from helpers.rankings import FULL, every_score, only, pairs_csr
from helpers.tiles import SMALL, calibrations, csr, cut, matrices, rows_of, tile_of
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import calibration as calibration_twin
from reference import label_metrics as twin
from reference import scores as score_twin
from sklearn.metrics import f1_score, hamming_loss, roc_auc_score

import xmc_stream as xs
from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.calibration import NOT_CALIBRATED
from xmc_stream.kernels.metrics import sort_rows
from xmc_stream.kernels.ranking import Ranking
from xmc_stream.linear.kernels.guide import NO_GROUPS, no_terms
from xmc_stream.linear.kernels.scores import NO_BOUNDS, Tile, TileClasses
from xmc_stream.linear.kernels.topk import TrueScores, count_above, score_positives
from xmc_stream.linear.tiles import TileSizes
from xmc_stream.linear.weights import new_unit, plain_units, unit_path
from xmc_stream.metrics import LabelMetrics, auc_units, average_auc
from xmc_stream.models import Execution
from xmc_stream.runtime.plan import Cuts
from xmc_stream.store.model import UNIT, begin_model, finish_model
from xmc_stream.store.new_dataset import new_dataset

NO_PAIRS = np.empty(0, np.int64), np.empty(0, np.int32)
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measured by /proc/self/status")


@st.composite
def problems(draw: st.DrawFn) -> Any:
    """X, W and bias of small whole numbers, so that scores tie; true and barred labels of each row, apart."""
    X, W, bias = draw(matrices(SMALL))
    labels = st.sets(st.integers(0, len(bias) - 1), max_size=8)
    true, barred = ([draw(labels) for _ in X] for _ in range(2))
    true = [y - b for y, b in zip(true, barred, strict=True)]
    return X, W, bias, true, barred, cut(draw, len(bias)), draw(st.sampled_from([-1.0, 0.0, 0.5]))


def counted(
    X: Any, W: Any, bias: Any, true: Any, barred: Any, cuts: Sequence[int], threshold: float, by: Any = NOT_CALIBRATED,
    terms: Any = None, groups: Any = NO_GROUPS,
) -> Any:  # fmt: skip
    """Scores of true labels, unsorted; counts above them; predicted rows of each label; the best three labels."""
    terms = no_terms(len(X)) if terms is None else terms
    y_indptr, y_indices = pairs_csr(true)
    positives = np.full(len(y_indices), np.nan, np.float32)

    def classes(a: int, b: int, tile: Tile) -> TileClasses:
        return TileClasses(
            a, b - a, tile, np.ascontiguousarray(by[:, a:b]), np.ascontiguousarray(groups[:, a:b]), NO_BOUNDS,
            np.empty(len(tile.bias), np.float32),
        )  # fmt: skip

    tiles = [(a, b, tile_of(W[:, a:b], bias[a:b])) for a, b in itertools.pairwise(cuts) if b > a]
    for a, b, tile in tiles:
        score_positives(CSR(*csr(X)), Labels(y_indptr, y_indices), classes(a, b, tile), terms, positives)
    ordered = positives.copy()
    sort_rows(y_indptr, ordered)
    above, predicted = np.zeros(len(X), np.int64), np.zeros(len(bias), np.int64)
    labels, scores = np.full((len(X), 3), -1, np.int64), np.full((len(X), 3), -np.inf, np.float32)
    left_out = Labels(*(pairs_csr(barred) if any(barred) else NO_PAIRS))
    for a, b, tile in tiles:
        count_above(
            CSR(*csr(X)), classes(a, b, tile), terms, Ranking(labels, scores), left_out,
            TrueScores(y_indptr, ordered), np.float32(threshold), predicted, above,
        )  # fmt: skip
    return positives, above, predicted, labels


@pytest.mark.slow
@given(problems(), st.booleans(), st.data())
@settings(deadline=None)
def test_counts_over_tiles_are_those_of_all_scores(problem: Any, calibrated: bool, data: st.DataObject) -> None:
    X, W, bias, true, barred, _, threshold = problem
    by = data.draw(calibrations(len(bias))) if calibrated else NOT_CALIBRATED
    positives, above, predicted, labels = counted(*problem, by)
    scores = calibration_twin.calibrated(score_twin.scores(rows_of(X), W, bias), by)
    for i, b in enumerate(barred):
        scores[i, list(b)] = -np.inf
    of_true = [scores[i, sorted(y)].tolist() for i, y in enumerate(true)]
    assert positives.tolist() == list(itertools.chain(*of_true))
    assert above.tolist() == [twin.count_above(scores[i].tolist(), of_true[i]) for i in range(len(X))]
    assert predicted.tolist() == (scores > threshold).sum(axis=0).tolist()
    best = [[label if score > -np.inf else -1 for label, score in score_twin.top_k(row, 3)] for row in scores]
    assert labels.tolist() == best
    units = auc_units(above, np.array(list(map(len, true)), np.int64), len(bias))
    exact = twin.average_auc(scores.tolist(), true)
    assert abs(Fraction(average_auc(units, len(X))) - exact) < Fraction(1, 2**50)


def test_auc_worked_out_by_hand() -> None:
    # scores 3 1 1 0, true {0, 2}: 0 beats both others, 2 ties with one and beats one: (2 + 1/2 + 1) / 4
    above = np.array([twin.count_above([3, 1, 1, 0], [1, 3])], np.int64)
    assert average_auc(auc_units(above, np.array([2]), 4), 1) == 3.5 / 4
    none_and_all = auc_units(np.array([0, 9]), np.array([0, 3]), 3)
    assert none_and_all == 0
    assert average_auc(0, 0) == 0.0


def test_auc_of_a_hundred_million_labels_does_not_overflow() -> None:
    k, p = 10**8, 10**5
    worst = np.array([2 * p * (k - p) + p * p])  # every other label above every true one
    assert auc_units(worst, np.array([p]), k) == 0
    assert auc_units(np.array([p * p]), np.array([p]), k) == 2**52


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=30), st.data())
def test_label_figures_are_the_same_bits_for_any_blocks(counts: Any, data: st.DataObject) -> None:
    hits, predicted, true = np.array([(h, h + p, h + t) for h, p, t in counts], np.int64).T
    whole, parts = LabelMetrics(), LabelMetrics()
    whole.update(hits, predicted, true)
    for a, b in data.draw(st.permutations(list(itertools.pairwise(cut(data.draw, len(hits)))))):
        parts.update(hits[a:b], predicted[a:b], true[a:b])
    assert whole.result(20) == parts.result(20)
    f1 = [
        Fraction(2 * int(h), int(p + t)) if p + t else Fraction(0)
        for h, p, t in zip(hits, predicted, true, strict=True)
    ]
    assert whole.result(20)["macro_F1"] == pytest.approx(float(100 * sum(f1) / len(f1)), rel=1e-12)
    assert whole.result(20)["hamming_loss"] == pytest.approx((predicted + true - 2 * hits).sum() / (20 * len(hits)))


# ---- of a model


def auc_by_sklearn(scores: NDArray[np.float32], Y: NDArray[np.bool_]) -> float:
    both = Y.any(axis=1) & ~Y.all(axis=1)
    return float(sum(roc_auc_score(y, s) for y, s in zip(Y[both], scores[both], strict=True)) / len(Y))


def by_sklearn(scores: NDArray[np.float32], Y: NDArray[np.bool_], threshold: float, auc: float) -> dict[str, float]:
    P, present = scores.astype(np.float64) > threshold, Y.any(axis=0)
    return {
        "average_auc": auc,
        "hamming_loss": hamming_loss(Y, P),
        "macro_F1": 100 * f1_score(Y, P, average="macro", zero_division=0),
        "macro_F1_present": 100 * f1_score(Y[:, present], P[:, present], average="macro", zero_division=0),
    }


def test_figures_of_a_model_are_those_of_scikit_learn(small: Path, trained: Path) -> None:
    test = xs.open_dataset(small.with_name("small-test.xmc"))
    scores, Y = every_score(xs.load_model(trained), test)
    auc = auc_by_sklearn(scores, Y)
    for threshold in (0.0, -0.6):
        got = xs.evaluate(trained, test, memory_limit="2GB", threshold=threshold)
        assert only(got) == pytest.approx(by_sklearn(scores, Y, threshold, auc), rel=1e-9)
        assert 0.5 < got["average_auc"] < 1
        assert got["macro_F1"] > 0


@pytest.mark.slow
def test_figures_of_bibtex_are_those_of_scikit_learn(real: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    train, whole = (xs.open_dataset(path) for path in real("bibtex"))
    xs.split(whole, tmp_path / "rest.xmc", tmp_path / "test.xmc", fraction=0.2)
    test = xs.open_dataset(tmp_path / "test.xmc")
    assert test.n_samples > 400
    clf = xs.PPDSparse(memory_limit="2GB").fit(train, model=tmp_path / "m")
    got = xs.evaluate(tmp_path / "m", test, memory_limit="2GB")
    scores, Y = every_score(clf.model_, test)
    assert only(got) == pytest.approx(by_sklearn(scores, Y, 0.0, auc_by_sklearn(scores, Y)), rel=1e-9)
    assert got["average_auc"] > 0.9


def test_a_threshold_between_two_float32_is_not_rounded_up(small: Path, trained: Path) -> None:
    test = xs.open_dataset(small.with_name("small-test.xmc"))
    scores, Y = every_score(xs.load_model(trained), test)
    score = float(scores[scores > -0.5].min())
    just_below = score - 1e-12 * abs(score)  # rounds to the score itself
    for threshold in (score, just_below, 1e300):
        got = xs.evaluate(trained, test, memory_limit="2GB", threshold=threshold)
        wrong = np.count_nonzero((scores.astype(np.float64) > threshold) != Y)
        assert got["hamming_loss"] == wrong / Y.size


def test_any_cut_limit_and_threads_give_the_same_figures(small: Path, trained: Path, tmp_path: Path) -> None:
    train = xs.open_dataset(small)  # 1,500 rows: as predictions, one chunk
    whole = xs.evaluate(trained, train, train, memory_limit="4GB", threads=2)
    for execution in (Execution(tight(), 1), Execution("2GB", 2, cuts=Cuts(rows=97))):
        assert evaluated(trained, train, execution, train) == whole
    xs.predict(xs.load_model(trained), train, tmp_path / "p", 5, memory_limit="2GB")
    stored = xs.evaluate(tmp_path / "p", train, train)
    assert stored == {name: value for name, value in whole.items() if name not in FULL}


def test_one_k_is_a_sequence_too(small: Path, trained: Path) -> None:
    with pytest.raises(InputError, match=r"The 'ks' of RankingMetrics must be integers\. Got 5 instead\."):
        xs.evaluate(trained, xs.open_dataset(small), ks=5)  # type: ignore[arg-type]


def test_data_of_other_labels_and_thresholds_that_are_none_are_refused(
    small: Path, trained: Path, tmp_path: Path
) -> None:
    with new_dataset(tmp_path / "d.xmc", 800, 7, {}) as writer:
        none, ends = np.empty(0, np.int32), np.zeros(2, np.int64)
        writer.append(ends, none, none.astype(np.float32), ends, none)
    with pytest.raises(InputError, match=r"7 labels and the model .* has 1100"):
        xs.evaluate(trained, xs.open_dataset(tmp_path / "d.xmc"), memory_limit="2GB")
    with pytest.raises(InputError, match="threshold"):
        xs.evaluate(trained, xs.open_dataset(small), memory_limit="2GB", threshold=float("nan"))
    with pytest.raises(InputError, match="k must be between"):
        xs.evaluate(trained, xs.open_dataset(small), ks=(1101,), memory_limit="2GB")


# ---- memory: many labels, so that scores (1 GB) and what a job may hold are far apart

N, D, K, PER_ROW = 2_500, 200, 100_000, 40


@pytest.fixture(scope="module")
def many_labels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model of 100,000 classes with a weight each, and data with 40 labels in each row."""
    folder = tmp_path_factory.mktemp("many")
    work = folder / "work"
    begin_model(work)
    tiles = []
    for unit in plain_units(K):
        first, last = unit
        features = np.arange(first, last) * 7 % D
        with new_unit(unit_path(work, unit), D, last - first) as writer:
            writer.bias[:] = -1
            writer.weights.append(np.ones(last - first, np.int64), features, np.full(last - first, 2, np.float32))
        sizes = TileSizes(first, last, D)
        sizes.add(np.ones(last - first, np.int64), features.astype(np.int32))
        tiles.append([[span.first, span.last, span.tile, span.weights] for span in sizes.ranges])
    finish_model(work, folder / "m", {"n_features": D, "n_labels": K, "nnz": K, "tiles": tiles, "solver": "none"})
    rng = np.random.default_rng(0)
    with new_dataset(folder / "d.xmc", D, K, {}) as data:
        x = rng.integers(0, D, N).astype(np.int32)
        step = K // PER_ROW
        y = (np.arange(PER_ROW) * step + rng.integers(0, step, (N, PER_ROW))).astype(np.int32)
        rows = np.arange(N + 1, dtype=np.int64)
        data.append(rows, x, np.ones(N, np.float32), PER_ROW * rows, y.ravel())
    return folder / "m", folder / "d.xmc"


CHILD = """
import json, sys
import xmc_stream as xs
from xmc_stream.system.memory import peak_resident
path, data, limit, threads = sys.argv[1:]
data = xs.open_dataset(data)
figures = xs.evaluate(path, data, data, memory_limit=limit, threads=int(threads))
print(json.dumps([figures, peak_resident()]))
"""


def child(*arguments: object) -> Any:
    command = [sys.executable, "-c", CHILD, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@on_linux
def test_evaluating_a_model_keeps_its_limit(many_labels: tuple[Path, Path], small: Path, trained: Path) -> None:
    xs.evaluate(trained, xs.open_dataset(small), memory_limit="2GB")  # compiles what the child loads
    model, data = many_labels
    figures, peak = child(model, data, "512MB", 2)
    assert peak <= 512 * 10**6
    # a label scores 1 where its feature is the row's, else -1
    dataset = xs.open_dataset(data)
    x = dataset.X_rows().block(0, N).indices
    block = dataset.Y_rows().block(0, N)
    of_label = np.arange(K) * 7 % D
    right = (of_label[block.indices].reshape(N, PER_ROW) == x[:, None]).sum(axis=1)
    n_predicted = np.bincount(of_label, minlength=D)[x]
    wrong = (n_predicted + PER_ROW - 2 * right).sum()
    assert figures["hamming_loss"] == wrong / (N * K)
    # pairs of one score count 1/2
    false = n_predicted - right
    auc = (right * (K - PER_ROW - false) + 0.5 * (right * false + (PER_ROW - right) * (K - PER_ROW - false))) / (
        PER_ROW * (K - PER_ROW)
    )
    assert figures["average_auc"] == pytest.approx(auc.mean(), rel=1e-12)


@pytest.mark.slow
@on_linux
def test_evaluating_predictions_keeps_its_limit_and_refuses_one_that_cannot_work(
    many_labels: tuple[Path, Path], tmp_path: Path, cli: Callable[..., Any]
) -> None:
    model, data = many_labels
    k = 100
    xs.predict(xs.load_model(model), xs.open_dataset(data), tmp_path / "p", k, memory_limit="2GB")
    figures, peak = child(tmp_path / "p", data, "330MB", 1)
    assert peak <= 330 * 10**6
    assert set(FULL).isdisjoint(figures)
    line = cli("evaluate", tmp_path / "p", data, "--memory-limit", "90MB", fails=True)
    assert "evaluating predictions" in line
    assert "set --memory-limit to" in line
    line = cli("evaluate", tmp_path / "p", data, "--train", data, "--memory-limit", "50MB", fails=True)
    assert "propensities" in line


def test_a_limit_too_small_for_the_counts_is_refused_before_the_start(many_labels: tuple[Path, Path]) -> None:
    model, data = many_labels
    assert UNIT < K
    with pytest.raises(MemoryLimitError, match="counts"):
        xs.evaluate(model, xs.open_dataset(data), memory_limit="2GB", threads=400)


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        ({"propensity": (0.5, 0.4, 9.0)}, "propensity"), ({"propensity": None}, "propensity"),
        ({"propensity": ("a", 1)}, "A and B"),
        ({"threshold": "a"}, "threshold"), ({"threshold": 10**400}, "threshold"), ({"threshold": float("nan")}, "threshold"),
    ],
)  # fmt: skip
def test_arguments_that_are_none_end_in_a_line(
    small: Path, trained: Path, arguments: dict[str, Any], fact: str
) -> None:
    with pytest.raises(InputError, match=fact):
        xs.evaluate(trained, small, small, **arguments)
