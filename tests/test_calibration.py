"""Calibration: what is learned, where it is applied, that it stays with the model, and how it is undone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.executed import evaluated, ranked
from numpy.typing import NDArray
from reference import calibration as twin
from scipy.optimize import minimize

import xmc_stream as xs
from xmc_stream.errors import InputError, StoreError
from xmc_stream.evaluation import calibrate as calibrating
from xmc_stream.evaluation.calibrate import calibrate_with
from xmc_stream.kernels.calibration import calibrate_rows
from xmc_stream.models import Execution
from xmc_stream.models.calibration import Calibration, Candidates, calibrate, fit
from xmc_stream.runtime.plan import Cuts

LIMIT: dict[str, Any] = {"memory_limit": "2GB", "threads": 2}


def made_up(n: int, seed: int, slope: float = 1.0, shift: float = 0.5) -> Candidates:
    """Candidates of n rows, whose truth is drawn by the logit (4 - slope L / 4) s + 1 - shift L / 4, L = ln(n_l + 1)."""
    rng = np.random.default_rng(seed)
    frequencies = np.maximum(1, (10_000 / np.arange(1, 301) ** 1.3).astype(np.int64))
    labels = rng.permuted(np.tile(np.arange(300), (n, 1)), axis=1)[:, :20]
    scores = -np.sort(-rng.normal(-0.5, 0.6, (n, 20)), axis=1).astype(np.float32)
    logs = np.log(frequencies[labels] + 1)
    z = (4 - slope * logs / 4) * scores + 1 - shift * logs / 4
    return Candidates(labels, scores, frequencies[labels], rng.random((n, 20)) < 1 / (1 + np.exp(-z)))


def test_kernel_and_reference_agree_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(0, 3, (40, 60)).astype(np.float32)
    scores[0, :3] = -np.inf
    for cap in (0.5, np.inf):
        by = np.stack([rng.uniform(0.1, 5, 60), rng.normal(size=60), np.full(60, cap), cap + rng.uniform(0, 9, 60)])
        by = by.astype(np.float32)
        expected = twin.calibrated(scores, by)
        calibrate_rows(found := scores.copy(), by)
        assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))
    calibrate_rows(found := scores.copy(), np.empty((4, 0), np.float32))
    assert np.array_equal(found, scores)


@pytest.mark.parametrize(("rise", "least"), [(-0.1, 0.3), (-0.9, 1.0)])  # slopes that would fall below 0 are held up
def test_scores_of_a_label_keep_their_order(rise: float, least: float) -> None:
    about = {"slope": (3.0, rise), "least": least, "shift": (1.0, -0.1), "fewest": 3, "cap": 1.0}
    counts = np.array([0, 1, 3, 4, 30, 1000, 10**6])
    raw = np.linspace(-3, 3, 601, dtype=np.float32)
    scores = np.tile(raw[:, None], len(counts))
    calibration = Calibration(**about)  # type: ignore[arg-type]
    calibrate_rows(scores, calibration.by(counts))
    shape = (len(raw), len(counts))
    raws, everywhere = np.repeat(raw[:, None], len(counts), axis=1), np.tile(counts, (len(raw), 1))
    candidates = Candidates(np.zeros(shape, np.int64), raws, everywhere, np.zeros(shape, np.bool_))
    assert np.array_equal(candidates.calibrated(calibration).view(np.uint32), scores.view(np.uint32))
    seen = counts > 0
    assert (np.diff(scores[:, seen], axis=0) > 0).all()
    assert scores[:, ~seen].max() < scores[:, seen].min()  # without training rows: after all others
    of_raw = [[twin.score({"applied": True, **about}, int(n), float(s)) for n in counts] for s in raw]
    assert np.abs(scores[:, seen] - np.array(of_raw)[:, seen]).max() < 1e-5
    sure = scores[:, seen] > 1.0
    assert sure[-1].all()
    assert (np.diff(scores[-1][seen]) > 0).all()  # of sure labels the more frequent comes first


def test_the_logit_is_the_optimum_of_the_likelihood() -> None:
    candidates = made_up(4000, 0)
    found = fit(candidates)
    s, n = (a[:, :10].ravel().astype(float) for a in (candidates.scores, candidates.counts))
    y, L = candidates.true[:, :10].ravel(), np.log(n + 1)
    features = np.stack([s, s * L, np.ones_like(s), L])

    def loss(t: NDArray[np.float64]) -> float:
        return float((np.logaddexp(0, t @ features) - y * (t @ features)).sum())

    exact = minimize(loss, np.array([4.0, 0, 0, 0]), method="BFGS").x
    mine = np.array([*found.slope, *found.shift])
    assert np.abs(mine - exact).max() < 0.02  # the ridge moves it a little
    assert np.abs(mine - [4, -0.25, 1, -0.125]).max() < 0.35


def test_it_is_applied_where_it_helps_and_left_out_where_there_is_nothing_to_gain() -> None:
    uneven = calibrate(made_up(3000, 1, shift=4.0))
    assert uneven["applied"]
    assert uneven["gain"] > 2 * uneven["standard_error"] > 0
    assert all(after > before for before, after in (uneven[f"P@{k}"] for k in (1, 3, 5)))
    applied = [calibrate(made_up(400, seed, slope=0.0, shift=0.0))["applied"] for seed in range(20)]
    assert sum(applied) <= 1


def test_candidates_that_are_missing_and_labels_without_rows_do_no_harm() -> None:
    candidates = made_up(500, 3)
    labels, scores, counts, true = (a.copy() for a in vars(candidates).values())
    labels[:, 15:], scores[:, 15:], true[:, 15:] = -1, -np.inf, False
    counts[:, 3] = 0
    about = calibrate(Candidates(labels, scores, counts, true))
    assert np.isfinite([*about["slope"], *about["shift"], about["gain"]]).all()
    alike = calibrate(Candidates(labels, np.zeros_like(scores), np.ones_like(counts), true))  # scores say nothing
    assert not alike["applied"]


# ---- with models


@pytest.fixture(scope="module")
def parts(small: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Rows to train on, rows held out, and a model of the first."""
    folder = tmp_path_factory.mktemp("parts")
    xs.split(small, folder / "part.xmc", folder / "held.xmc", fraction=0.3)
    xs.PPDSparse(memory_limit="2GB").fit(folder / "part.xmc", model=folder / "m")
    return folder / "part.xmc", folder / "held.xmc", folder / "m"


