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
from xmc_stream.methods.grouplasso.parameters import GroupLassoParameters
from xmc_stream.methods.lowrank.parameters import CPLSTParameters, LEMLParameters
from xmc_stream.methods.memoir.parameters import MEMOIRParameters
from xmc_stream.methods.parameters import Parameters
from xmc_stream.methods.pdsparse.parameters import PDSparseParameters
from xmc_stream.methods.ppdsparse.parameters import DISMEC, PPDSparseParameters
from xmc_stream.models import Execution, Model, load_model
from xmc_stream.models.model import new_folder
from xmc_stream.planning import plan_training
from xmc_stream.store.dataset import Dataset, open_dataset
from xmc_stream.training import train

_EXECUTION = """seed : int in [0, inf), default 0
    All random draws come from it. On one type of processor, the same data, parameters and seed give the same model, bit
    for bit.
memory_limit : str, int or None, default None
    Peak resident memory of the process, as "4GB" or in bytes. On a cluster: of each worker. None: three quarters of the
    memory that is free. This and what follows have no influence on the model.
threads : int in [1, inf) or None, default None
    Threads of this process. None: as many as it has processors.
scheduler : dask client, str or None, default None
    A client of dask.distributed, or the address of a scheduler, to run the jobs there. None: run them in this process.
progress : bool, default False
    Show progress bars on stderr, and first a line with the expected passes, memory and time."""
_FITTED = """Attributes
----------
model_ : Model
    After `fit`: the trained model, opened.
report_ : dict
    After `fit`: the report of the run, as `xmc-stream train --json` prints them. Among them are `seconds`, `peak_rss` (bytes),
    `passes` over the data, `nnz` (numbers in the model, without each class's bias) and `objective`."""
_RUN = {"seed": 0, "memory_limit": None, "threads": None, "scheduler": None, "progress": False}


