"""The scikit-learn face: estimators learn from a dataset on disk, or from matrices, and leave a model on disk."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from xmc_stream.calibrated_training import train_calibrated
from xmc_stream.convert import convert
from xmc_stream.errors import InputError
from xmc_stream.jobs.plan import Cuts
from xmc_stream.methods.lowrank.parameters import CPLSTParameters, LEMLParameters
from xmc_stream.methods.pdsparse.parameters import PDSparseParameters
from xmc_stream.methods.ppdsparse.parameters import DISMEC, PPDSparseParameters
from xmc_stream.models import Execution, Model, load_model
from xmc_stream.planning import Parameters, plan_training
from xmc_stream.store.dataset import Dataset, open_dataset
from xmc_stream.store.encoding import writing
from xmc_stream.training import train


class _TemporaryModel(Model):
    """The model in a temporary folder, which lives as long as this object; pickled or copied, its files come along."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "model")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    def __reduce__(self) -> Any:
        with writing(self.path, "fit again"):
            files = {str(file.relative_to(self.path)): file.read_bytes() for file in _files(self.path)}
        return _unpacked, (files,)


def _files(folder: Path) -> list[Path]:
    """Every file below a folder. Raises OSError where there is none."""
    folder.stat()
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def _unpacked(files: dict[str, bytes]) -> _TemporaryModel:
    """A model of these files in a temporary folder of its own."""
    with _new_folder() as folder, writing(folder, "load it again"):
        for name, content in files.items():
            path = folder / "model" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return _TemporaryModel(folder)


@contextmanager
def _new_folder() -> Iterator[Path]:
    """A temporary folder for a model, which is gone when the block fails."""
    folder = Path(tempfile.mkdtemp(prefix="xmc_stream-"))
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