@pytest.fixture
def model(parts: tuple[Path, Path, Path], tmp_path: Path) -> Path:
    """A copy of the model, calibrated by hand: whether it helps is not asked."""
    shutil.copytree(parts[2], tmp_path / "m")
    calibrated_by_hand(tmp_path / "m")
    return tmp_path / "m"


ABOUT = {"applied": True, "slope": [3.0, 0.4], "least": 0.3, "shift": [1.0, -0.6], "fewest": 2, "cap": 0.25}


def calibrated_by_hand(path: Path) -> None:
    xs.load_model(path).set_calibration(ABOUT)


def raw_scores(path: Path, data: Path) -> NDArray[np.float32]:
    """Scores of all labels, of a model that is not calibrated."""
    labels, scores = xs.load_model(path).predict_topk(xs.open_dataset(data), 1100, **LIMIT)
    out = np.full_like(scores, -np.inf)  # of labels that are never predicted
    rows, ranks = np.nonzero(labels >= 0)
    out[rows, labels[rows, ranks]] = scores[rows, ranks]
    return out


def expected_of(path: Path, data: Path, about: dict[str, Any], raw: NDArray[np.float32]) -> NDArray[np.float64]:
    """Calibrated scores by the formula, in float64."""
    counts = xs.open_dataset(data).label_counts()
    columns = [[twin.score(about, int(n), float(s)) for s in raw[:, c]] for c, n in enumerate(counts)]
    return np.array(columns).T


