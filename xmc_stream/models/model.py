"""A trained model, whatever its kind: what every kind has, and what each of them answers for itself."""

from __future__ import annotations

import hashlib
import importlib
import json
import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import InputError, StoreError
from xmc_stream.store.encoding import writing
from xmc_stream.store.model import KIND, StoredModel

if TYPE_CHECKING:
    import scipy.sparse

    from xmc_stream.jobs.job import Job, Loop, Phase, Receipt
    from xmc_stream.jobs.plan import Forecaster, MemoryPlan
    from xmc_stream.models.execution import Execution
    from xmc_stream.store.dataset import Dataset
    from xmc_stream.store.matrix import SparseMatrix

KINDS = {
    "linear": "xmc_stream.models.linear.model:LinearModel",
    "low-rank": "xmc_stream.models.lowrank.model:LowRankModel",
}


class Run(Protocol):
    """Jobs by phases, and where they write: what `predict` and `evaluate` give to an engine."""

    @property
    def out(self) -> Path: ...
    def loop(self) -> Loop: ...


class Checker(Protocol):
    """What `verify` lends to a kind of model: each call notes down damage."""

    damage: list[str]

    def whole(self, folder: Path) -> bool: ...
    def expect(self, what: str, found: Any, wanted: Any) -> None: ...
    def expect_size(self, folder: Path, n: int, name: str) -> None: ...
    def finite(self, folder: Path) -> None: ...
    def matrix(self, folder: Path, shape: tuple[int, int], encoding: str) -> SparseMatrix | None: ...
    def lines(self, matrices: Mapping[str, SparseMatrix]) -> Generator[Phase, list[Receipt], None]: ...


class WeightArrays(NamedTuple):
    """Weights as a CSC matrix (D x K), array by array in windows, and the bias (K,): what `export` writes."""

    nnz: int
    indptr: Iterator[NDArray[Any]]
    indices: Iterator[NDArray[Any]]
    data: Iterator[NDArray[Any]]
    bias: Iterator[NDArray[Any]]


class Model(StoredModel, ABC):
    """An opened model: attributes, digest, prediction. `load_model` gives one of its kind."""

    kind: ClassVar[str]
    _owned: Path | None = None

    def __repr__(self) -> str:
        a = self.attributes
        return (
            f"Model({str(self.path)!r}: {a['solver']}, {self.n_features} x {self.n_labels}{self._more()}, "
            f"{a['nnz']} weights)"
        )

    def __reduce__(self) -> Any:
        if self._owned is None:
            return load_model, (self.path.absolute(),)
        with writing(self.path, "fit again"):
            files = {str(file.relative_to(self.path)): file.read_bytes() for file in _files(self.path)}
        return _unpacked, (files,)

    def own(self, folder: Path) -> None:
        """Have a temporary folder live as long as this object; pickled or copied, the model's files come along."""
        self._owned = folder
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    def predict_topk(
        self, data: Any, k: int = 5, execution: Execution | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The k best classes of each sample, and their scores: two arrays (n, k), best first, ties to the lower label.

        Parameters
        ----------
        data : Dataset, scipy sparse matrix (n x D), or list of str
            The samples; texts for a model of raw text.
        k : int, default 5
            Classes for each sample, from 1 to the model's number of labels.
        execution : Execution, optional
            Memory limit, threads, cluster.

        Returns
        -------
        labels : int64 array (n, k)
            -1 where a sample has fewer.
        scores : float32 array (n, k)
            For weights by class w_0 + sum_j w_j x_j, added in the order of the features.

        Raises
        ------
        InputError
            Where the features do not match.

        See Also
        --------
        xmc_stream.predict : for results that do not fit in memory.
        """
        from xmc_stream.models.prediction import predict_topk

        return predict_topk(self, data, k, execution)

    def digest(self) -> str:
        """What "the same model" means: a hash of parameters, seed, start, shape, weights in class order, calibration."""
        digest = hashlib.sha256(json.dumps(self.made_of(), sort_keys=True).encode())
        if self.calibrated:
            digest.update(self.label_counts(0, self.n_labels).astype("<i8").data)
        self._hash_weights(digest.update)
        return digest.hexdigest()

    def bias(self) -> NDArray[np.float32]:
        """The bias of every class (K,)."""
        return np.zeros(self.n_labels, np.float32)

    def to_scipy(self) -> scipy.sparse.csc_matrix:
        """All weights in memory (D x K, csc, the bias apart): for models that fit."""
        raise InputError(f"{self.path} has no weights by class: take Model.factors()")

    def factors(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """W (D x r) and H (K x r) of a low-rank model, in memory: the scores of x are x W H^T.

        W has a last row for the bias, if there is one.
        """
        raise InputError(f"{self.path} has weights by class, no factors: take Model.to_scipy()")

    @abstractmethod
    def _more(self) -> str:
        """What else __repr__ says."""

    @abstractmethod
    def _hash_weights(self, update: Callable[[Any], None]) -> None:
        """Hash what scores depend on, in the order of the classes."""

    @abstractmethod
    def warm_up(self, evaluate: bool = False) -> Job:
        """A job that loads the kernels of predicting, or of evaluating."""

    @abstractmethod
    def predicting(
        self, dataset: Dataset, k: int, out: Path, plan: MemoryPlan, filtered: str = "", raw: bool = False
    ) -> Run:
        """The jobs of a prediction. filtered: store of pairs that are not predicted; raw: scores before calibration."""

    @abstractmethod
    def evaluating(
        self, dataset: Dataset, k: int, out: Path, plan: MemoryPlan, filtered: str, threshold: float, folder: Path
    ) -> Run:
        """The jobs of an evaluation, which predicts too; what they count goes into a folder."""

    @abstractmethod
    def forecaster(
        self, dataset: Dataset, k: int, filtered: bool, evaluate: bool, once: Callable[[Job], Receipt]
    ) -> Forecaster:
        """Foresees a prediction, or an evaluation. once: runs a probe."""

    @abstractmethod
    def check_jobs(self) -> Sequence[Job]:
        """Jobs that compare all that scores depend on with its checksums."""

    @abstractmethod
    def verify(self, checker: Checker) -> Generator[Phase, list[Receipt], None]:
        """Check what must be true of the weights."""

    @abstractmethod
    def weight_arrays(self) -> WeightArrays:
        """Raises InputError for a kind that has no weights by class."""


def load_model(path: str | Path) -> Model:
    """Open a trained model. Raises StoreError where there is none, or one that is not finished."""
    found = StoredModel(path)
    kind = found.attributes.get(KIND, "low-rank" if found.attributes.get("rank") else "linear")
    if not isinstance(kind, str) or kind not in KINDS:
        raise StoreError(f"{path} is a model of a kind that is not known here ({kind!r}): update, or load its method")
    module, name = KINDS[kind].split(":")
    model: Model = getattr(importlib.import_module(module), name)(path, found.attributes)
    return model


def _files(folder: Path) -> list[Path]:
    """Every file below a folder. Raises OSError where there is none."""
    folder.stat()
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def _unpacked(files: Mapping[str, bytes]) -> Model:
    """A model of these files in a temporary folder of its own."""
    with new_folder() as folder, writing(folder, "load it again"):
        for name, content in files.items():
            path = folder / "model" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        model = load_model(folder / "model")
    model.own(folder)
    return model


@contextmanager
def new_folder() -> Iterator[Path]:
    """A temporary folder for a model, which is gone when the block fails."""
    folder = Path(tempfile.mkdtemp(prefix="xmc_stream-"))
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
