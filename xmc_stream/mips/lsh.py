"""The hashing oracle: codes of dense class vectors, compared by Hamming distance, and the nearest scored exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import InputError
from xmc_stream.kernels.blocks import Labels
from xmc_stream.kernels.hashing import Codes, HashRoom, encode, nearest_scored
from xmc_stream.kernels.innerproducts import Best
from xmc_stream.mips.oracle import Oracle
from xmc_stream.mips.vectors import DenseVectors

CANDIDATES_OF = 64  # one class in so many is scored by default
LEAST_CANDIDATES = 128


class SimpleLSH(Oracle):
    """Codes of signs: P(w) = [w / m; sqrt(1 - ||w||^2 / m^2)], Q(x) = [x / ||x||; 0] (Neyshabur and Srebro 2015).

    A code has the signs of `bits` Gaussian projections, drawn from the seed. A query looks at the codes of all classes (16
    bytes each for 128 bits), takes the `candidates` of the least Hamming distance and scores those exactly. m is a bound on
    all norms that grows by doubling; then all codes are made anew.

    Parameters
    ----------
    vectors : DenseVectors
        The classes.
    seed, threads : int
        As of `Oracle`; rows of a query, and classes to be hashed, are shared among threads.
    bits : int, default 128
        Of a code: a multiple of 64.
    candidates : int or None, default None
        Classes that a query scores; None takes a 64th of them, 128 at least.
    hubs : int, default 64
        Classes of the largest norm, which every query scores: codes of vectors whose norms differ much tell little.

    Raises
    ------
    InputError
        `bits` is not a positive multiple of 64.
    """

    def __init__(
        self, vectors: DenseVectors, seed: int = 0, threads: int = 1, *, bits: int = 128, candidates: int | None = None,
        hubs: int = 64,
    ) -> None:  # fmt: skip
        if bits < 64 or bits % 64:
            raise InputError(f"a code has a multiple of 64 bits, not {bits}: set bits to 64 or 128")
        super().__init__(vectors.n_classes, seed, threads)
        self.vectors, self.bits, self._n_hubs = vectors, bits, hubs
        wanted = max(LEAST_CANDIDATES, vectors.n_classes // CANDIDATES_OF) if candidates is None else candidates
        self.candidates = min(wanted, vectors.n_classes)
        draws = np.random.Generator(np.random.Philox(key=seed))
        self._projections = draws.standard_normal((vectors.n_features + 1, bits), np.float32)
        self.codes, self.most = np.zeros((bits // 64, vectors.n_classes), np.uint64), 0.0
        self.refresh(np.arange(vectors.n_classes))

    @staticmethod
    def bytes_of(n_classes: int, n_features: int, threads: int = 1, bits: int = 128) -> int:
        """Bytes of the codes, projections, and what queries hold; rows and vectors apart."""
        return n_classes * (bits // 8 + 1 + 6 * threads) + 4 * bits * (n_features + 1)

    def _zero(self) -> NDArray[np.bool_]:
        return self.vectors.zero

    def _count(self, rows: NDArray[np.float32]) -> int:
        return len(rows)

    def refresh(self, classes: NDArray[Any]) -> None:
        classes = np.ascontiguousarray(classes, np.int32)
        norms = np.sqrt(self.vectors.squares[classes])
        largest = float(norms.max(initial=0.0))
        if largest > self.most:
            self.most = largest if self.most == 0.0 else self.most * 2.0 ** np.ceil(np.log2(largest / self.most))
            classes = np.arange(self.n_classes, dtype=np.int32)
            norms = np.sqrt(self.vectors.squares)
        scale = np.float32(1.0 / self.most if self.most > 0.0 else 0.0)
        rest = np.sqrt(np.maximum(1.0 - (norms * float(scale)) ** 2, 0.0)).astype(np.float32)

        def hash_some(_: int, first: int, last: int) -> None:
            self._encode(classes[first:last], self.vectors.values, scale, rest[first:last], self.codes)

        self._on_threads(hash_some, self._cuts(len(classes)))

    def _encode(
        self, lines: NDArray[np.int32], vectors: NDArray[np.float32], scale: np.float32, rest: NDArray[np.float32],
        codes: NDArray[np.uint64],
    ) -> None:  # fmt: skip
        encode(lines, vectors, scale, rest, self._projections, np.empty(self.bits, np.float32), codes)

    def _find(self, rows: NDArray[np.float32], excluded: Labels, best: Best) -> None:
        rows = np.ascontiguousarray(rows, np.float32)
        n, of = len(rows), Codes(self.vectors.values, self.codes, self._zero())
        hubs = np.argsort(-self.vectors.squares, kind="stable")[: self._n_hubs].astype(np.int32)
        hubs = hubs[~of.zero[hubs]]
        queries = np.zeros((self.bits // 64, n), np.uint64)

        def search(_: int, first: int, last: int) -> None:
            lines = np.arange(first, last, dtype=np.int32)
            # the signs are those of x / ||x||
            self._encode(lines, rows, np.float32(1.0), np.zeros(last - first, np.float32), queries)
            room = HashRoom(
                np.empty(self.n_classes, np.uint16),
                np.zeros(self.bits + 1, np.int64),
                np.empty(self.n_classes, np.int32),
            )
            nearest_scored(first, last, rows, queries, self.candidates, hubs, of, excluded, room, best)

        self._on_threads(search, self._cuts(n))
        self.scored += n * min(self.candidates + len(hubs), int(np.count_nonzero(~of.zero)))