class Estimator:
    """What all estimators have: a parameter is an attribute of its name.

    A subclass names its parameters. Signature and docstring are made of their declarations.
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
        """The parameters by name, as scikit-learn's tools ask for them.

        Parameters
        ----------
        deep : bool, default True
            Without effect: no parameter is an estimator itself.

        Returns
        -------
        dict
            The value of each parameter, by name.
        """
        return {name: getattr(self, name) for name in self._defaults()}

    def set_params(self, **values: Any) -> Self:
        """Set parameters by name.

        Parameters
        ----------
        **values
            New values, by the names of the parameters. They are checked by `fit`.

        Returns
        -------
        self

        Raises
        ------
        InputError
            For a name that is no parameter.
        """
        for name, value in values.items():
            if name not in self._defaults():
                raise InputError(
                    f"{type(self).__name__} has no parameter {name!r}: it has {', '.join(self._defaults())}"
                )
            setattr(self, name, value)
        return self

    def parameters(self) -> Parameters:
        """The parameters of the method, checked.

        Returns
        -------
        Parameters
            Without seed, memory_limit, threads, scheduler and progress.

        Raises
        ------
        InputError
            Naming the parameter that is out of range.
        """
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
        """Train a model on disk. A run that was killed goes on when the same call is made again.

        Parameters
        ----------
        X : Dataset, str, Path, or scipy sparse matrix (n x D)
            The samples: a dataset, its path, or a matrix together with Y.
        Y : scipy sparse matrix (n x K) or None, default None
            The labels of a matrix X. A label is positive where its value is not zero.
        model : str, Path or None, default None
            Where the model is written. None: into a temporary folder, which lives as long as the estimator. It comes
            along when the estimator is pickled or copied. A run into a temporary folder cannot go on after a kill.
        overwrite : bool, default False
            Replace a model at that path, and drop an unfinished run there.
        force : bool, default False
            Go on with an unfinished run that began on another type of processor or with other package versions. The
            model may then differ in the last bits.
        check : bool, default True
            Compare the data with their checksums before the training.
        warm_start : Model, str, Path or None, default None
            A model, or its path, to begin from. It has as many features and labels. Of the methods, PPDSparse can do
            this.
        cuts : Cuts or None, default None
            Cut small data into many blocks; for tests.
        calibrate : float, default 0
            The share of the rows to hold out for calibration, as 0.1; 0 for none. A second model learns from the other
            rows, and its scores of these say how to calibrate, see `xmc_stream.calibrate`. It takes about twice as
            long.

        Returns
        -------
        self
            With `model_` and `report_`.

        Raises
        ------
        InputError
            A parameter or the data cannot be used, or calibrate and warm_start are both given.
        StoreError
            The data are damaged, or the model cannot be written.
        ResumeError
            At `model` there is a run or a model of other data or parameters, or another process writes there.
        MemoryLimitError
            The memory limit cannot work, or was nearly reached.
        JobError
            A job failed on a worker of a cluster.

        Examples
        --------
        >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
        >>> X = sp.csr_matrix(np.repeat(np.eye(3, dtype=np.float32), 10, axis=0))
        >>> train = xs.convert(X, "fit-train.xmc", labels=X)
        >>> clf = xs.PPDSparse(memory_limit="2GB").fit(train, model="fit.model")
        >>> clf.model_.shape
        (3, 3)
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
        """What `fit` would do with a dataset, without doing it.

        Parameters
        ----------
        X : Dataset, str or Path
            The samples: a dataset, or its path.

        Returns
        -------
        dict
            As `xmc-stream plan train --json` prints it. Among the keys are `fits`, `passes`, `bytes_read`, `peak_rss`
            (bytes), `seconds` and `least_limit` (bytes). Where the limit cannot work, `fits` is False and `why` says
            so.

        Raises
        ------
        InputError
            A parameter or the data cannot be used.
        StoreError
            There is no dataset at that path.

        Examples
        --------
        >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
        >>> X = sp.csr_matrix(np.repeat(np.eye(3, dtype=np.float32), 10, axis=0))
        >>> train = xs.convert(X, "plan-train.xmc", labels=X)
        >>> xs.PPDSparse(memory_limit="2GB").plan(train)["fits"]
        True
        """
        dataset = X if isinstance(X, Dataset) else open_dataset(X)
        execution = Execution(self.memory_limit, self.threads, self.scheduler)
        return plan_training(dataset, self.parameters(), self.seed, execution)

    def predict_topk(self, data: Any, k: int = 5) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The k best classes of each sample, and their scores, in memory. See `Model.predict_topk`.

        Parameters
        ----------
        data : Dataset, scipy sparse matrix (n x D), or list of str
            The samples. Texts are for a model that was trained on raw text.
        k : int, default 5
            Classes of each sample, from 1 to the number of labels.

        Returns
        -------
        labels : int64 array (n, k)
            Best first; ties go to the lower label. -1 where a sample has fewer.
        scores : float32 array (n, k)
            Their scores.

        Raises
        ------
        InputError
            The estimator is not fitted, the data do not match the model, or k is out of range.
        StoreError
            The model is damaged.
        MemoryLimitError
            The memory limit cannot work.
        """
        if not hasattr(self, "model_"):
            raise InputError(
                f"this {type(self).__name__} is not fitted yet: call fit first, or load_model for a model on disk"
            )
        execution = Execution(self.memory_limit, self.threads, self.scheduler, self.progress)
        return self.model_.predict_topk(data, k, execution)


class PPDSparse(Estimator, parameters=PPDSparseParameters):
    """Class-separable primal-dual sparse one-vs-rest learning, from data on disk, in bounded memory.

    Yen, Huang, Dai, Ravikumar, Dhillon, Xing: PPDSparse, KDD 2017. For each class, with y_i = 1 or -1, it minimises
    (section 3.2, eq. 9, with tau and C added, section 5.2)

        F(w) = lam sum_{j>=1} |w_j| + (tau/2) ||w||^2 + C sum_i loss(w.x_i, y_i)

    where w_0 is the bias. The losses of a score z are (sections 3 and 5.2)

        squared_hinge   1/2 max(0, 1 - y z)^2
        hinge           max(0, 1 - y z)

    The active set A of a class begins with its positives and some random other rows. A round solves for A by dual
    coordinate descent. Then a search of all rows adds those that violate optimality most to A (section 4.1, Algorithms 1
    and 2). `delta` is the random sparsification of section 4.2, `min_value` the two-level sparsification of section 5.3.
    `fit` checks the parameters.

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
        """PPDSparse with the setting of DiSMEC (Babbar, Schoelkopf, WSDM 2017).

        That is lam=0, tau=1, C=2, rounds=5, max_rounds=5, guide=0, prune=0.01 and positive_weight=1. The squared hinge here
        has a factor 1/2, so C=2 is DiSMEC's C=1.

        Parameters
        ----------
        **parameters
            Other parameters of PPDSparse, by name. They go before those of the setting.

        Returns
        -------
        PPDSparse
            Not fitted yet.

        Examples
        --------
        >>> import xmc_stream as xs
        >>> xs.PPDSparse.dismec(prune=0.02)
        PPDSparse(lam=0.0, C=2.0, positive_weight=1.0, rounds=5, max_rounds=5, guide=0.0, prune=0.02)
        """
        return cls(**{**DISMEC, **parameters})