class _Estimator:
    """What all estimators have. A parameter is an attribute of its name: those of the model, seed, and of the execution."""

    _PARAMETERS: ClassVar[type[Parameters]]
    _EXECUTION: ClassVar[tuple[str, ...]] = ("memory_limit", "threads", "scheduler", "progress")
    seed: int
    memory_limit: str | int | None
    threads: int | None
    scheduler: Any
    progress: bool

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Parameters by name, as scikit-learn's tools ask for them."""
        names = [field.name for field in fields(self._PARAMETERS)]
        return {name: getattr(self, name) for name in (*names, "seed", *self._EXECUTION)}

    def set_params(self, **values: Any) -> Self:
        """Set parameters by name. Raises InputError for a name that is none."""
        for name, value in values.items():
            if name not in self.get_params():
                raise InputError(
                    f"{type(self).__name__} has no parameter {name!r}: it has {', '.join(self.get_params())}"
                )
            setattr(self, name, value)
        return self

    def parameters(self) -> Parameters:
        """The model's parameters, checked. Raises InputError naming the one that is out of range."""
        return self._PARAMETERS(**{field.name: getattr(self, field.name) for field in fields(self._PARAMETERS)})

    def _fit(
        self, X: Any, Y: Any, model: str | Path | None, overwrite: bool, force: bool, check: bool,
        warm_start: Model | str | Path | None, cuts: Cuts | None, calibrate: float,
    ) -> Self:  # fmt: skip
        parameters = self.parameters()
        if not isinstance(self.seed, int) or self.seed < 0:
            raise InputError(
                f"The 'seed' parameter of {type(self).__name__} must be an int in [0, inf). Got {self.seed!r} instead."
            )
        execution = Execution(self.memory_limit, self.threads, self.scheduler, self.progress, cuts)
        start = warm_start if warm_start is None or isinstance(warm_start, Model) else load_model(warm_start)
        if calibrate and start is not None:
            raise InputError("calibrate and warm_start do not go together: the start has seen the rows held out")
        with tempfile.TemporaryDirectory(prefix="xmc_stream-", ignore_cleanup_errors=True) as scratch:
            if Y is not None:
                dataset = convert(X, f"{scratch}/data.xmc", labels=Y, memory_limit=self.memory_limit)
            else:
                dataset = X if isinstance(X, Dataset) else open_dataset(X)

            def trained(path: Path) -> tuple[Model, dict[str, Any]]:
                if calibrate:
                    return train_calibrated(
                        dataset, path, parameters, self.seed, execution, calibrate, overwrite, force, check
                    )
                return train(dataset, path, parameters, self.seed, execution, overwrite, force, check, start)

            if model is not None:
                self.model_, self.report_ = trained(Path(model).absolute())
            else:
                with _new_folder() as folder:
                    _, self.report_ = trained(folder / "model")
                    self.model_ = _TemporaryModel(folder)
        return self

    def plan(self, X: Any) -> dict[str, Any]:
        """What `fit` would do with a Dataset (or its path): passes, bytes, peak memory, seconds; keys as `plan --json`."""
        dataset = X if isinstance(X, Dataset) else open_dataset(X)
        execution = Execution(self.memory_limit, self.threads, self.scheduler)
        return plan_training(dataset, self.parameters(), self.seed, execution)

    def predict_topk(self, data: Any, k: int = 5) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The k best classes of each sample of a Dataset, scipy matrix or list of texts, and their scores: (n, k) each."""
        if not hasattr(self, "model_"):
            raise InputError(
                f"this {type(self).__name__} is not fitted yet: call fit first, or load_model for a model on disk"
            )
        execution = Execution(self.memory_limit, self.threads, self.scheduler, self.progress)
        return self.model_.predict_topk(data, k, execution)


class PPDSparse(_Estimator):
    """Class-separable primal-dual sparse one-vs-rest learning (Yen et al. 2017), from data on disk, in bounded memory.

    Per class:  F(w) = lam sum_{j>=1} |w_j| + (tau/2) ||w||^2 + C sum_i loss(w.x_i, y_i),  a bias apart from the l1 term

    The squared hinge is 1/2 max(0, 1 - y z)^2: C = 2 here is C = 1 in LIBLINEAR, DiSMEC and PPDSparse's own program.

    Parameters of the model: lam, tau, C, loss ("squared_hinge" or "hinge"), bias, tol, rounds, max_rounds (None for no
    cap), epochs, last_epochs, added, prune, delta, min_value (see `solvers.ppdsparse`), seed. Of its execution, without
    influence on the model: memory_limit ("4GB" or bytes; of each worker on a cluster), threads, scheduler (a dask client
    or address), progress.

    After `fit`: model_ (an opened Model) and report_ (figures of the run, see DESIGN: train).
    """

    _PARAMETERS = PPDSparseParameters

    def __init__(
        self,
        lam: float = 0.01,
        tau: float = 1.0,
        C: float = 1.0,
        loss: str = "squared_hinge",
        bias: bool = True,
        tol: float = 0.01,
        rounds: int = 3,
        max_rounds: int | None = 6,
        epochs: int = 2,
        last_epochs: int = 6,
        added: int = 50,
        prune: float = 0.0,
        delta: float = 0.0,
        min_value: float = 0.0,
        seed: int = 0,
        memory_limit: str | int | None = None,
        threads: int | None = None,
        scheduler: Any = None,
        progress: bool = False,
    ) -> None:
        self.lam = lam
        self.tau = tau
        self.C = C
        self.loss = loss
        self.bias = bias
        self.tol = tol
        self.rounds = rounds
        self.max_rounds = max_rounds
        self.epochs = epochs
        self.last_epochs = last_epochs
        self.added = added
        self.prune = prune
        self.delta = delta
        self.min_value = min_value
        self.seed = seed
        self.memory_limit = memory_limit
        self.threads = threads
        self.scheduler = scheduler
        self.progress = progress

    @classmethod
    def dismec(cls, **parameters: Any) -> PPDSparse:
        """With DiSMEC's setting (Babbar, Schoelkopf 2017): lam 0, tau 1, C 2, rounds and max_rounds 5, prune 0.01.

        What is given stands in its place.
        """
        return cls(**{**DISMEC, **parameters})

    def fit(
        self,
        X: Any,
        Y: Any = None,
        model: str | Path | None = None,
        *,
        overwrite: bool = False,
        force: bool = False,
        check: bool = True,
        warm_start: Model | str | Path | None = None,
        cuts: Cuts | None = None,
        calibrate: float = 0.0,
    ) -> PPDSparse:
        """Train from a Dataset (or its path), or from scipy matrices X (n x D) and Y (n x K, non-zero where positive).

        model: where the model goes; without it a temporary folder, which lives as long as the estimator and comes along
        when that is pickled or copied. A run that was killed goes on when the same call is made again. overwrite: replace
        a model of other data or parameters. force: resume on another processor type or package versions. check: compare
        the data with their checksums first.
        warm_start: a model of as many features and labels (or its path) to begin from instead of from nothing. calibrate:
        a share of the rows, as 0.1, that is held out from a second training and says how to calibrate scores, see
        `xs.calibrate`; it takes as long again.
        Raises InputError, StoreError, ResumeError, MemoryLimitError, JobError.
        """
        return self._fit(X, Y, model, overwrite, force, check, warm_start, cuts, calibrate)


class PDSparse(_Estimator):
    """Max-margin learning of all classes at once (Yen et al. 2016), from data on disk, in bounded memory.

    min_W  sum_k (1/2 ||w_k||^2 + lam ||w_k||_1) + C sum_i max_{n not in y_i, p in y_i} (1 + w_n.x_i - w_p.x_i)_+

    Parameters of the model: lam (or several, of which the best on held-out rows is kept), C, parts, rate, most, held_out,
    patience, max_passes, tol, refit, post_solve (see `solvers.pdsparse`), seed. Of its execution, without influence on the
    model: memory_limit ("4GB" or bytes), threads, scheduler (a dask client or address), progress.

    After `fit`: model_ (an opened Model) and report_ (figures of the run, see DESIGN: train; `history`: of each pass).
    """

    _PARAMETERS = PDSparseParameters

    def __init__(
        self,
        lam: float | tuple[float, ...] = 0.01,
        C: float = 1.0,
        parts: int = 1,
        rate: int = 1,
        most: int = 100,
        held_out: float = 0.1,
        patience: int = 3,
        max_passes: int = 50,
        tol: float = 1e-3,
        refit: bool = True,
        post_solve: bool = False,
        seed: int = 0,
        memory_limit: str | int | None = None,
        threads: int | None = None,
        scheduler: Any = None,
        progress: bool = False,
    ) -> None:
        self.lam = lam
        self.C = C
        self.parts = parts
        self.rate = rate
        self.most = most
        self.held_out = held_out
        self.patience = patience
        self.max_passes = max_passes
        self.tol = tol
        self.refit = refit
        self.post_solve = post_solve
        self.seed = seed
        self.memory_limit = memory_limit
        self.threads = threads
        self.scheduler = scheduler
        self.progress = progress

    def fit(
        self,
        X: Any,
        Y: Any = None,
        model: str | Path | None = None,
        *,
        overwrite: bool = False,
        force: bool = False,
        check: bool = True,
        calibrate: float = 0.0,
    ) -> PDSparse:
        """Train from a Dataset (or its path), or from scipy matrices X (n x D) and Y (n x K, non-zero where positive).

        model: where the model goes; without it a temporary folder, which lives as long as the estimator and comes along
        when that is pickled or copied. A run that was killed goes on when the same call is made again. overwrite: replace
        a model of other data or parameters. force: resume on another processor type or package versions. check: compare
        the data with their checksums first.
        calibrate: as of `PPDSparse.fit`. Raises InputError, StoreError, ResumeError, MemoryLimitError, JobError.
        """
        return self._fit(X, Y, model, overwrite, force, check, None, None, calibrate)


class LEML(_Estimator):
    """Low-rank learning of all labels at once, of which some may never have been observed (Yu et al. 2014).

    min_{W, H}  sum_{(i,k) in Omega} loss(Y_ik, x_i^T W h_k) + lam/2 (||W||_F^2 + ||H||_F^2),   W: D x rank, H: K x rank

    Parameters of the model: rank, lam (None: by the data), loss ("squared", "logistic", "squared_hinge"), observed ("full",
    or "given" for the pairs of `Dataset.with_observed`), alternations, tol, newton, cg, cg_tol, held_out, patience, refit,
    criterion, bias (see `solvers.leml`), seed. Of its execution, without influence on the model: memory_limit ("4GB" or
    bytes; of each worker on a cluster), threads, scheduler (a dask client or address), progress.

    After `fit`: model_ (an opened Model, with `factors()`) and report_ (figures of the run, see DESIGN: train; `history`:
    of each alternation).
    """

    _PARAMETERS = LEMLParameters

    def __init__(
        self,
        rank: int = 100,
        lam: float | None = None,
        loss: str = "squared",
        observed: str = "full",
        alternations: int = 10,
        tol: float = 1e-3,
        newton: int = 3,
        cg: int = 20,
        cg_tol: float = 0.1,
        held_out: float = 0.1,
        patience: int = 2,
        refit: bool = True,
        criterion: str = "precision",
        bias: bool = True,
        seed: int = 0,
        memory_limit: str | int | None = None,
        threads: int | None = None,
        scheduler: Any = None,
        progress: bool = False,
    ) -> None:
        self.rank = rank
        self.lam = lam
        self.loss = loss
        self.observed = observed
        self.alternations = alternations
        self.tol = tol
        self.newton = newton
        self.cg = cg
        self.cg_tol = cg_tol
        self.held_out = held_out
        self.patience = patience
        self.refit = refit
        self.criterion = criterion
        self.bias = bias
        self.seed = seed
        self.memory_limit = memory_limit
        self.threads = threads
        self.scheduler = scheduler
        self.progress = progress

    def fit(
        self,
        X: Any,
        Y: Any = None,
        model: str | Path | None = None,
        *,
        overwrite: bool = False,
        force: bool = False,
        check: bool = True,
        calibrate: float = 0.0,
    ) -> LEML:
        """Train from a Dataset (or its path), or from scipy matrices X (n x D) and Y (n x K, non-zero where positive).

        model: where the model goes; without it a temporary folder, which lives as long as the estimator and comes along
        when that is pickled or copied. A run that was killed goes on when the same call is made again. overwrite: replace
        a model of other data or parameters. force: resume on another processor type or package versions. check: compare
        the data with their checksums first.
        calibrate: as of `PPDSparse.fit`. Raises InputError, StoreError, ResumeError, MemoryLimitError, JobError.
        """
        return self._fit(X, Y, model, overwrite, force, check, None, None, calibrate)


class CPLST(_Estimator):
    """Conditional principal label space transformation (Chen, Lin 2012): the best fit of a rank, in closed form.

    min_Z  ||Y - X Z||_F  over the D x K matrices Z = W H^T of a rank: LEML with the squared loss and lam = 0

    Parameters of the model: rank, iterations, oversampling, cg, cg_tol, lam, bias (see `solvers.leml`), seed; of its execution
    as those of `LEML`. After `fit`: model_ and report_.
    """

    _PARAMETERS = CPLSTParameters

    def __init__(
        self,
        rank: int = 100,
        iterations: int = 4,
        oversampling: int = 10,
        cg: int = 100,
        cg_tol: float = 1e-4,
        lam: float = 1e-6,
        bias: bool = True,
        seed: int = 0,
        memory_limit: str | int | None = None,
        threads: int | None = None,
        scheduler: Any = None,
        progress: bool = False,
    ) -> None:
        self.rank = rank
        self.iterations = iterations
        self.oversampling = oversampling
        self.cg = cg
        self.cg_tol = cg_tol
        self.lam = lam
        self.bias = bias
        self.seed = seed
        self.memory_limit = memory_limit
        self.threads = threads
        self.scheduler = scheduler
        self.progress = progress

    def fit(
        self,
        X: Any,
        Y: Any = None,
        model: str | Path | None = None,
        *,
        overwrite: bool = False,
        force: bool = False,
        check: bool = True,
        calibrate: float = 0.0,
    ) -> CPLST:
        """Train; arguments and errors are those of `LEML.fit`."""
        return self._fit(X, Y, model, overwrite, force, check, None, None, calibrate)