@pytest.mark.slow
def test_predictions_and_figures_are_those_of_calibrated_scores(
    parts: tuple[Path, Path, Path], model: Path, tmp_path: Path
) -> None:
    part, held, plain = parts
    test = xs.open_dataset(held)
    expected = expected_of(plain, part, ABOUT, raw_scores(plain, held))
    labels, scores = xs.load_model(model).predict_topk(test, 7, **LIMIT)
    assert np.abs(np.take_along_axis(expected, labels, 1) - scores).max() < 1e-4
    assert np.abs(-np.sort(-expected, axis=1)[:, :7] - scores).max() < 1e-4
    # figures of the model are those of its predictions, and need every score
    pred = tmp_path / "pred"
    xs.predict(xs.load_model(model), test, pred, **LIMIT)
    of_model, of_predictions = xs.evaluate(model, test, **LIMIT), xs.evaluate(pred, test)
    assert {name: of_model[name] for name in of_predictions} == of_predictions
    y = test.Y_rows().block(0, test.n_samples)
    Y = sp.csr_matrix((np.ones(len(y.indices)), y.indices, y.indptr), expected.shape).toarray() > 0
    assert abs(of_model["hamming_loss"] - ((expected > 0) != Y).mean()) < 1e-6  # even odds are the threshold
    plain_figures = xs.evaluate(plain, test, **LIMIT)
    assert of_model["average_auc"] != plain_figures["average_auc"]


def test_calibrated_predictions_do_not_depend_on_cuts(parts: tuple[Path, Path, Path], model: Path) -> None:
    test = xs.open_dataset(parts[1])
    whole = xs.load_model(model).predict_topk(test, 5, memory_limit="4GB", threads=1)
    cut = ranked(xs.load_model(model), test, 5, Execution("3GB", 2, cuts=Cuts(rows=7)))
    assert np.array_equal(whole[0], cut[0])
    assert np.array_equal(whole[1].view(np.uint32), cut[1].view(np.uint32))
    assert xs.evaluate(model, test, memory_limit="4GB", threads=1) == evaluated(
        model, test, Execution("3GB", 2, cuts=Cuts(rows=7))
    )


def test_it_is_part_of_the_model_sealed_shown_and_undone(
    parts: tuple[Path, Path, Path], model: Path, commands: Callable[..., Any]
) -> None:
    plain = xs.load_model(parts[2])
    assert xs.verify(model, **LIMIT)["sound"]
    assert commands("info", model)["calibration"] == ABOUT
    assert xs.load_model(model).digest() != plain.digest()
    again = {**ABOUT, "gain": 1.0}  # figures are no part of what the model is
    digest = xs.load_model(model).digest()
    xs.load_model(model).set_calibration(again)
    assert xs.load_model(model).digest() == digest
    commands("calibrate", model, "--remove")
    assert xs.verify(model, **LIMIT)["sound"]
    assert xs.load_model(model).digest() == plain.digest()
    labels, scores = (a.tolist() for a in xs.load_model(model).predict_topk(xs.open_dataset(parts[1]), 5, **LIMIT))
    assert (labels, scores) == tuple(a.tolist() for a in plain.predict_topk(xs.open_dataset(parts[1]), 5, **LIMIT))


def test_damage_to_the_calibration_is_found(parts: tuple[Path, Path, Path], model: Path) -> None:
    chunk = model / "label_counts" / "c" / "0"
    whole = chunk.read_bytes()
    chunk.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert "label_counts" in xs.verify(model, **LIMIT)["damage"][0]
    with pytest.raises(StoreError, match="label_counts"):
        xs.load_model(model).predict_topk(xs.open_dataset(parts[1]), 5, **LIMIT)
    chunk.write_bytes(whole)
    file = model / "zarr.json"
    about = json.loads(file.read_bytes())
    for wrong in ({"slope": [1.0]}, {"least": 0.0}, {"shift": [float("nan"), 0.0]}, {"cap": "high"}, {"fewest": None}):
        changed = {**about, "attributes": {**about["attributes"], "calibration": {**ABOUT, **wrong}}}
        file.write_text(json.dumps(changed))
        assert any("not understood" in line for line in xs.verify(model, **LIMIT)["damage"])
        with pytest.raises(StoreError, match=r"calibration is not understood|was changed"):
            xs.load_model(model).predict_topk(xs.open_dataset(parts[1]), 5, **LIMIT)
    file.write_text(json.dumps({**about, "attributes": {**about["attributes"], "calibration": {**ABOUT, "cap": 0.5}}}))
    assert "zarr.json" in xs.verify(model, **LIMIT)["damage"][0]


