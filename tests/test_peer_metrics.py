"""All metrics against those of napkinXC, which the field's tables are made with (extra `peers`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.rankings import every_score, measured, problems
from hypothesis import given
from numpy.typing import NDArray

import xmc_stream as xs
from xmc_stream.metrics import PROPENSITY_PRESETS, inverse_propensity
from xmc_stream.store.predictions import Predictions

peer = pytest.importorskip("napkinxc.metrics", reason="needs napkinXC: pip install 'xmc-stream[peers]'")

KS = (1, 3, 5)


def ranking_figures(predicted: Any, true: Any, ks: Any, inverse: Any = None) -> dict[str, float]:
    """Figures in per cent by napkinXC, from label ids; predicted without padding. It gives those of 1, 2, ... at once."""
    depth = max(ks)
    got = {
        "P": peer.precision_at_k(true, predicted, k=depth),
        "nDCG": peer.ndcg_at_k(true, predicted, k=depth),
        "R": peer.recall_at_k(true, predicted, k=depth),
    }
    if inverse is not None:
        got["PSP"] = peer.psprecision_at_k(true, predicted, np.asarray(inverse), k=depth)
        got["PSnDCG"] = peer.psndcg_at_k(true, predicted, np.asarray(inverse), k=depth)
    return {f"{name}@{k}": 100 * float(values[k - 1]) for name, values in got.items() for k in ks}


@given(problems())
def test_rankings_of_any_rows(problem: Any) -> None:
    (predicted, true), width, ks, inverse = problem
    if not any(true):
        return  # it divides by nothing there, and these figures are 0
    got = measured(predicted, true, width, ks, inverse).result()
    rankings = [[label for label in row if label >= 0] for row in predicted]
    assert got == pytest.approx(ranking_figures(rankings, [sorted(y) for y in true], ks, inverse), rel=1e-11, abs=1e-11)


@pytest.mark.parametrize("preset", sorted(PROPENSITY_PRESETS))
def test_inverse_propensities(preset: str) -> None:
    a, b = PROPENSITY_PRESETS[preset]
    counts = [1, 2, 3, 50]
    rows = [[label for label, n in enumerate(counts) if i < n] for i in range(50)]
    expected = peer.Jain_et_al_inverse_propensity(rows, a, b)
    assert inverse_propensity(counts, 50, a, b) == pytest.approx(expected, rel=1e-13)


def label_rows(dataset: xs.Dataset) -> list[list[int]]:
    """The true labels of each row."""
    y = dataset.Y_rows().block(0, dataset.n_samples)
    return [part.tolist() for part in np.split(y.indices, y.indptr[1:-1])]


def figures_of_scores(scores: NDArray[np.float32], true: list[list[int]], threshold: float) -> dict[str, float]:
    """Hamming loss and macro-F1 by napkinXC, which averages up to the last label that occurs and does not normalise."""
    n_labels = scores.shape[1]
    positive = [np.flatnonzero(row > threshold).tolist() for row in scores]
    last = max(label for row in (*positive, *true) for label in row)
    f1 = 100 * peer.macro_f1_measure(true, positive) * (last + 1)
    present = len({label for row in true for label in row})
    return {
        "hamming_loss": peer.hamming_loss(true, positive) / n_labels,
        "macro_F1": f1 / n_labels,
        "macro_F1_present": f1 / present,
    }


def compare(train: xs.Dataset, test: xs.Dataset, model: Path, folder: Path, threshold: float) -> dict[str, float]:
    """Figures of a model and of its predictions are napkinXC's; those of the model are returned."""
    xs.predict(xs.load_model(model), test, folder / "p", 5, memory_limit="2GB")
    labels, _ = Predictions(folder / "p").rows(0, test.n_samples)
    true = label_rows(test)
    inverse = peer.Jain_et_al_inverse_propensity(label_rows(train))
    absent = train.n_labels - len(inverse)  # it counts up to the last label that occurs
    inverse = np.append(inverse, np.full(absent, inverse_propensity([0], train.n_samples)[0]))
    expected = ranking_figures(labels.tolist(), true, KS, inverse)
    stored = xs.evaluate(folder / "p", test, train)
    of_model = xs.evaluate(model, test, train, memory_limit="2GB", threshold=threshold)
    expected |= figures_of_scores(every_score(xs.load_model(model), test)[0], true, threshold)
    for got in (stored, of_model):
        assert {name: got[name] for name in expected if name in got} == pytest.approx(
            {name: value for name, value in expected.items() if name in got}, rel=1e-9
        )
    assert set(of_model) == {*expected, "n_samples", "average_auc"}
    return {name: of_model[name] for name in expected}


def test_a_set_of_many_labels(small: Path, trained: Path, tmp_path: Path) -> None:
    test = xs.open_dataset(small.with_name("small-test.xmc"))
    figures = compare(xs.open_dataset(small), test, trained, tmp_path, -0.6)
    assert min(figures.values()) > 0


def test_a_real_set_of_one_label_a_row(real: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    train, test = (xs.open_dataset(path) for path in real("sector_partial"))
    xs.PPDSparse(memory_limit="2GB").fit(train, model=tmp_path / "m")
    figures = compare(train, test, tmp_path / "m", tmp_path, -0.6)
    psndcg = [figures[f"PSnDCG@{k}"] for k in KS]
    # a hit further down counts, so they rise; and as much as they do without propensities
    assert psndcg[0] < psndcg[1] < psndcg[2]
    assert psndcg == pytest.approx([figures[f"nDCG@{k}"] for k in KS], abs=2)
