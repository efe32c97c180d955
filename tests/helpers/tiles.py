"""Weights and rows, drawn, and as kernels take them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from xmc_stream.linear.tiles import Tile, make_tile

ANY = st.floats(-4, 4, width=32)
SMALL = st.integers(-2, 2).map(float)  # sums of products of these are exact, and equal more often than not


def csr(dense: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
    """indptr, indices, data of the entries that are not zero."""
    rows, columns = np.nonzero(dense)
    indptr = np.searchsorted(rows, np.arange(len(dense) + 1))
    return indptr.astype(np.int64), columns.astype(np.int32), dense[rows, columns].astype(np.float32)


def tile_of(W: NDArray[np.float32], bias: NDArray[np.float32], narrowed: bool = False) -> Tile:
    return make_tile(*csr(W.T), bias, len(W), narrowed)


def rows_of(X: NDArray[np.float32]) -> list[list[tuple[int, float]]]:
    return [[(j, float(x)) for j, x in enumerate(row) if x != 0] for row in X]


def cut(draw: st.DrawFn, n: int) -> list[int]:
    """0, some places between (equal ones too), n."""
    return [0, *sorted(draw(st.lists(st.integers(0, n), max_size=3))), n]


@st.composite
def matrices(draw: st.DrawFn, element: st.SearchStrategy[float]) -> tuple[Any, Any, Any]:
    """X (n, D), W (D, K) and the bias, mostly zeros."""
    n, d, k = draw(st.integers(0, 8)), draw(st.integers(0, 6)), draw(st.integers(1, 70))
    nothing = st.just(0.0)
    X = draw(arrays.arrays(np.float32, (n, d), elements=element, fill=nothing))
    W = draw(arrays.arrays(np.float32, (d, k), elements=element, fill=nothing))
    if d and draw(st.booleans()):
        W[draw(st.integers(0, d - 1))] += np.float32(1)  # a feature that most classes have
    bias = draw(arrays.arrays(np.float32, k, elements=element, fill=nothing))
    return X, W, bias + np.float32(0)  # no -0.0: no solver ends there


@st.composite
def calibrations(draw: st.DrawFn, n: int) -> NDArray[np.float32]:
    """Slopes, shifts, caps and tops of n classes; small whole numbers, so that calibrated scores tie."""
    some = (st.integers(1, 3), st.integers(-2, 2), st.sampled_from([0.0, 1.0, np.inf]), st.integers(1, 3))
    rows = [draw(st.lists(values.map(float), min_size=n, max_size=n)) for values in some]
    return np.array(rows, np.float32)


def random_matrices(n: int, d: int, k: int, seed: int, share: float, whole: bool) -> tuple[Any, Any, Any]:
    """As `matrices`, larger. share: of the numbers that are not zero; whole: whether these are whole and small."""
    rng = np.random.default_rng(seed)

    def some(*shape: int) -> NDArray[np.float32]:
        values = rng.integers(-2, 3, shape) if whole else rng.normal(size=shape)
        return (values * (rng.random(shape) < share)).astype(np.float32)

    W = some(d, k)
    W[: d // 4] = some(d // 4, k) * (rng.random(k) < 0.05)
    return some(n, d), W, some(k) + np.float32(0)
