"""Ranking metrics: against the plain twin, against figures worked out by hand, and cut into blocks every way."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from helpers.rankings import arrays, measured, problems
from hypothesis import given
from hypothesis import strategies as st
from reference import metrics as twin

from xmc_stream.errors import InputError
from xmc_stream.metrics import PROPENSITY_PRESETS, RankingMetrics, inverse_propensity

# Four rows over labels 0..3 with 1/p = 1, 2, 4, 8; the hits are
#   row 0, y = {0, 2}:       ranks 1 and 3
#   row 1, y = {1}:          rank 2
#   row 2, no true labels:   none
#   row 3, y = {0, 1, 2, 3}: ranks 1 and 2, nothing predicted at rank 3
PREDICTED = [[2, 1, 0], [0, 1, -1], [3, 1, 2], [3, 0, -1]]
TRUE = [{0, 2}, {1}, set(), {0, 1, 2, 3}]
INVERSE = [1.0, 2.0, 4.0, 8.0]
LOG = 1 / math.log2(3)  # the discount of rank 2; that of rank 1 is 1, that of rank 3 is 1/2


@given(problems(), st.booleans())
def test_figures_agree_with_the_twin(problem: Any, scored: bool) -> None:
    (predicted, true), width, ks, inverse = problem
    got = measured(predicted, true, width, ks, inverse if scored else None).result()
    expected = twin.ranking_figures(predicted, true, ks, inverse if scored else None)
    assert got == pytest.approx(expected, rel=1e-12, abs=1e-11)


@given(problems(), st.data())
def test_any_cut_into_blocks_gives_the_same_bits(problem: Any, data: st.DataObject) -> None:
    (predicted, true), width, ks, inverse = problem
    n = len(predicted)
    whole = measured(predicted, true, width, ks, inverse)
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, n), max_size=3))), n]
    blocks = list(itertools.pairwise(cuts))
    streamed = RankingMetrics(ks, inverse)
    for i, j in data.draw(st.permutations(blocks)):
        streamed.update(*arrays(predicted[i:j], true[i:j], width))
    assert streamed.units == whole.units
    assert streamed.result() == whole.result()


@given(problems())
def test_the_best_ranking_scores_100(problem: Any) -> None:
    (_, true), _, _, inverse = problem
    width = len(inverse)
    best = [sorted(y, key=lambda label: -inverse[label]) + [-1] * (width - len(y)) for y in true]
    got = measured(best, true, width, range(1, width + 1), inverse).result()
    for k in range(1, width + 1):
        assert got[f"PSP@{k}"] == got[f"PSnDCG@{k}"] == (100.0 if any(true) else 0.0)
        labelled = sum(1 for y in true if y)
        assert got[f"nDCG@{k}"] == pytest.approx(100.0 * labelled / max(len(true), 1))
    assert got[f"R@{width}"] == pytest.approx(got["nDCG@1"])


def test_figures_worked_out_by_hand() -> None:
    got = measured(PREDICTED, TRUE, 3, (1, 3), INVERSE).result()
    expected = {
        "P@1": 50.0,  # (1 + 0 + 0 + 1) / 4
        "P@3": 500 / 12,  # (2 + 1 + 0 + 2) / 3 / 4
        "nDCG@1": 50.0,  # (1 + 0 + 0 + 1) / 4
        # row 0: (1 + 1/2) / (1 + LOG) = 0.91972, row 1: LOG / 1 = 0.63093, row 3: (1 + LOG) / (1 + LOG + 1/2) = 0.76536
        "nDCG@3": 57.90027949270666,
        "R@1": 18.75,  # (1/2 + 0 + 0 + 1/4) / 4
        "R@3": 62.5,  # (2/2 + 1/1 + 0 + 2/4) / 4
        "PSP@1": 1200 / 14,  # (4 + 0 + 0 + 8) / (4 + 2 + 0 + 8)
        "PSP@3": 1600 / 21,  # ((4+1) + 2 + 0 + (8+1)) / ((4+1) + 2 + 0 + (8+4+2)), both with 1/3 before
        "PSnDCG@1": 1200 / 14,  # as PSP@1: rank 1 has discount 1
        # each row by what a hit at every rank up to min(3, |y|) gives: row 0: 1 + LOG, row 1: 1, row 3: 1 + LOG + 1/2
        # hits: row 0: 4 + 1/2 (of a rank below |y|), row 1: 2 LOG (likewise), row 3: 8 + LOG
        # the best: row 0: 4 + LOG, row 1: 2, row 3: 8 + 4 LOG + 2/2
        "PSnDCG@3": 100
        * (4.5 / (1 + LOG) + 2 * LOG + (8 + LOG) / (1.5 + LOG))
        / ((4 + LOG) / (1 + LOG) + 2 + (9 + 4 * LOG) / (1.5 + LOG)),
    }
    assert got == pytest.approx(expected, rel=1e-13)
    assert list(got) == list(expected)


def test_with_one_label_a_row_a_hit_further_down_still_counts() -> None:
    # ranks of the true label: 1, 3, 2, none; 1/p = 1, 2, 4, 8
    got = measured([[0, 1, 2], [0, 2, 1], [3, 2, 0], [0, 1, 2]], [{0}, {1}, {2}, {3}], 3, (1, 2, 3), INVERSE).result()
    assert got["PSP@1"] == got["PSnDCG@1"] == 100 * 1 / 15
    assert got["PSnDCG@2"] == pytest.approx(100 * (1 + 4 * LOG) / 15)
    assert got["PSnDCG@3"] == pytest.approx(100 * (1 + 4 * LOG + 2 / 2) / 15)


def test_the_ks_keep_their_order_and_need_no_more_columns_than_the_largest() -> None:
    got = measured(PREDICTED, TRUE, 3, (2, 1), None).result()
    assert list(got) == ["P@2", "P@1", "nDCG@2", "nDCG@1", "R@2", "R@1"]
    assert got["P@2"] == 50.0  # (1 + 1 + 0 + 2) / 2 / 4
    assert got["R@2"] == 50.0  # (1/2 + 1/1 + 0 + 2/4) / 4


def test_nothing_seen_and_nothing_true_give_zero() -> None:
    empty = RankingMetrics((1, 3), INVERSE)
    assert set(empty.result().values()) == {0.0}
    empty.update(np.zeros((0, 3), dtype=np.int64), np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64))
    empty.update(np.array([[0, 1, 2]]), np.array([0, 0]), np.zeros(0, dtype=np.int64))
    assert set(empty.result().values()) == {0.0}
    assert empty.n_samples == 1


def test_ids_beyond_32_bits_do_not_overflow() -> None:
    big = 2**60
    metrics = RankingMetrics((1, 2))
    y = np.array([big, big + 1, 5])
    metrics.update(np.array([[big + 1, 5], [big, 5]]), np.array([0, 2, 3]), y)
    assert metrics.result()["P@1"] == 50.0
    assert metrics.result()["P@2"] == 50.0


def test_sums_are_exact_for_terms_of_very_different_size() -> None:
    # 65536 once and 1 + 2^-52 many times: a float64 sum would lose the last bits of every small term
    inverse = [65536.0, 1.0 + 2.0**-52]
    rows = [0] + [1] * 4096
    got = measured([[r] for r in rows], [{r} for r in rows], 1, (1,), inverse)
    assert got.units["PSP@1"] == 65536 * 2**52 + 4096 * (2**52 + 1)


def test_figures_go_to_json() -> None:
    figures = measured(PREDICTED, TRUE, 3, (1, 3), INVERSE).result()
    assert json.loads(json.dumps(figures)) == figures


def test_inverse_propensity_worked_out_by_hand() -> None:
    # a = b = 1: C = (ln N - 1) * 2, so 1/p = 1 + C, 1 + C/2, 1 + C/4 for labels carried by 0, 1 and 3 samples
    c = (math.log(20) - 1) * 2
    assert inverse_propensity([0, 1, 3], 20, a=1, b=1) == pytest.approx([1 + c, 1 + c / 2, 1 + c / 4])


@given(st.lists(st.integers(0, 500), max_size=6), st.integers(500, 10**6), st.sampled_from(sorted(PROPENSITY_PRESETS)))
def test_inverse_propensity_agrees_with_the_twin(counts: list[int], n_samples: int, preset: str) -> None:
    a, b = PROPENSITY_PRESETS[preset]
    got = inverse_propensity(np.array(counts, dtype=np.int64), n_samples, a, b)
    assert got.dtype == np.float64
    assert got == pytest.approx(twin.inverse_propensity(counts, n_samples, a, b), rel=1e-13)
    assert np.all(got >= 1)


def test_presets_are_the_ones_of_the_field_and_the_default_is_among_them() -> None:
    assert PROPENSITY_PRESETS == {"default": (0.55, 1.5), "amazon": (0.6, 2.6), "wikipedia": (0.5, 0.4)}
    assert inverse_propensity([7], 99)[0] == inverse_propensity([7], 99, *PROPENSITY_PRESETS["default"])[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1], 2), "'n_samples'.*at least 3"),
        (([1, 11], 10), r"'label_counts'.*in \[0, 10\]"),
        (([-1], 10), "'label_counts'"),
        (([math.nan], 10), "'label_counts'"),
        (([[1]], 10), "one per label"),
        ((["a"], 10), "one per label"),
        (([1], 10, -0.1, 1.5), "'a' and 'b'"),
        (([1], 10, 0.5, 0.0), "'a' and 'b'"),
        (([1], 10, math.nan, 1.5), "'a' and 'b'"),
    ],
)
def test_inverse_propensity_refuses(arguments: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        inverse_propensity(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((),), "'ks'.*distinct"),
        (((0, 1),), "'ks'.*distinct"),
        (((1, 1),), "'ks'.*distinct"),
        (((1.5,),), "'ks'.*integers"),
        (((1,), [0.5, 2.0]), "give 1/p, not p"),
        (((1,), [math.nan, 2.0]), "give 1/p, not p"),
        (((1,), [1e6, 2.0]), "give 1/p, not p"),
    ],
)
def test_metrics_refuse_parameters(arguments: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        RankingMetrics(*arguments)
    assert "\n" not in str(caught.value)


def test_update_refuses_fewer_predictions_and_blocks_too_large_to_sum_and_adds_nothing() -> None:
    metrics = measured(PREDICTED, TRUE, 3, (1, 3), INVERSE)
    before, none = metrics.result(), np.zeros(0, dtype=np.int64)
    with pytest.raises(InputError, match="has 2 columns but k=3"):
        metrics.update(np.array([[0, 1]]), np.array([0, 1]), np.array([0]))
    with pytest.raises(InputError, match="smaller blocks"):  # broadcast: 2^27 rows that take no memory
        metrics.update(np.broadcast_to(np.int64(0), (2**27, 3)), np.array([0]), none)
    assert metrics.result() == before


def test_importing_the_module_loads_numpy_only() -> None:
    script = (
        "import sys, xmc_stream.metrics; print([m for m in ('numba', 'dask', 'zarr', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
