"""What an oracle of maximum inner products is: it is told which vectors changed, and finds the best class for rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from xmc_stream.arguments import seed_of, whole
from xmc_stream.kernels.blocks import Labels
from xmc_stream.kernels.domains import ZERO_CLASSES
from xmc_stream.mips.kernels.innerproducts import Best, draw_zero_classes

T = TypeVar("T")
Index = Mapping[str, NDArray[Any]]


class Oracle(ABC):
    """Finds the class of the largest inner product with each row, beside those that the row excludes.

    A class whose vector is zero scores 0 and is a legal answer: where every score found is 0 or less, one of the zero
    classes is drawn, keyed by seed, step and row. Answers depend on the vectors, the refreshes so far, and the seed; never on
    the number of threads. Of equal scores the lower class is taken.

    Parameters
    ----------
    vectors : ClassVectors or DenseVectors
        The K classes.
    seed : int, default 0
        Of the draws; 0 ... 2^63 - 1.
    threads : int, default 1
        That a query or refresh may use.

    Raises
    ------
    InputError
        An argument or option is not usable.
    """

    name: ClassVar[str]  # as users write it

    def __init__(self, vectors: Any, seed: int = 0, threads: int = 1) -> None:
        self.vectors, self.n_classes = vectors, vectors.n_classes
        self.threads, self.seed = whole("threads", threads, self.words()), seed_of(seed, self.words())
        self.barred = np.zeros(self.n_classes, np.bool_)  # zero classes that are no answers
        self.scored = 0  # pairs of row and class that queries scored

    @classmethod
    def words(cls) -> str:
        """What messages call it."""
        return f"the {cls.name} oracle"

    @abstractmethod
    def refresh(self, classes: NDArray[Any]) -> None:
        """Take note that the vectors of these classes changed: came, moved, or became zero. Each class once."""

    def index(self) -> dict[str, NDArray[Any]]:
        """What it keeps beside the vectors, by name: another one of the same vectors and options goes on from it."""
        return {}

    @abstractmethod
    def _find(self, rows: Any, excluded: Labels, best: Best) -> None:
        """Fill `best` with the best class found for each row among those whose vector is not zero."""

    def query(self, rows: Any, excluded: Labels, step: int = 0) -> Best:
        """The best class for each row.

        Parameters
        ----------
        rows : RankedRows, or float32 array (n, r) for dense oracles
            The rows.
        excluded : Labels
            Classes that are no answers: of row i indices[indptr[i] : indptr[i + 1]], int32, in any order.
        step : int, default 0
            Keys the draws among zero classes.

        Returns
        -------
        Best
            Classes (n,), -1 where there is none, and scores (n,), -inf there.
        """
        n = count_of(rows)
        excluded = Labels(
            np.ascontiguousarray(excluded.indptr, np.int64), np.ascontiguousarray(excluded.indices, np.int32)
        )
        best = no_best(n)
        if n:
            self._find(rows, excluded, best)
            zero = np.flatnonzero(self.vectors.zero & ~self.barred).astype(np.int32)
            draw_zero_classes(zero, excluded, self.seed, ZERO_CLASSES, step, best)
        return best

    def _on_threads(self, work: Callable[[int, int], T], bounds: NDArray[Any]) -> list[T]:
        """work(first, last) for each range that the bounds cut, beside each other."""
        ranges = [(first, last) for first, last in pairwise(bounds.tolist()) if last > first]
        if len(ranges) <= 1:
            return [work(*each) for each in ranges]
        with ThreadPoolExecutor(len(ranges)) as pool:
            return list(pool.map(work, *zip(*ranges, strict=True)))

    def _cuts(self, n: int) -> NDArray[np.int64]:
        """Bounds of a range of n for each thread."""
        return np.linspace(0, n, self.threads + 1).astype(np.int64)


def count_of(rows: Any) -> int:
    """How many rows these are: sparse ones of a kernel, or an array."""
    return len(rows) if isinstance(rows, np.ndarray) else len(rows.indptr) - 1


def no_best(n: int) -> Best:
    """Of n rows that nothing was found for."""
    return Best(np.full(n, -1, np.int32), np.full(n, -np.inf, np.float32))


def largest(squares: NDArray[np.float64], n: int) -> NDArray[np.int32]:
    """Up to n classes of the largest squared norm above 0, of equals the lower ones; ascending."""
    n = min(n, int(np.count_nonzero(squares)))
    if n == 0:
        return np.empty(0, np.int32)
    bound = np.partition(squares, len(squares) - n)[len(squares) - n]
    above = np.flatnonzero(squares > bound)
    equal = np.flatnonzero(squares == bound)[: n - len(above)]
    return np.sort(np.concatenate([above, equal])).astype(np.int32)
