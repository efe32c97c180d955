"""The scikit-learn face: estimators learn from a dataset on disk, or from matrices, and leave a model on disk."""

from __future__ import annotations

import inspect
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from xmc_stream.calibrated_training import train_calibrated
from xmc_stream.convert import convert
from xmc_stream.errors import InputError
from xmc_stream.jobs.plan import Cuts
from xmc_stream.methods.lowrank.parameters import CPLSTParameters, LEMLParameters
from xmc_stream.methods.parameters import Parameters
from xmc_stream.methods.pdsparse.parameters import PDSparseParameters
from xmc_stream.methods.ppdsparse.parameters import DISMEC, PPDSparseParameters
from xmc_stream.models import Execution, Model, load_model
from xmc_stream.models.model import new_folder
from xmc_stream.planning import plan_training
from xmc_stream.store.dataset import Dataset, open_dataset
from xmc_stream.training import train

_EXECUTION = """seed : int in [0, inf), default 0
    What all random draws come from: one seed, one model, bit for bit.
memory_limit : str, int or None, default None
    Peak resident memory of the process, as "4GB" or in bytes; of each worker on a cluster. None: three quarters of what is
    free.
threads : int or None, default None
    Threads of this process; None: all processors. No influence on the model, as all that follows.
scheduler : dask client, address or None, default None
    A dask.distributed cluster to run on; None: this process.
progress : bool, default False
    Progress bars and a line of what is foreseen, on stderr."""
_FITTED = """Attributes
----------
model_ : Model
    After `fit`: the trained model, opened.
report_ : dict
    After `fit`: figures of the run, as `xmc-stream train --json` prints them."""
_RUN = {"seed": 0, "memory_limit": None, "threads": None, "scheduler": None, "progress": False}


class Estimator:
    """What all estimators have: a parameter is an attribute of its name.

    A subclass names its parameters; signature and docstring are made of their declarations.
    """

    _PARAMETERS: ClassVar[type[Parameters]]
    seed: int
    memory_limit: str | int | None
    threads: int | None
    scheduler: Any
    progress: bool

    def __init_subclass__(cls, parameters: type[Parameters]) -> None:
        cls._PARAMETERS = parameters
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        asked = [inspect.Parameter(name, kind, default=value) for name, value in cls._defaults().items()]
        signature = inspect.Signature([inspect.Parameter("self", kind), *asked])

        def begin(self: Estimator, *values: Any, **named: Any) -> None:
            bound = signature.bind(self, *values, **named)
            bound.apply_defaults()
            for name, value in list(bound.arguments.items())[1:]:
                setattr(self, name, value)

        begin.__signature__ = signature  # type: ignore[attr-defined]
        begin.__name__, begin.__doc__ = "__init__", "See the class."
        cls.__init__ = begin  # type: ignore[assignment]
        head, _, example = (inspect.cleandoc(cls.__doc__ or "")).partition("Examples\n--------")
        sections = [head.rstrip(), f"Parameters\n----------\n{parameters.described()}\n{_EXECUTION}", _FITTED]
        if example:
            sections.append(f"Examples\n--------{example}")
        cls.__doc__ = "\n\n".join(sections)

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        return {**cls._PARAMETERS.defaults(), **_RUN}

    def __repr__(self) -> str:
        changed = (
            f"{name}={getattr(self, name)!r}"
            for name, value in self._defaults().items()
            if getattr(self, name) != value
        )
        return f"{type(self).__name__}({', '.join(changed)})"

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Parameters by name, as scikit-learn's tools ask for them."""
        return {name: getattr(self, name) for name in self._defaults()}

    def set_params(self, **values: Any) -> Self:
        """Set parameters by name. Raises InputError for a name that is none."""
        for name, value in values.items():
            if name not in self._defaults():
                raise InputError(
                    f"{type(self).__name__} has no parameter {name!r}: it has {', '.join(self._defaults())}"
                )
            setattr(self, name, value)
        return self

    def parameters(self) -> Parameters:
        """The model's parameters, checked. Raises InputError naming the one that is out of range."""
        return self._PARAMETERS(**{name: getattr(self, name) for name in self._PARAMETERS.rules()})

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
    ) -> Self:
        """Train. A run that was killed goes on when the same call is made again.

        Parameters
        ----------
        X : Dataset, path of one, or scipy sparse matrix (n x D)
            The samples.
        Y : scipy sparse matrix (n x K), optional
            Non-zero where a label is positive; with a matrix X only.
        model : str or Path, optional
            Where the model goes. Without it a temporary folder, which lives as long as the estimator and comes along when
            that is pickled or copied.
        overwrite : bool, default False
            Replace a model of other data or parameters.
        force : bool, default False
            Go on with a run of another processor type or package versions.
        check : bool, default True
            Compare the data with their checksums first.
        warm_start : Model, path of one, or None, default None
            A model of as many features and labels to begin from, for methods that can (PPDSparse).
        cuts : Cuts or None, default None
            Smaller blocks, for tests.
        calibrate : float, default 0
            A share of the rows, as 0.1, that is held out from a second training and says how to calibrate scores, see
            `xmc_stream.calibrate`. It takes as long again.

        Returns
        -------
        self

        Raises
        ------
        InputError, StoreError, ResumeError, MemoryLimitError, JobError
        """
        return self._fit(X, Y, model, overwrite, force, check, warm_start, cuts, calibrate)

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
                with new_folder() as folder:
                    self.model_, self.report_ = trained(folder / "model")
                self.model_.own(folder)
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


