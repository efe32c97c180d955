"""What all estimators have: parameters of a method and of how it runs, `fit`, `plan`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.metadata_routing import UNUSED
from sklearn.utils.validation import check_consistent_length, validate_data

from xmc_stream.arguments import native_arguments, seed_of
from xmc_stream.convert import convert
from xmc_stream.convert.matrices.memory import stored
from xmc_stream.errors import InputError, renaming
from xmc_stream.estimators.fitted import Fitted
from xmc_stream.estimators.given import Indicator, Target, check_dataset, checked, encoded, is_on_disk, of_matrix
from xmc_stream.methods.contract import Task
from xmc_stream.methods.parameters import Parameters
from xmc_stream.methods.weights import Given
from xmc_stream.models import Execution, Model, advising, as_model
from xmc_stream.models.samples import texts_of
from xmc_stream.store.dataset import Dataset, as_dataset
from xmc_stream.store.places import target_path
from xmc_stream.system.files import kept_folder, temporary_folder
from xmc_stream.training.plan import plan_training
from xmc_stream.training.train import train, train_calibrated

_EXECUTION = """normalize : {'auto', 'l2'} or None, default 'auto'
    Whether rows are divided by their l2 norm. 'auto': if they do not all have length one; a dataset on disk is left as
    it is, with a warning to the log. 'l2': always. None: never. `predict` does what `fit` did.
seed : int in [0, 2**63), default 0
    All random draws come from it. On one type of processor, the same data, parameters and seed give the same model, bit
    for bit.
