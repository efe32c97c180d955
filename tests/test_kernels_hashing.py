"""Codes, Hamming distances and candidates against plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from reference import mips as twin

from xmc_stream.kernels.blocks import Labels
from xmc_stream.mips.kernels.hashing import Codes, encode, nearest_scored
from xmc_stream.mips.kernels.innerproducts import Best

N = 40


def unpacked(codes: np.ndarray, bits: int) -> np.ndarray:
    """A row of booleans for each code."""
    return np.array([[bool(int(codes[b // 64, i]) >> b % 64 & 1) for b in range(bits)] for i in range(codes.shape[1])])


@pytest.mark.parametrize(("r", "bits", "n"), [(16, 64, 5), (37, 128, 1), (5, 192, N), (8, 256, 9)])
def test_candidates_are_the_nearest_codes_and_are_scored_exactly(r: int, bits: int, n: int) -> None:
    rng = np.random.default_rng(r)
    W, X = rng.standard_normal((N, r)).astype(np.float32), rng.standard_normal((7, r)).astype(np.float32)
    zero = rng.random(N) < 0.2
    W[zero] = 0.0
    W[:7:2], zero[:7:2] = -X[::2], False  # of the opposite code
    projections = rng.standard_normal((r + 1, bits)).astype(np.float32)
    last, scale = rng.random(N).astype(np.float32), np.float32(0.3)
    last[:7] = 0.0
    codes, queries = np.zeros((bits // 64, N), np.uint64), np.zeros((bits // 64, 7), np.uint64)
    room = np.empty(bits, np.float32)
    encode(np.arange(N, dtype=np.int32), W, scale, last, projections, room, codes)
    encode(np.arange(7, dtype=np.int32), X, np.float32(1.0), np.zeros(7, np.float32), projections, room, queries)
    signs, asked = unpacked(codes, bits), unpacked(queries, bits)
    assert signs.tolist() == [twin.code(w, u, 0.3, projections) for w, u in zip(W, last, strict=True)]
    assert asked.tolist() == [twin.code(x, 0.0, 1.0, projections) for x in X]
    assert all((signs[i] != asked[i]).all() for i in range(0, 7, 2))
    excluded = Labels(2 * np.arange(8), rng.integers(0, N, 14).astype(np.int32))
    hubs = np.flatnonzero(~zero)[:2].astype(np.int32)
    best = Best(np.full(7, -1, np.int32), np.full(7, -np.inf, np.float32))
    nearest_scored(0, 7, X, queries, n, hubs, Codes(W, codes, zero), excluded, best)
    for i, x in enumerate(X):
        barred = excluded.indices[2 * i : 2 * i + 2]
        looked_at = {*hubs.tolist(), *twin.nearest(signs, asked[i], zero, n + 2)} - {*barred.tolist()}
        scores = {int(c): twin.product(W[c], x) for c in sorted(looked_at)}
        wanted = max(scores, key=lambda c: scores[c])
        assert (best.classes[i], best.scores[i]) == (wanted, scores[wanted])


@pytest.mark.parametrize("bits", [64, 128, 192, 256])
@pytest.mark.parametrize("n", range(1, 10))
def test_the_farthest_codes_come_last(bits: int, n: int) -> None:
    """The farther a class, the larger its score here: the best is the farthest of the candidates."""
    distances = np.array([bits, bits - 1, 3, bits - 2, bits - 3, 0, bits, bits // 2, bits])
    zero = np.arange(9) == 6
    signs = np.arange(bits) < distances[:, None]
    codes = np.packbits(signs, axis=1, bitorder="little").view(np.uint64).T.copy()
    W = np.where(zero, 0.0, 1.0 + distances + np.arange(9) / 64).astype(np.float32)[:, None]
    best = Best(np.full(1, -1, np.int32), np.full(1, -np.inf, np.float32))
    nearest_scored(
        0, 1, np.ones((1, 1), np.float32), np.zeros((bits // 64, 1), np.uint64), n, np.empty(0, np.int32),
        Codes(W, codes, zero), Labels(np.zeros(2, np.int64), np.empty(0, np.int32)), best,
    )  # fmt: skip
    looked_at = twin.nearest(signs, np.zeros(bits, np.bool_), zero, n)
    assert best.classes[0] == max(looked_at, key=lambda c: W[c, 0])
