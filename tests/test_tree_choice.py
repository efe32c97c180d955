"""The choice of C: which values are tried, by what they are compared, and which groups of labels are looked at."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.trees import run_tree, stored, topics
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score

from xmc_stream.tree import choice
from xmc_stream.tree.choice import average_precision, climbed, picks_of
from xmc_stream.tree.parameters import TreeParameters

# uncompiled, numpy says so when a key wraps around
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|divide by zero) encountered:RuntimeWarning")


def walk(precisions: dict[float, float]) -> tuple[float, list[float]]:
    """What is chosen, and what is tried in turn."""
    steps, tried = climbed(), []
    asked = next(steps)
    while True:
        tried += asked
        try:
            asked = steps.send({c: precisions[c] for c in asked})
        except StopIteration as end:
            return end.value, tried


@pytest.mark.parametrize(
    ("precisions", "chosen", "tried"),
    [
        ({1: 50, 2: 60, 4: 70, 8: 70.2}, 4, [1, 2, 4, 8]),  # 8 gains little
        ({1: 50, 2: 60, 4: 59, 8: 90}, 2, [1, 2, 4]),
        ({1: 50.2, 2: 50, 4: 49}, 2, [1, 2, 4]),  # so does 1
        ({1: 50.2, 2: 50, 4: 51, 8: 0}, 4, [1, 2, 4, 8]),
        ({1: 51, 2: 50, 0.5: 51.2, 0.25: 90}, 1, [1, 2, 0.5]),
        ({1: 51, 2: 50, 0.5: 52, 0.25: 53, 0.125: 54}, 0.125, [1, 2, 0.5, 0.25, 0.125]),
        ({1 << power: power for power in range(6)}, 32, [1, 2, 4, 8, 16, 32]),
        ({1: 0, 2: 0, 4: 0}, 2, [1, 2, 4]),  # nothing is known
    ],
)
def test_larger_values_are_tried_or_smaller_ones_as_long_as_they_gain(
    precisions: dict[float, float], chosen: float, tried: list[float]
) -> None:
    assert walk(precisions) == (chosen, tried)


@given(st.lists(st.floats(0, 100), min_size=9, max_size=9))
def test_what_is_chosen_was_tried_and_the_next_gains_little(precisions: list[float]) -> None:
    of = {2.0**power: precision for power, precision in zip(range(-3, 6), precisions, strict=True)}
    chosen, tried = walk(of)
    assert chosen in tried
    assert len(tried) == len(set(tried))
    assert chosen == tried[-1] or of[tried[-1]] <= of[chosen] + 0.3
    assert of[chosen] >= max(of[1.0], of[2.0]) - 0.3


@given(st.lists(st.tuples(st.integers(-5, 5), st.booleans()), max_size=30), st.booleans())
def test_average_precision_is_that_of_sklearn(pairs: list[tuple[int, bool]], ties: bool) -> None:
    rng = np.random.default_rng(0)
    scores = np.array([score for score, _ in pairs], np.float32) + np.float32(0 if ties else 1) * rng.random(len(pairs))
    hits = np.array([hit for _, hit in pairs], np.bool_)
    want = 100 * average_precision_score(hits, scores) if hits.any() else 0.0
    assert average_precision(scores.astype(np.float32), hits) == pytest.approx(want, rel=1e-9)


def test_some_groups_of_labels_are_looked_at(tmp_path: Path) -> None:
    X, Y = topics(n=80)
    run = run_tree(stored(tmp_path, X, Y), tmp_path, TreeParameters(max_leaf=2, C=1.0, epochs=1))
    level, rows = run.structure().levels[-1], np.arange(1, 33)
    assert level.n_parents == 32
    for share in (0.0, 0.6):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(choice, "SHARE", share)
            drawn = [picks_of(level, rows, seed) for seed in range(3)]
        for picks in drawn:
            assert picks == sorted(set(picks))
            assert all(0 <= leaf < 32 and first == 0 for leaf, first in picks)
            if share:
                assert 0.4 * rows.sum() < rows[[leaf for leaf, _ in picks]].sum() <= share * rows.sum()
            else:
                assert len(picks) == 12
                assert max(np.diff([leaf for leaf, _ in picks])) <= 6  # evenly spaced
        assert drawn[0] != drawn[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "SHARE", 0.6)
        patch.setattr(choice, "MOST", 14)
        assert len(picks_of(level, rows, 0)) == 14