class PDSparse(Estimator, parameters=PDSparseParameters):
    """Max-margin learning of all classes at once, from data on disk, in bounded memory.

    Yen, Huang, Zhong, Ravikumar, Dhillon: PD-Sparse, ICML 2016. It minimises (section 2, eq. 13 with the loss of eq. 2)

        sum_k (1/2 ||w_k||^2 + lam ||w_k||_1) + C sum_i max_{n not in y_i, p in y_i} (1 + w_n.x_i - w_p.x_i)_+

    where y_i are the labels of row i. There is no bias. Each step takes a row, searches labels that violate its margin,
    and solves for the row's active labels (section 3.1, block-coordinate Frank-Wolfe). `parts` and `rate` make the
    search approximate (sections 3.2 and 4.4); `post_solve` is section 4.3. The defaults are for rows of length one
    (`convert(..., normalize="l2")`). `fit` checks the parameters.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
    >>> X = sp.csr_matrix(np.repeat(np.eye(3, dtype=np.float32), 10, axis=0))
    >>> Y = sp.csr_matrix(np.repeat(np.eye(3), 10, axis=0))
    >>> clf = xs.PDSparse(held_out=0).fit(X, Y)
    >>> labels, scores = clf.predict_topk(X[[0, 10, 20]], k=1)
    >>> labels.tolist()
    [[0], [1], [2]]
    """


class LEML(Estimator, parameters=LEMLParameters):
    """Low-rank learning of all labels at once, of which some may never have been observed.

    Yu, Jain, Kar, Dhillon: Large-scale multi-label learning with missing labels, ICML 2014. It minimises over W
    (D x rank) and H (K x rank), with h_k row k of H (section 3, eq. 4)

        sum_{(i,k) in Omega} loss(Y_ik, x_i^T W h_k) + lam/2 (||W||_F^2 + ||H||_F^2)

    where Omega are all pairs of a row and a label, or the known ones (`observed`). The losses of a target y and a score
    z are

        squared         1/2 (y - z)^2              y = 0 or 1
        logistic        log(1 + exp(-y z))         y = -1 or 1
        squared_hinge   max(0, 1 - y z)^2          y = -1 or 1

    W and H are solved for in turn (sections 3.1 and 3.2). With the squared loss, conjugate gradients give W, and a system
    of equations gives each h_k. With the other losses, a trust-region Newton method gives both. `report_["history"]` has
    what is known of each alternation. `fit` checks the parameters.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
    >>> X = sp.csr_matrix(np.repeat(np.eye(3, dtype=np.float32), 10, axis=0))
    >>> Y = sp.csr_matrix(np.repeat(np.eye(3), 10, axis=0))
    >>> clf = xs.LEML(rank=3, held_out=0).fit(X, Y)
    >>> labels, scores = clf.predict_topk(X[[0, 10, 20]], k=1)
    >>> labels.tolist()
    [[0], [1], [2]]
    >>> W, H = clf.model_.factors()
    >>> W.shape, H.shape  # W has a last row for the bias
    ((4, 3), (3, 3))
    """