class PPDSparse(Estimator, parameters=PPDSparseParameters):
    """Class-separable primal-dual sparse one-vs-rest learning, from data on disk, in bounded memory.

    Yen, Huang, Dai, Ravikumar, Dhillon, Xing: PPDSparse, KDD 2017. Per class

        F(w) = lam sum_{j>=1} |w_j| + (tau/2) ||w||^2 + C sum_i loss(w.x_i, y_i),   y_i = 1 or -1, a bias w_0 apart

    where the squared hinge is 1/2 max(0, 1 - y z)^2.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
    >>> X = sp.csr_matrix(np.repeat(np.eye(3, dtype=np.float32), 10, axis=0))
    >>> Y = sp.csr_matrix(np.repeat(np.eye(3), 10, axis=0))
    >>> clf = xs.PPDSparse(C=10).fit(X, Y)
    >>> labels, scores = clf.predict_topk(X[:1], k=1)
    >>> labels.tolist()
    [[0]]
    """

    @classmethod
    def dismec(cls, **parameters: Any) -> PPDSparse:
        """With DiSMEC's setting (Babbar, Schoelkopf 2017): lam 0, tau 1, C 2, rounds and max_rounds 5, prune 0.01.

        What is given stands in its place.
        """
        return cls(**{**DISMEC, **parameters})


class PDSparse(Estimator, parameters=PDSparseParameters):
    """Max-margin learning of all classes at once, from data on disk, in bounded memory.

    Yen, Huang, Zhong, Ravikumar, Dhillon: PD-Sparse, ICML 2016.

        min_W  sum_k (1/2 ||w_k||^2 + lam ||w_k||_1) + C sum_i max_{n not in y_i, p in y_i} (1 + w_n.x_i - w_p.x_i)_+
    """


class LEML(Estimator, parameters=LEMLParameters):
    """Low-rank learning of all labels at once, of which some may never have been observed.

    Yu, Jain, Kar, Dhillon: Large-scale multi-label learning with missing labels, ICML 2014.

        min_{W, H}  sum_{(i,k) in Omega} loss(Y_ik, x_i^T W h_k) + lam/2 (||W||_F^2 + ||H||_F^2),  W: D x rank, H: K x rank

    `model_.factors()` are W and H; `report_["history"]` tells of each alternation.
    """


class CPLST(Estimator, parameters=CPLSTParameters):
    """Conditional principal label space transformation: the best fit of a rank, in closed form.

    Chen, Lin: Feature-aware label space dimension reduction for multi-label classification, NIPS 2012.

        min_Z  ||Y - X Z||_F   over the D x K matrices Z = W H^T of a rank

    This is LEML with the squared loss and lam = 0 (LEML's Claim 1).
    """
