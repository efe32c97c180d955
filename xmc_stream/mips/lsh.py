"""The hashing oracle: codes of dense class vectors, compared by Hamming distance, and the nearest scored exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.arguments import whole
from xmc_stream.errors import InputError
from xmc_stream.kernels.blocks import Labels
from xmc_stream.mips.kernels.hashing import TOGETHER, Codes, encode, nearest_scored
from xmc_stream.mips.kernels.innerproducts import Best
from xmc_stream.mips.oracle import Index, Oracle, largest
from xmc_stream.mips.vectors import DenseVectors

CANDIDATES_OF = 256  # one class in so many is scored by default
LEAST_CANDIDATES = 448
MOST_BITS = 256
_ABOVE = 100  # one class in so many has a norm above m
_BAND = 1.5


class SimpleLSH(Oracle):
    """Codes of signs: P(w) = [w / m; sqrt(1 - ||w||^2 / m^2)], Q(x) = [x / ||x||; 0] (Neyshabur and Srebro 2015).

    A code has the signs of `bits` Gaussian projections, drawn from the seed. A query looks at the codes of all classes (32
    bytes each for 256 bits), takes the `candidates` of the least Hamming distance and scores those exactly.

    m is the norm that one class in 100 exceeds. A bound on all norms, as in the paper, tells little where a few are far above
    the rest: next to it all others look short, and have nearly the same code. Here a longer vector has the code of its
    direction, and the longest are scored for every row. All codes are made anew where m has changed by half.

    Parameters
    ----------
    vectors : DenseVectors
        The classes.
    seed, threads : int
        As of `Oracle`; rows of a query, and classes to be hashed, are shared among threads.
    bits : int, default 256
        Of a code: 64, 128, 192 or 256.
    candidates : int or None, default None
        Classes that a query scores, 1 at least; None takes one in 256, and 448 at least.
    hubs : int, default 64
        Classes of the largest norm, which every query scores; 0 for none.
    index : dict of arrays or None, default None
        What `index` of another one gave, of the same vectors and options; None makes all codes.

    Raises
    ------
    InputError
        `bits` is none of these, or another argument is not an integer of its range.
    """

    name = "simple-lsh"

    def __init__(
        self, vectors: DenseVectors, seed: int = 0, threads: int = 1, *, bits: int = MOST_BITS, candidates: int | None = None,
        hubs: int = 64, index: Index | None = None,
    ) -> None:  # fmt: skip
        super().__init__(vectors, seed, threads)
        self.bits = self.checked_bits(bits)
        self._n_hubs = whole("hubs", hubs, self.words(), 0)
        wanted = max(LEAST_CANDIDATES, vectors.n_classes // CANDIDATES_OF) if candidates is None else candidates
        self.candidates = min(whole("candidates", wanted, self.words()), vectors.n_classes)
        draws = np.random.Generator(np.random.Philox(key=self.seed))
        self._projections = draws.standard_normal((vectors.n_features + 1, bits), np.float32)
        self.codes, self.bound = np.zeros((bits // 64, vectors.n_classes), np.uint64), 0.0
        if index is None:
            self.refresh(np.arange(vectors.n_classes))
        else:
            self.codes[:], self.bound = index["codes"].reshape(self.codes.shape), float(index["bound"][0])

    def index(self) -> dict[str, NDArray[Any]]:
        return {"codes": self.codes, "bound": np.array([self.bound])}

    @classmethod
    def checked_bits(cls, bits: Any) -> int:
        """The bits of a code; raises InputError where they are not 64, 128, 192 or 256."""
        if whole("bits", bits, cls.words()) not in range(64, MOST_BITS + 1, 64):
            raise InputError(f"The 'bits' of {cls.words()} must be 64, 128, 192 or 256. Got {bits!r} instead.")
        return int(bits)

    @staticmethod
    def bytes_of(n_classes: int, n_features: int, threads: int = 1, bits: int = MOST_BITS) -> int:
        """Bytes of the codes, projections, and what queries hold; rows and vectors apart."""
        return n_classes * (bits // 8 + 1 + (TOGETHER + 4) * threads) + 4 * bits * (n_features + 1)

    def refresh(self, classes: NDArray[Any]) -> None:
        classes = np.ascontiguousarray(classes, np.int32)
        norms = np.sqrt(self.vectors.squares)
        lengths = norms[norms > 0.0]
        at = len(lengths) - 1 - len(lengths) // _ABOVE
        bound = float(np.partition(lengths, at)[at]) if len(lengths) else 0.0
        if not self.bound / _BAND <= bound <= self.bound * _BAND:
            self.bound, classes = bound, np.arange(self.n_classes, dtype=np.int32)
        scale = np.float32(1.0 / self.bound if self.bound > 0.0 else 0.0)
        rest = np.sqrt(np.maximum(1.0 - (norms[classes] * float(scale)) ** 2, 0.0)).astype(np.float32)

        def hash_some(first: int, last: int) -> None:
            signs = np.empty(self.bits, np.float32)
            some = classes[first:last], self.vectors.values, scale, rest[first:last]
            encode(*some, self._projections, signs, self.codes)

        self._on_threads(hash_some, self._cuts(len(classes)))

    def _find(self, rows: NDArray[np.float32], excluded: Labels, best: Best) -> None:
        rows = np.ascontiguousarray(rows, np.float32)
        n, of = len(rows), Codes(self.vectors.values, self.codes, self.vectors.zero)
        hubs = largest(self.vectors.squares, self._n_hubs)
        queries = np.zeros((self.bits // 64, n), np.uint64)

        def search(first: int, last: int) -> None:
            lines = np.arange(first, last, dtype=np.int32)
            # the signs are those of x / ||x||
            rest, signs = np.zeros(last - first, np.float32), np.empty(self.bits, np.float32)
            encode(lines, rows, np.float32(1.0), rest, self._projections, signs, queries)
            nearest_scored(first, last, rows, queries, self.candidates, hubs, of, excluded, best)

        self._on_threads(search, self._cuts(n))
        self.scored += n * min(self.candidates + len(hubs), int(np.count_nonzero(~of.zero)))
