"""What a fitted estimator answers: labels, scores, probabilities, weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.special import expit, softmax
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_consistent_length, check_is_fitted

from xmc_stream.arguments import native
from xmc_stream.errors import InputError
from xmc_stream.estimators.given import Target, checked, is_on_disk
from xmc_stream.kernels.calibration import UNSEEN
from xmc_stream.models import Model, load_model
from xmc_stream.models.calibration import SHARPNESS, Calibration
from xmc_stream.models.copies import copy_model
from xmc_stream.models.samples import texts_of
from xmc_stream.store.dataset import as_dataset
from xmc_stream.store.names import open_vectorizer
from xmc_stream.store.remote import is_url
from xmc_stream.system.memory import FEW_BYTES, MemoryLimit, format_size

_FIRST = 32  # labels of a row that are asked for at first, where more may count as predicted
_PART = 2**16  # rows that are asked about at a time, where each may have any number of labels
_SCORE_BYTES = 20 + 8 + 4  # of a row and label: as they are ranked, and put into their places
_WEIGHT_BYTES = 3 * (4 + 8)  # of a weight: as it is read, put together and turned


def _calibration(estimator: Any) -> Calibration:
    """What makes scores probabilities. Raises AttributeError, which says what to do, where there is none."""
    model = getattr(estimator, "model_", None)
    learned = None if model is None else Calibration.learned(model.path, model.attributes)
    if learned is None:
        raise AttributeError(
            f"this {type(estimator).__name__} has no probabilities: fit with calibrate=0.1, which holds out a tenth of the "
            "rows to learn them from"
        )
    return learned


class Fitted:
    """What estimators answer after `fit`."""

    model_: Model
    report_: dict[str, Any]
    memory_limit: str | int | None
    threads: int | None
    scheduler: Any
    progress: bool
    _target: Target

    @property
    def classes_(self) -> NDArray[Any]:
        """The class, or the label, behind each number that `predict_topk` gives: (K,)."""
        check_is_fitted(self, "model_")
        return self._target.classes

    def predict_topk(self, X: Any, k: int = 5) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The k best labels of each row, by their numbers, and their scores. See `Model.predict_topk`.

        Parameters
        ----------
        X : Dataset, its path, scipy sparse matrix, array or frame (n x D), or list, series or array of str
            The rows. Texts are for a model that was trained on raw text.
        k : int, default 5
            Labels of each row, from 1 to the number of labels.

        Returns
        -------
        labels : int64 array (n, k)
            Numbers of labels, best first; ties go to the lower one. `classes_[labels]` are the classes. Labels without
            training rows come last.
        scores : float32 array (n, k)
            Their scores.

        Raises
        ------
        InputError
            The data do not match the model, or k is out of range.
        StoreError
            The model is damaged.
        MemoryLimitError
            The memory limit cannot work.
        """
        data, _ = self._taken(X)
        return self.model_.predict_topk(data, k, **self._how())

    def predict(self, X: Any) -> Any:
        """The labels of each row, as y had them in `fit`.

        Parameters
        ----------
        X : Dataset, its path, scipy sparse matrix, array or frame (n x D), or list, series or array of str
            The rows.

        Returns
        -------
        array (n,), list of lists, CSR matrix or array (n x K)
            Of classes: the best class of each row. Else what `Model.decision` says: the best label of each row, where
            every training row has one label, or the labels whose score is above a threshold. That is 0, or 0.5 for the
            squared loss of LEML and CPLST, or learned from rows held out where a method's scores compare labels of one
            row alone (PDSparse, MEMOIR, GroupLasso but for loss="multitask"). Lists, best first, where y was lists; an
            indicator array where y was an array; else an indicator matrix.

        Raises
        ------
        InputError
            The data do not match the model, or the result does not fit in the memory limit.
        StoreError
            The model is damaged.
        MemoryLimitError
            The memory limit cannot work.
        """
        data, n = self._taken(X)
        if self._target.one:
            labels, _ = self.model_.predict_topk(data, 1, **self._how())
            return self._target.given(labels[:, 0], np.ones(n, np.int64))
        if self._target.dense:
            self._check_room(n, self.model_.n_labels, "a dense result", "fit with a sparse y")
        found = [self._above(part, min(_FIRST, self.model_.n_labels)) for part in self._parts(data, n)]
        return self._target.given(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))

    def decision_function(self, X: Any) -> NDArray[np.float32]:
        """The scores of all labels: for few labels. `predict_topk` has the best labels of many.

        Parameters
        ----------
        X : Dataset, its path, scipy sparse matrix, array or frame (n x D), or list, series or array of str
            The rows.

        Returns
        -------
        float32 array (n, K), or (n,) for two classes
            Of two classes: the score of the second less that of the first. The least finite float32, about -3.4e38,
            for labels without training rows.

        Raises
        ------
        InputError
            The data do not match the model, or n x K scores do not fit in the memory limit.
        StoreError
            The model is damaged.
        MemoryLimitError
            The memory limit cannot work.
        """
        scores = self._scores(X)
        return scores[:, 1] - scores[:, 0] if self._binary() else scores

    @available_if(_calibration)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> NDArray[np.float32]:
        """How likely each label is right, after `fit` with `calibrate`: for few labels.

        sigmoid(z) with z = a s + b of the score s, where a and b are learned from the ten best labels of rows that were
        held out, and depend on the number of a label's training rows. Of classes: softmax(t z), with t from these rows
        too, so that a row's sum is 1.

        Parameters
        ----------
        X : Dataset, its path, scipy sparse matrix, array or frame (n x D), or list, series or array of str
            The rows.

        Returns
        -------
        float32 array (n, K)
            Probabilities in the order of `classes_`.

        Raises
        ------
        InputError
            The data do not match the model, or n x K probabilities do not fit in the memory limit.
        StoreError
            The model is damaged.
        MemoryLimitError
            The memory limit cannot work.
        """
        model, scores = self.model_, self._scores(X)
        with np.errstate(over="ignore"):  # of labels without training rows
            z = _calibration(self).logits(scores, model.label_counts(0, model.n_labels), model.calibrated)
            if not self._target.one:
                return np.asarray(expit(z, out=z))
            z *= np.float32(model.attributes["calibration"].get(SHARPNESS, 1.0))
        return np.asarray(softmax(z, axis=1))

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """The share of rows whose best label is right: accuracy of classes, precision at one (P@1) of several labels.

        Parameters
        ----------
        X : Dataset, its path, scipy sparse matrix, array or frame (n x D), or list, series or array of str
            The rows. A dataset comes with its labels.
        y : array, list, sparse matrix or None, default None
            The true labels, as in `fit`. None for a dataset.
        sample_weight : array (n,) or None, default None
            How much each row counts. None: all the same.

        Returns
        -------
        float
            From 0 to 1.

        Raises
        ------
        InputError
            The data do not match the model.
        StoreError
            The model is damaged.
        MemoryLimitError
            The memory limit cannot work.
        """
        check_is_fitted(self, "model_")
        if is_on_disk(X) and y is None:
            from xmc_stream.evaluation.evaluate import evaluate  # `fit` and `predict` go without

            return float(evaluate(self.model_, as_dataset(X), ks=(1,), **self._how())["P@1"]) / 100.0
        if y is None:
            raise InputError("score needs y, the true labels of X: only a dataset comes with its own")
        truth = self._target.matrix(y)
        best = self.predict_topk(X, 1)[0][:, 0]
        check_consistent_length(best, truth)
        hits: Any = truth[np.arange(len(best)), np.maximum(best, 0)]
        right = np.asarray(hits, np.float64).ravel() * (best >= 0)
        return float(np.average(right, weights=sample_weight))

    @property
    def coef_(self) -> sp.csr_matrix:
        """The weights, a CSR matrix (K x D), read anew each time; of two classes (1 x D), those of the second less the first's.

        Scores are X times these plus `intercept_`, for rows of length one where the model normalises rows. They are no
        more where there are groups of labels (PPDSparse's `guide`), implied labels or a calibration. A model of low rank
        has `model_.factors()` in their place.
        """
        check_is_fitted(self, "model_")
        MemoryLimit.of(self.memory_limit).check({"weights": _WEIGHT_BYTES * self.model_.nnz}, "reading coef_")
        try:
            weights = sp.csr_matrix(self.model_.to_scipy().T)
        except InputError as error:
            raise AttributeError(str(error)) from None
        return sp.csr_matrix(weights[1] - weights[0]) if self._binary() else weights

    @property
    def intercept_(self) -> NDArray[np.float32]:
        """The bias of each label: (K,); of two classes (1,). The least finite float32 for a label without training rows."""
        check_is_fitted(self, "model_")
        bias = np.maximum(self.model_.bias(), UNSEEN)
        return bias[1:2] - bias[:1] if self._binary() else bias

    def save(self, path: str | Path, overwrite: bool = False) -> Model:
        """Copy the model to a folder, from where `load_model` opens it, also in another process.

        Its `predict_topk` is that of the estimator. To keep the estimator with its classes, pickle it, or use joblib.

        Parameters
        ----------
        path : str or Path
            The folder of the copy.
        overwrite : bool, default False
            Replace a model at `path`.

        Returns
        -------
        Model
            The copy, opened.

        Raises
        ------
        InputError
            Something stands at `path`.
        StoreError
            The copy cannot be written.

        Examples
        --------
        >>> import numpy as np, xmc_stream as xs
        >>> X, y = np.repeat(np.eye(3), 10, axis=0), np.repeat(["a", "b", "c"], 10)
        >>> clf = xs.PPDSparse(C=10).fit(X, y)
        >>> clf.save("kept.model")
        Model('kept.model': ppdsparse, 3 x 3, 9 weights)
        """
        check_is_fitted(self, "model_")
        copy_model(self.model_.path, Path(path), overwrite)
        return load_model(path)

    def _how(self) -> dict[str, Any]:
        """How work is done: keywords of what the package has for models."""
        return {name: native(getattr(self, name)) for name in ("memory_limit", "threads", "scheduler", "progress")}

    def _binary(self) -> bool:
        return self._target.one and self.model_.n_labels == 2

    def _taken(self, X: Any) -> tuple[Any, int]:
        """What the model is asked about, matrices checked, sparse ones as CSR; and the number of rows."""
        check_is_fitted(self, "model_")
        if isinstance(X, str) and not is_url(X) and not Path(X).is_dir():
            raise InputError(
                f"X is {X[:40]!r}, and there is no dataset: give its path, or texts as a list, also a single one"
            )
        if is_on_disk(X):
            dataset = as_dataset(X)
            return dataset, dataset.n_samples
        if (texts := texts_of(X)) is None:
            rows = checked(self, X, reset=False)
            return rows, rows.shape[0]
        if open_vectorizer(self.model_.path) is None:
            raise InputError("X is texts, and fit had a matrix: give such a matrix, or fit with texts")
        return texts, len(texts)

    def _check_room(self, n: int, k: int, what: str, cure: str) -> None:
        need = _SCORE_BYTES * n * k
        if need <= FEW_BYTES:  # asking the system what is free takes longer than to rank a row
            return
        limit = MemoryLimit.of(self.memory_limit)
        if need > limit.budget():
            raise InputError(
                f"{what} of {n:,} rows and {k:,} labels takes {format_size(need)}, and the memory limit of "
                f"{format_size(limit.limit)} leaves {format_size(max(limit.budget(), 0))}: {cure}, give fewer rows, or raise "
                "memory_limit"
            )

    def _scores(self, X: Any) -> NDArray[np.float32]:
        """The scores of all labels (n, K)."""
        data, n = self._taken(X)
        n_labels = self.model_.n_labels
        self._check_room(n, n_labels, "a score for each", "take predict_topk for the best labels")
        labels, scores = self.model_.predict_topk(data, n_labels, **self._how())
        found = np.empty((n, n_labels), np.float32)
        np.put_along_axis(found, labels, scores, axis=1)
        return found

    def _parts(self, data: Any, n: int) -> Iterator[Any]:
        """Rows of a matrix, some at a time; what is on disk, or text, as a whole."""
        if not hasattr(data, "shape"):
            self._check_room(
                n, min(_FIRST, self.model_.n_labels), "a result in memory", "write it by xmc_stream.predict"
            )
            yield data
            return
        for first in range(0, n, _PART):
            yield data[first : first + _PART]

    def _above(self, data: Any, k: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The labels that count as predicted, best first, row after row; and how many each row has. k: asked for at first."""
        n_labels, decision = self.model_.n_labels, self.model_.decision
        labels, scores = self.model_.predict_topk(data, k, **self._how())
        chosen = scores > decision.above
        whole = ~chosen[:, -1] | (k == n_labels)
        chosen[:, 0] |= decision.best
        counts = chosen.sum(axis=1)
        if whole.all():
            return labels[chosen], counts
        more = min(2 * k, n_labels)
        if not hasattr(data, "shape"):
            return self._above(data, more)
        rest, counts[~whole] = self._above(data[~whole], more)
        mine = np.repeat(whole, counts)
        found = np.empty(len(mine), np.int64)
        found[mine], found[~mine] = labels[whole][chosen[whole]], rest
        return found, counts