class CPLST(Estimator, parameters=CPLSTParameters):
    """Conditional principal label space transformation: the best fit of a given rank, in closed form.

    Chen, Lin: Feature-aware label space dimension reduction for multi-label classification, NIPS 2012. It minimises

        ||Y - X Z||_F   over the D x K matrices Z = W H^T of that rank

    This is LEML with the squared loss, full labels and lam = 0 (Yu et al., ICML 2014, section 2.1, Claims 1 and 2). The
    closed form is found by subspace iterations, each with a least-squares problem that conjugate gradients solve.
    `model_.factors()` returns W and H. The rank must not exceed D or K. `fit` checks the parameters.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
    >>> X = sp.csr_matrix(np.repeat(np.eye(3, dtype=np.float32), 10, axis=0))
    >>> Y = sp.csr_matrix(np.repeat(np.eye(3), 10, axis=0))
    >>> clf = xs.CPLST(rank=3).fit(X, Y)
    >>> labels, scores = clf.predict_topk(X[[0, 10, 20]], k=1)
    >>> labels.tolist()
    [[0], [1], [2]]
    """


class GroupLasso(Estimator, parameters=GroupLassoParameters):
    """The l1/l2 group lasso: learns all classes at once from features that they share, and selects these.

    Blondel, Seki, Uehara: Block coordinate descent algorithms for large-scale sparse multiclass classification, Machine
    Learning 2013. It minimises over W (D x K), with W_j row j of W (section 3, eq. 2)

        F(W) = (1/N) sum_i loss_i(W^T x_i) + lam sum_j (mix ||W_j||_1 + (1 - mix) ||W_j||_2)

    A feature is in the model for all classes or for none: W_j = 0. The losses of scores z = W^T x_i and labels Y_i are

        multiclass      sum_{r != y} max(0, 1 - (z_y - z_r))^2            one label y
        multitask       sum_r max(0, 1 - t_r z_r)^2                       t_r = 1 for labels, -1 for the others
        logistic        log sum_r exp(z_r - z_y)                          one label y
        label-ranking   sum_{y in Y_i, r not in Y_i} max(0, 1 - (z_y - z_r))^2

    Block coordinate descent (sections 4.1 to 4.6) visits feature after feature. There is no bias: the paper has none. `fit`
    checks the parameters. `model_.selected_features()` has the features, `report_["path"]` the figures of each lam.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
    >>> X = sp.csr_matrix(np.repeat(np.eye(5, dtype=np.float32)[:3], 10, axis=0))  # two features are never used
    >>> Y = sp.csr_matrix(np.repeat(np.eye(3), 10, axis=0))
    >>> clf = xs.GroupLasso(lam=0.01).fit(X, Y)
    >>> labels, scores = clf.predict_topk(X[[0, 10, 20]], k=1)
    >>> labels.tolist()
    [[0], [1], [2]]
    >>> clf.model_.selected_features().tolist()
    [0, 1, 2]
    """


class MEMOIR(Estimator, parameters=MEMOIRParameters):
    """MEMOIR: a multi-class SVM whose best wrong class is found by an index and not by scoring all classes.

    MEMOIR: Multi-class Extreme Classification with Inexact Margin, arXiv 2018. It minimises over W (D x K), w_c the weights of
    class c (equations 10, 11), by steps along stochastic subgradients (algorithms 1, 2)

        (1/N) sum_i max(0, 1 - (w_y.x_i - max_{c != y} w_c.x_i)) + gamma lam ||W||_1        or + lam/2 ||W||_F^2

    The maximum is that of an oracle: all classes scored, a small-world graph, or signs of random projections of the
    coordinates of a truncated SVD. A row with several labels counts once for each. `report_["history"]` has loss, weights and
    held-out macro-F1 after each twentieth of the steps.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
    >>> X = sp.csr_matrix(np.repeat(np.eye(3, dtype=np.float32), 20, axis=0))
    >>> Y = sp.csr_matrix(np.repeat(np.eye(3), 20, axis=0))
    >>> clf = xs.MEMOIR(batch=10).fit(X, Y)
    >>> labels, scores = clf.predict_topk(X[[0, 20, 40]], k=1)
    >>> labels.tolist()
    [[0], [1], [2]]
    """