def test_a_kill_while_it_is_kept_leaves_the_model_as_it_was(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = xs.load_model(model).digest()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            xs.load_model(model).set_calibration({**ABOUT, "cap": None})
    assert xs.load_model(model).digest() == before
    xs.load_model(model).set_calibration({**ABOUT, "cap": None})
    assert xs.load_model(model).digest() != before


def test_export_tells_how_scores_come_about(parts: tuple[Path, Path, Path], model: Path, tmp_path: Path) -> None:
    xs.export(model, tmp_path / "w.npz")
    with np.load(tmp_path / "w.npz") as file:
        by = np.stack([file[name] for name in ("slope", "shift", "cap", "top")])
        bias = file["bias"]
    W, x = sp.load_npz(tmp_path / "w.npz"), xs.open_dataset(parts[1]).X_rows().block(0, 20)
    raw = sp.csr_matrix((x.values, x.indices, x.indptr), (20, W.shape[0])) @ W.toarray() + bias
    labels, scores = xs.load_model(model).predict_topk(xs.open_dataset(parts[1]), 3, **LIMIT)
    by_hand = twin.calibrated(raw.astype(np.float32), by)
    assert np.abs(np.take_along_axis(by_hand, labels[:20], 1) - scores[:20]).max() < 1e-4
    xs.export(parts[2], tmp_path / "plain.npz")
    with np.load(tmp_path / "plain.npz") as file:
        assert "slope" not in file


@pytest.mark.slow
def test_calibrating_twice_says_the_same_for_any_limit(
    parts: tuple[Path, Path, Path], tmp_path: Path, commands: Callable[..., Any]
) -> None:
    _, held, plain = parts
    path = tmp_path / "m"
    shutil.copytree(plain, path)
    first = xs.calibrate(path, held, memory_limit="4GB", threads=1)
    calibrated_by_hand(path)  # what is learned does not depend on a calibration that stands
    opened = xs.load_model(path)
    assert calibrate_with(opened, xs.open_dataset(held), opened, Execution("3GB", 2, cuts=Cuts(rows=11))) == first
    assert xs.load_model(path).attributes["calibration"] == json.loads(json.dumps(first))
    told = commands("calibrate", path, held, "--scores-of", plain, "--memory-limit", "512MB")
    assert told == {"model": str(path), **json.loads(json.dumps(first))}
    xs.uncalibrate(path)
    assert "calibration" not in xs.load_model(path).attributes


def test_rows_that_cannot_tell_are_refused(parts: tuple[Path, Path, Path], tmp_path: Path, small: Path) -> None:
    part, held, path = parts
    with pytest.raises(InputError, match="was trained on the rows of"):
        xs.calibrate(path, part)
    few = tmp_path / "few.txt"
    few.write_text("\n".join(map(str, range(20))))
    xs.split(held, tmp_path / "rest.xmc", tmp_path / "few.xmc", rows=few)
    with pytest.raises(InputError, match="has 20 rows"):
        xs.calibrate(path, tmp_path / "few.xmc")
    other = xs.PPDSparse(C=2.0, memory_limit="2GB").fit(part, model=tmp_path / "other")
    with pytest.raises(InputError, match="parameters"):
        xs.calibrate(path, held, scores_of=other.model_)
    shutil.copytree(path, tmp_path / "old")
    shutil.rmtree(tmp_path / "old" / "label_counts")
    with pytest.raises(StoreError, match="no label_counts"):
        xs.calibrate(tmp_path / "old", held)
    with pytest.raises(InputError, match="do not go together"):
        xs.PPDSparse().fit(small, model=tmp_path / "m", warm_start=path, calibrate=0.1)
    with pytest.raises(InputError, match="observed"):
        xs.LEML(observed="given").fit(small, model=tmp_path / "m", calibrate=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["PDSparse", "LEML"])
def test_models_of_other_kinds(kind: str, parts: tuple[Path, Path, Path], tmp_path: Path) -> None:
    part, held, _ = parts
    options: dict[str, Any] = {"LEML": {"rank": 8, "alternations": 2}, "PDSparse": {"max_passes": 2}}[kind]
    getattr(xs, kind)(memory_limit="2GB", **options).fit(part, model=tmp_path / "m")
    raw = raw_scores(tmp_path / "m", held)
    about = xs.calibrate(tmp_path / "m", held, **LIMIT)
    assert about["rows"] == xs.open_dataset(held).n_samples
    calibrated_by_hand(tmp_path / "m")
    expected = expected_of(tmp_path / "m", part, ABOUT, raw)
    labels, scores = xs.load_model(tmp_path / "m").predict_topk(xs.open_dataset(held), 5, **LIMIT)
    assert np.abs(-np.sort(-expected, axis=1)[:, :5] - scores).max() < 1e-3
    assert np.abs(np.take_along_axis(expected, labels, 1) - scores).max() < 1e-3
    figures = xs.evaluate(tmp_path / "m", xs.open_dataset(held), **LIMIT)
    Y = xs.open_dataset(held).Y_rows().block(0, len(expected))
    truth = sp.csr_matrix((np.ones(len(Y.indices)), Y.indices, Y.indptr), expected.shape).toarray() > 0
    assert abs(figures["hamming_loss"] - ((expected > 0) != truth).mean()) < 1e-5


# ---- with training


@pytest.mark.slow
def test_training_calibrates_by_rows_held_out_and_goes_on_after_a_stop(
    small: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: Callable[..., Any]
) -> None:
    whole = xs.PPDSparse(memory_limit="2GB", seed=3).fit(small, model=tmp_path / "a", calibrate=0.2)
    about = whole.report_["calibration"]
    assert whole.model_.attributes["calibration"] == json.loads(json.dumps(about))
    assert about["rows"] >= 100
    assert {path.name for path in tmp_path.iterdir()} == {"a"}
    # a stop before the last step: the same call does what is left, and ends with the same model
    with monkeypatch.context() as patched:
        patched.setattr(calibrating, "calibrate_with", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            xs.PPDSparse(memory_limit="2GB", seed=3).fit(small, model=tmp_path / "b", calibrate=0.2)
    assert (tmp_path / "b.calibration" / "model" / "zarr.json").exists()
    again = xs.PPDSparse(memory_limit="3GB", threads=1, seed=3).fit(small, model=tmp_path / "b", calibrate=0.2)
    assert again.report_["calibration"] == about
    assert again.model_.digest() == whole.model_.digest()
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}
    # done: nothing is done again
    done = xs.PPDSparse(memory_limit="2GB", seed=3).fit(small, model=tmp_path / "b", calibrate=0.2)
    assert done.report_["calibration"] == again.model_.attributes["calibration"]
    figures = commands("train", small, tmp_path / "c", "--calibrate", "0.2", "--seed", "3", "--memory-limit", "2GB")
    assert figures["calibration"] == json.loads(json.dumps(about))
    assert xs.load_model(tmp_path / "c").digest() == whole.model_.digest()
    told = commands("calibrate", trained, fails=True)
    assert "give either the held-out rows" in told


def test_too_few_rows_are_refused_before_training(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    X = sp.random(60, 10, 0.5, format="csr", dtype=np.float32, random_state=0)
    Y = sp.csr_matrix((np.ones(60), (np.arange(60), rng.integers(0, 3, 60))))
    with pytest.raises(InputError, match="100 or more"):
        xs.PPDSparse(memory_limit="2GB").fit(X, Y, model=tmp_path / "m", calibrate=0.2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
@pytest.mark.slow
def test_rare_and_frequent_labels_of_real_data(real: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    train, test = real("yeast_seq_GO")
    fitted = xs.PPDSparse(memory_limit="2GB", max_rounds=1).fit(train, model=tmp_path / "m", calibrate=0.1)
    about = fitted.report_["calibration"]
    assert about["applied"]
    after = xs.evaluate(tmp_path / "m", xs.open_dataset(test))
    xs.uncalibrate(tmp_path / "m")
    before = xs.evaluate(tmp_path / "m", xs.open_dataset(test))
    assert after["P@1"] == before["P@1"] == 100  # by the labels that every row has
    assert after["P@5"] - before["P@5"] > 5