memory_limit : str, int or None, default None
    Peak resident memory of the process, as "4GB" or in bytes. On a cluster: of each worker. None: what it holds, and
    three quarters of what is free. This and what follows have no influence on the model.
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
    `passes` over the data, `nnz` (numbers in the model, without each class's bias) and `objective`.
classes_ : array (K,)
    What stands behind each label: the classes of y, or the labels in its lists; numbers of columns else.
n_features_in_ : int
    Columns of X in `fit`.
feature_names_in_ : array (n_features_in_,)
    Names of these columns, where X was a frame whose columns have names.
coef_ : CSR matrix (K x D)
    The weights, of methods that have a vector of weights for each label. Of two classes (1 x D).
intercept_ : array (K,)
    The bias of each label. Of two classes (1,)."""
_RUN = {"normalize": "auto", "seed": 0, "memory_limit": None, "threads": None, "scheduler": None, "progress": False}
_ROWS = "X.xmc"  # the dataset that a matrix becomes
_HELD = "model.calibration/held.xmc"  # where `train_calibrated` has it
_FIT_ALONE = ("model", "overwrite", "force", "check", "warm_start", "calibrate")


class Estimator(Fitted, ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """What all estimators have: a parameter is an attribute of its name.

    A subclass names its parameters. Signature and docstring are made of their declarations.
    """

    __metadata_request__fit: ClassVar[dict[str, Any]] = dict.fromkeys(_FIT_ALONE, UNUSED)
    _PARAMETERS: ClassVar[type[Parameters]]
    normalize: str | None
    seed: int

    def __init_subclass__(cls, parameters: type[Parameters] | None = None) -> None:
        super().__init_subclass__()
        if parameters is None:  # a class of a user's, which has those of the one that it is made from
            return
        cls._PARAMETERS = parameters
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        asked = [
            inspect.Parameter(name, kind, default=value) for name, value in {**parameters.defaults(), **_RUN}.items()
        ]
        signature = inspect.Signature([inspect.Parameter("self", kind), *asked])

        def begin(self: Estimator, *values: Any, **named: Any) -> None:
            bound = signature.bind(self, *values, **named)
            bound.apply_defaults()
            for name, value in list(bound.arguments.items())[1:]:
                setattr(self, name, value)

        begin.__signature__ = signature  # type: ignore[attr-defined]
        begin.__name__, begin.__doc__ = "__init__", "See the class."
        cls.__init__ = begin  # type: ignore[method-assign,assignment]
        head, _, example = (inspect.cleandoc(cls.__doc__ or "")).partition("Examples\n--------")
        sections = [head.rstrip(), f"Parameters\n----------\n{parameters.described()}\n{_EXECUTION}", _FITTED]
        if example:
            sections.append(f"Examples\n--------{example}")
        cls.__doc__ = "\n\n".join(sections)

    def __sklearn_tags__(self) -> Any:
        """What scikit-learn's tools may expect."""
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.classifier_tags.multi_label = self._takes_several()
        return tags

    def _takes_several(self) -> bool:
        """Whether rows may have several labels."""
        return True

    def parameters(self) -> Parameters:
        """The parameters of the method, checked.

        Returns
        -------
        Parameters
            Without normalize, seed, memory_limit, threads, scheduler and progress.

        Raises
        ------
        InputError
            Naming the parameter that is out of range.
        """
        return self._PARAMETERS(**{name: getattr(self, name) for name in self._PARAMETERS.rules()})

    @native_arguments
    def fit(
        self,
        X: Any,
        y: Any = None,
        model: str | Path | None = None,
        *,
        overwrite: bool = False,
        force: bool = False,
        check: bool = True,
        warm_start: Model | str | Path | None = None,
        calibrate: float = 0.0,
    ) -> Self:
        """Train a model. A run that has a place on disk (`model`) and was killed goes on when the same call is made again.

        Parameters
        ----------
        X : scipy sparse matrix, array or frame (n x D), list, series or array of str, or Dataset, str or Path
            The rows: a matrix, or texts, which become tf-idf of words by a vocabulary that the model keeps, or a dataset on
            disk, or its path, which may be larger than memory.
        y : array, list, sparse matrix or None, default None
            The labels of a matrix X: a class for each row (n,), numbers or strings; a list of lists, sets or tuples of
            labels; or an indicator (n x K), dense or sparse, where a value other than zero is a positive. A dataset
            comes with its labels.
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
            A model, or its path, to begin from. Labels are matched by name where both have names, else by id; features of
            the data may be more, behind those of the model. Of the methods, PPDSparse can do this.
        calibrate : float, default 0
            The share of the rows to hold out for calibration, as 0.1; 0 for none. A second model learns from the other
            rows, and its scores of these say how to calibrate, see `xmc_stream.calibrate`. It takes about twice as
            long. 100 rows must be held out. `predict_proba` needs it.

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
        >>> import numpy as np, xmc_stream as xs
        >>> X, y = np.repeat(np.eye(3), 10, axis=0), np.repeat(["a", "b", "c"], 10)
        >>> xs.PPDSparse(C=10).fit(X, y).predict(X[[0, 29]]).tolist()
        ['a', 'c']

        Data on disk, for what does not fit in memory:

        >>> import scipy.sparse as sp
        >>> train = xs.convert(sp.csr_matrix(X), "fit-train.xmc", labels=sp.csr_matrix(X))
        >>> clf = xs.PPDSparse(memory_limit="2GB").fit(train, model="fit.model")
        >>> clf.model_.shape
        (3, 3)
        """
        how = {"overwrite": overwrite, "force": force, "check": check}
        return self._fit(X, y, model, warm_start, calibrate, how)

    def _fit(
        self, X: Any, y: Any, model: str | Path | None, warm_start: Any, calibrate: float, how: Mapping[str, bool],
        sample_weight: Any = None,
    ) -> Self:  # fmt: skip
        """`fit`, with weights of the samples where a method takes them. how: keywords of `train`."""
        parameters, execution = self._checked()
        start = None if warm_start is None else as_model(warm_start)
        with (
            temporary_folder() as scratch,
            renaming({str(scratch / _ROWS): "X"}),
            advising(scratch, "convert X to a dataset in a folder"),
        ):
            dataset, target = self._on_disk(X, y, scratch, execution)
            given = self._given(sample_weight, dataset, target)

            def trained(path: Path) -> tuple[Model, dict[str, Any]]:
                task = Task(dataset, parameters, self.seed, start, given=given)
                if calibrate:
                    return train_calibrated(task, path, execution, calibrate, **how)
                return train(task, path, execution, **how)

            if model is not None:
                self.model_, self.report_ = trained(target_path(model).absolute())
            else:
                with (
                    kept_folder() as folder,
                    renaming({str(folder / _HELD): "what calibrate holds out"}),
                    advising(folder, "give model=, in a folder"),
                ):
                    self.model_, self.report_ = trained(folder / "model")
                self.model_.own(folder)
        self._target = target
        return self

    def _given(self, sample_weight: Any, dataset: Dataset, target: Target) -> Given | None:
        """Weights that come with the data."""
        return None

    def _checked(self) -> tuple[Parameters, Execution]:
        """Parameters of the method, and how it runs. Raises InputError for those that are out of range."""
        parameters = self.parameters()
        name = type(self).__name__
        seed_of(self.seed, name)
        if not (self.normalize is None or (isinstance(self.normalize, str) and self.normalize in ("auto", "l2"))):
            raise InputError(
                f"The 'normalize' parameter of {name} must be one of 'auto', 'l2', or None. Got {self.normalize!r} instead."
            )
        return parameters, Execution(**self._how())

    def _on_disk(self, X: Any, y: Any, scratch: Path, execution: Execution) -> tuple[Dataset, Target]:
        """The rows as a dataset, and how their labels were given."""
        if is_on_disk(X):
            if y is not None:
                raise InputError("X is a dataset, which has its labels on disk: leave out y")
            dataset = as_dataset(X)
            check_dataset(dataset, self.normalize)
            self._has_features(dataset)
            return dataset, Indicator(dataset.n_labels, "float32", False)
        if y is None:
            validate_data(self, X, y)  # says that it is needed
        execution.limit((), [scratch])  # before anything is read: it may not be understood, or workers not see X
        texts = texts_of(X)
        rows = checked(self, X, reset=True) if texts is None else texts
        labels, target = encoded(y)
        check_consistent_length(rows, labels)
        path, names = scratch / _ROWS, target.names()
        if texts is None:
            return stored(rows, labels, path, self.memory_limit, of_matrix(rows, self.normalize), names), target
        file = scratch / "classes.jsonl"
        file.write_text("".join(json.dumps({"title": name.decode()}) + "\n" for name in names), encoding="utf-8")
        dataset = convert(
            texts, path, labels=labels, normalize="l2" if self.normalize else "none", memory_limit=self.memory_limit,
            label_names=file if names else None,
        )  # fmt: skip
        self._has_features(dataset)
        return dataset, target

    def _has_features(self, dataset: Dataset) -> None:
        """Take the number of features from a dataset: they have no names of columns."""
        self.__dict__.pop("feature_names_in_", None)
        self.n_features_in_ = dataset.n_features

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
        dataset = as_dataset(X)
        parameters, execution = self._checked()
        given = self._given(None, dataset, Indicator(dataset.n_labels, "float32", False))
        return plan_training(dataset, parameters, self.seed, execution, given=given)
