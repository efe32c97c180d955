"""The projection onto two simplices of one size against a quadratic program's answer."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import simplex as twin

from xmc_stream.pdsparse.kernels.frank_wolfe import project

VALUES = st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=8).map(lambda v: np.array(v, np.float64))


def projected(b: NDArray[np.float64], c: NDArray[np.float64], most: float) -> tuple[NDArray[np.float64], ...]:
    p, q = b.copy(), c.copy()
    t = project(p, len(p), q, len(q), most, np.empty(len(p)), np.empty(len(q)))
    assert 0 <= t <= most
    assert (p >= 0).all()
    assert (q >= 0).all()
    assert np.isclose(p.sum(), t, atol=1e-9)
    assert np.isclose(q.sum(), t, atol=1e-9)
    return p, q


@settings(deadline=None, max_examples=300)
@given(VALUES, VALUES, st.sampled_from([0.01, 0.5, 1.0, 10.0]))
def test_it_is_the_nearest_point(b: NDArray[np.float64], c: NDArray[np.float64], most: float) -> None:
    p, q = projected(b, c, most)
    expected_p, expected_q = twin.project(b, c, most)
    assert np.allclose(p, expected_p, atol=1e-9)
    assert np.allclose(q, expected_q, atol=1e-9)


@settings(deadline=None, max_examples=60)
@given(VALUES, VALUES, st.sampled_from([0.5, 1.0, 10.0]))
def test_a_general_solver_finds_nothing_nearer(b: NDArray[np.float64], c: NDArray[np.float64], most: float) -> None:
    def distance(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
        return float(((p - b) ** 2).sum() + ((q - c) ** 2).sum())

    assert distance(*projected(b, c, most)) <= distance(*twin.quadratic_program(b, c, most)) + 1e-6


@settings(deadline=None, max_examples=50)
@given(VALUES, st.floats(-3, 3), st.sampled_from([0.5, 1.0, 4.0]))
def test_with_one_positive_it_is_one_simplex(b: NDArray[np.float64], c: float, most: float) -> None:
    """Project (b, C - c) onto {u >= 0, sum u = C}: p is its first part, q what its last entry leaves of C."""
    joint = np.append(b, most - c)
    ordered = np.sort(joint)[::-1]
    above = ordered - (np.cumsum(ordered) - most) / np.arange(1, len(joint) + 1) > 0
    n = int(above.sum())
    u = np.maximum(joint - (ordered[:n].sum() - most) / n, 0)
    p, q = projected(b, np.array([c]), most)
    assert np.allclose(p, u[:-1], atol=1e-9)
    assert np.allclose(q, most - u[-1], atol=1e-9)


def test_many_entries_are_sorted_as_few_are() -> None:
    rng = np.random.default_rng(0)
    for size in (31, 32, 33, 200):
        b, c = rng.standard_normal(size), rng.standard_normal(size)
        p, q = projected(b, c, 5.0)
        expected = twin.project(b, c, 5.0)
        assert np.allclose(p, expected[0], atol=1e-9)
        assert np.allclose(q, expected[1], atol=1e-9)
