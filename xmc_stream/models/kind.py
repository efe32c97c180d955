"""What a kind of model answers for itself: its weights, how it predicts, and how it is checked and exported."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from xmc_stream.store.model import StoredModel

if TYPE_CHECKING:
    from xmc_stream.models.runs import RankingTask
    from xmc_stream.runtime.job import Job, Phase, Receipt
    from xmc_stream.store.dataset import Dataset
    from xmc_stream.store.matrix import Block, SparseMatrix


class Held(Protocol):
    """A model in memory. Any number of threads may rank by it at once."""

    def rank(self, x: Block, labels: NDArray[np.int64], scores: NDArray[np.float32]) -> None:
        """Fold the scores of some rows into their k best (n, k); x is used up. The rows begin at a multiple of `HELD_ROWS`."""


class Checker(Protocol):
    """What `verify` lends to a kind of model: each call notes down damage."""

    damage: list[str]

    def whole(self, folder: Path) -> bool: ...
    def expect(self, what: str, found: Any, wanted: Any) -> None: ...
    def expect_size(self, folder: Path, n: int, name: str) -> None: ...
    def finite(self, folder: Path) -> None: ...
    def matrix(self, folder: Path, shape: tuple[int, int], encoding: str) -> SparseMatrix | None: ...
    def lines(self, matrices: Mapping[str, SparseMatrix]) -> Generator[Phase, list[Receipt], None]: ...


Beside = tuple[int, np.dtype[Any], Iterator[NDArray[Any]]]  # an array: items, their type, windows


class WeightArrays(NamedTuple):
    """Weights as a CSC matrix, array by array in windows, and the bias of each column: what `export` writes.

    columns: None for K, a label each. beside: what else is written, by name. needs: bytes beside those of windows.
    """

    nnz: int
    indptr: Iterator[NDArray[Any]]
    indices: Iterator[NDArray[Any]]
    data: Iterator[NDArray[Any]]
    bias: Iterator[NDArray[Any]]
    columns: int | None = None
    beside: Mapping[str, Beside] = MappingProxyType({})
    needs: int = 0


class Kind(StoredModel, ABC):
    """An opened model, by what its kind answers for itself; what all kinds have in common is in `Model`."""

    kind: ClassVar[str]

    @abstractmethod
    def _more(self) -> str:
        """What else __repr__ says."""

    @abstractmethod
    def _hash_weights(self, update: Callable[[Any], None]) -> None:
        """Hash what scores depend on, in the order of the classes."""

    @abstractmethod
    def warm_up(self, evaluate: bool = False) -> Job:
        """A job that loads the kernels of a prediction.

        Parameters
        ----------
        evaluate : bool, default False
            Load those of an evaluation too.

        Returns
        -------
        Job
        """

    @abstractmethod
    def held_needs(self, room: int) -> dict[str, int]:
        """What `hold` takes, and ranking `HELD_ROWS` rows by it.

        Parameters
        ----------
        room : int
            Bytes that there are. A kind that can do with less memory says what it takes then.

        Returns
        -------
        dict
            Bytes by component, without the rows and their results. What ranking takes is called "ranking".
        """

    @abstractmethod
    def hold(self, room: int) -> Held:
        """The model, in memory as far as there is room, to predict with in the calling thread.

        Parameters
        ----------
        room : int
            As of `held_needs`.

        Returns
        -------
        Held

        Raises
        ------
        StoreError
            The model is damaged.
        """

    @abstractmethod
    def ranking(
        self, dataset: Dataset, k: int, filtered: bool, evaluate: bool, once: Callable[[Job], Receipt]
    ) -> RankingTask:
        """A prediction or an evaluation: what it would do, and its jobs.

        Parameters
        ----------
        dataset : Dataset
            The samples.
        k : int
            Classes of each sample.
        filtered : bool
            Whether there are pairs that are not predicted.
        evaluate : bool
            Whether it is an evaluation.
        once : callable
            Runs a job, a probe, and returns its receipt.

        Returns
        -------
        RankingTask

        Raises
        ------
        InputError
            The data do not match the model.
        """

    @abstractmethod
    def check_jobs(self) -> Sequence[Job]:
        """Jobs that compare all that scores depend on with its checksums.

        Returns
        -------
        sequence of Job
            Each raises StoreError where a file is damaged.
        """

    @abstractmethod
    def verify(self, checker: Checker) -> Generator[Phase, list[Receipt], None]:
        """Check what must be true of the weights, for `xmc_stream.verify`.

        Parameters
        ----------
        checker : Checker
            Takes the damage that is found.

        Returns
        -------
        generator of Phase
            The phases of jobs to run.
        """

    def pictured(self) -> tuple[dict[str, Any], list[str]]:
        """What `info` shows of the model beside its attributes.

        Returns
        -------
        tuple
            As data, by name, and as lines for people.

        Raises
        ------
        StoreError
            The model is damaged.
        """
        return {}, []

    @abstractmethod
    def weight_arrays(self) -> WeightArrays:
        """All weights, array by array in windows, for `xmc_stream.export`.

        Returns
        -------
        WeightArrays

        Raises
        ------
        InputError
            The model has no weights by class.
        """
