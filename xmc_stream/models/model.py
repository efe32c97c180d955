"""A trained model, whatever its kind: what all kinds have in common, and opening one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.arguments import native_arguments
from xmc_stream.errors import InputError, StoreError
from xmc_stream.models.decisions import BEST_LABEL, Decision
from xmc_stream.models.kind import Kind
from xmc_stream.store.model import DECISION, KIND, StoredModel
from xmc_stream.store.nodes import from_here, understood
from xmc_stream.store.places import writing
from xmc_stream.system.files import kept_folder, removed_with

if TYPE_CHECKING:
    import scipy.sparse


KINDS = {
    "linear": "xmc_stream.linear.model:LinearModel",
    "low-rank": "xmc_stream.factors.model:LowRankModel",
    "row-sparse": "xmc_stream.grouplasso.model:RowSparseModel",
    "tree": "xmc_stream.tree.model:TreeModel",
}


class Model(Kind):
    """An opened model: what it says of itself, its weights, and prediction.

    `load_model` and `fit` return one of its kind: weights for each class, two factors of a low rank, rows of weights for
    a few features, or label trees.

    Parameters
    ----------
    path : str or Path
        The folder of the model.
    attributes : dict or None, default None
        The model's attributes, where they were read before. None: read them.

    Attributes
    ----------
    path : Path
        The folder of the model.
    n_features, n_labels : int
        D and K.
    nnz : int
        Weights that are stored, without the bias of each class; of a low-rank model the numbers in W and H.
    attributes : dict
        How the model was made, and the report of its training, as `xmc-stream info` shows them.
    kind : str
        "linear" for weights by class, "low-rank" for factors, "row-sparse" for rows of few features, "tree" for label
        trees.

    Raises
    ------
    StoreError
        There is no model, it is damaged, or a newer xmc_stream wrote it.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
    >>> X = sp.csr_matrix(np.repeat(np.eye(3, dtype=np.float32), 10, axis=0))  # row i has label i // 10
    >>> model = xs.PPDSparse(C=10).fit(X, X).model_
    >>> model.kind, model.shape, model.nnz
    ('linear', (3, 3), 9)
    >>> labels, scores = model.predict_topk(X[[0, 29]], k=1)
    >>> labels.tolist()
    [[0], [2]]
    >>> by_hand = X.toarray() @ model.to_scipy().toarray() + model.bias()
    >>> bool(np.allclose(by_hand[0, 0], scores[0, 0]))
    True
    """

    _owned: Path | None = None

    def __repr__(self) -> str:
        a = self.attributes
        return (
            f"Model({from_here(self.path)!r}: {a['solver']}, {self.n_features} x {self.n_labels}{self._more()}, "
            f"{a['nnz']} weights)"
        )

    def __reduce__(self) -> Any:
        if self._owned is None:
            return load_model, (self.path.absolute(),)
        with writing(self.path, "fit again"):
            self.path.stat()  # or there is none any more
            files = [path for path in sorted(self.path.rglob("*")) if path.is_file()]
            return _unpacked, ({str(path.relative_to(self.path)): path.read_bytes() for path in files},)

    def own(self, folder: Path) -> None:
        """Have a temporary folder live as long as this object. Pickled or copied, the model's files come along.

        Parameters
        ----------
        folder : Path
            The folder, which is removed with the object.
        """
        self._owned = folder
        removed_with(self, folder)

    @native_arguments
    def predict_topk(
        self,
        data: Any,
        k: int = 5,
        *,
        memory_limit: str | int | None = None,
        threads: int | None = None,
        scheduler: Any = None,
        progress: bool = False,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The k best classes of each sample, and their scores, in memory.

        Few samples are ranked in the calling thread, and the model stays in memory for the next call where it takes at
        most half of what the memory limit leaves. If its files change, they are read again. Threads may call at once.

        Parameters
        ----------
        data : Dataset, scipy sparse matrix, array or frame (n x D), or list, series or array of str
            The samples. Texts are for a model that was trained on raw text. Rows of a matrix are divided by their l2
            norms if those that the model learned from were (`attributes["normalize"]`).
        k : int, default 5
            Classes of each sample, from 1 to the number of labels.
        memory_limit : str, int or None, default None
            Peak resident memory of the process, as "4GB" or in bytes. On a cluster: of each worker. None: what it
            holds, and three quarters of what is free.
        threads : int or None, default None
            Threads of this process, from 1 on. None: as many as it has processors.
        scheduler : dask client, str or None, default None
            A client of dask.distributed, or the address of a scheduler, to run the jobs there. None: this process.
        progress : bool, default False
            Show a bar on stderr, where that is a terminal.

        Returns
        -------
        labels : int64 array (n, k)
            Best first; ties go to the lower label. Labels without training rows come last.
        scores : float32 array (n, k)
            With weights by class w_0 + sum_j w_j x_j, added in the order of the features; with factors x W H^T. Where
            the model is calibrated, these are calibrated. The least finite float32, about -3.4e38, for labels without
            training rows.

        Raises
        ------
        InputError
            The data do not match the model, or k is out of range.
        StoreError
            The model or the data are damaged.
        MemoryLimitError
            The memory limit cannot work.

        See Also
        --------
        xmc_stream.predict : for results that do not fit in memory.
        """
        from xmc_stream.models.execution import Execution
        from xmc_stream.models.prediction import predict_topk

        return predict_topk(self, data, k, Execution(memory_limit, threads, scheduler, progress))

    def with_beam(self, beam: int | None) -> Model:
        """The same model, whose rows go on from another number of nodes of a level: for label trees.

        All that predicts, evaluates or plans with what is returned does so by that beam; the files stay as they are.

        Parameters
        ----------
        beam : int or None
            Nodes of a level, from 1 on. None: all, so that every label is scored.

        Returns
        -------
        Model

        Raises
        ------
        InputError
            The model is of another kind, or beam is out of range.

        Examples
        --------
        >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
        >>> X = sp.csr_matrix(np.repeat(np.eye(3, dtype=np.float32), 10, axis=0))  # row i has label i // 10
        >>> exact = xs.LabelTree(max_leaf=1).fit(X, X).model_.with_beam(None)
        >>> exact.predict_topk(X[[0, 29]], k=1)[0].tolist()
        [[0], [2]]
        """
        raise InputError(f"{self.path} is a {self.kind} model, which has no beam: leave out " + flags.BEAM)

    @property
    def searched(self) -> dict[str, Any]:
        """How labels are looked for, where that is set anew for each prediction: with this, predictions are kept."""
        return {}

    @property
    def decision(self) -> Decision:
        """Which labels of a row are predicted.

        The best one, where every training row has one label. Else those that score above a threshold: 0, even odds, where
        scores are calibrated; what was learned from rows held out, by methods whose scores compare the labels of one row
        alone; or 0, or what the loss says. Models of earlier versions know the last of these only.
        """
        with understood(self.path / "zarr.json"):
            about = self.attributes.get(DECISION, {})
            if about.get("one_label"):
                return BEST_LABEL
            if self.calibrated:
                return Decision(0.0)
            if "best" in about:
                cut = about["threshold"]
                return Decision(BEST_LABEL.threshold if cut is None else float(cut), bool(about["best"]))
            return Decision(float(self.attributes.get("threshold", 0.0)))

    def digest(self) -> str:
        """What "the same model" means: a hash of all that its scores depend on, and how it was made.

        That is parameters, seed, warm start, shape, weights in the order of the classes, and calibration.

        Returns
        -------
        str
            A SHA-256 hash, in hexadecimal digits.

        Raises
        ------
        StoreError
            The model is damaged: what is read is compared with its checksums.

        See Also
        --------
        arrays_digest : of what the files hold alone, whatever the model says of how it was made.
        """
        from xmc_stream.runtime.check import checked_reading

        digest = hashlib.sha256(json.dumps(self.made_of(), sort_keys=True).encode())
        with checked_reading(self.path):
            if self.calibrated:
                digest.update(self.label_counts(0, self.n_labels).astype("<i8").data)
            self._hash_weights(digest.update)
        return digest.hexdigest()

    def bias(self) -> NDArray[np.float32]:
        """The bias w_0 of each class.

        Returns
        -------
        float32 array (K,)
            -inf for a class that had no training rows: it is ranked last, see `predict_topk`. Zeros for a low-rank model,
            whose bias is the last row of W.

        Raises
        ------
        StoreError
            The model is damaged.
        """
        return np.zeros(self.n_labels, np.float32)

    def to_scipy(self) -> scipy.sparse.csc_matrix:
        """All weights in memory, without the bias: for a model with weights by class.

        Returns
        -------
        scipy.sparse.csc_matrix (D x K, float32)
            Column k has the weights of class k.

        Raises
        ------
        InputError
            The model has no weights by class.
        StoreError
            The model is damaged.
        """
        raise InputError(f"{self.path} has no weights by class: take Model.factors()")

    def factors(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Both factors in memory: for a low-rank model. The scores of x are x W H^T.

        Returns
        -------
        W : float32 array (D, rank), or (D + 1, rank) with a bias
            The last row is that of the bias, a feature that is always 1.
        H : float32 array (K, rank)

        Raises
        ------
        InputError
            The model has weights by class.
        StoreError
            The model is damaged.
        """
        raise InputError(f"{self.path} has weights by class, no factors: take Model.to_scipy()")

    def tree(self, number: int | None = None) -> list[tuple[str, str]]:
        """A tree of the model as pairs of a child and its parent: for a model of label trees.

        `LabelTree(tree=...)` takes these pairs, and then learns a model with the same tree.

        Parameters
        ----------
        number : int or None, default None
            Which of the trees, from 0 on. None: the only one.

        Returns
        -------
        list of (str, str)
            From the root down. A word is a label's name, or its number where labels have no names, or an inner node's, which
            has one for this alone.

        Raises
        ------
        InputError
            The model is of another kind, has several trees and none is named, or has no tree of that number.
        StoreError
            The model is damaged.
        """
        raise InputError(
            f"{self.path} is a {self.kind} model, which has no tree: take one that the method tree learned"
        )

    def selected_features(self) -> NDArray[np.int64]:
        """The features that the model needs, of all that it was trained on: for a row-sparse model.

        Returns
        -------
        int64 array (n_selected,)
            Ascending ids in the data as they were converted. Those of a compact model, or of one that was trained on
            selected features, are the same ids.

        Raises
        ------
        InputError
            The model is of another kind.
        StoreError
            The model is damaged.

        Examples
        --------
        >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
        >>> X = sp.csr_matrix(np.repeat(np.eye(3, dtype=np.float32), 10, axis=0))  # row i has label i // 10
        >>> model = xs.PPDSparse(C=10).fit(X, X).model_
        >>> try:
        ...     model.selected_features()
        ... except xs.errors.InputError:
        ...     model.kind
        'linear'
        """
        raise self._no_selection()

    def selected_names(self) -> list[str] | None:
        """The names of the selected features, in the order of `selected_features`.

        Returns
        -------
        list of str or None
            None where the features have no names.

        Raises
        ------
        InputError
            The model is of another kind.
        StoreError
            The model is damaged.
        """
        raise self._no_selection()

    @native_arguments
    def compact(
        self, path: str | Path, overwrite: bool = False, memory_limit: str | float | None = None, check: bool = True
    ) -> Model:
        """A model on disk that has the selected features alone: for a row-sparse model.

        Its column j is feature `selected_features()[j]`. It predicts on what `select_features` makes of the data, and its
        scores are the same, bit for bit.

        Parameters
        ----------
        path : str or Path
            The folder of the new model.
        overwrite : bool, default False
            Replace a model at `path`.
        memory_limit : str, int, float or None, default None
            Peak resident memory of the process, as "512MB" or in bytes. None: what it holds, and three quarters of what
            is free.
        check : bool, default True
            Compare the model with its checksums first. False saves a little time, and damage may go unseen into the new
            model.

        Returns
        -------
        Model
            The compact model, opened.

        Raises
        ------
        InputError
            The model is of another kind; something stands at `path`, or the training of a model there is not finished.
        StoreError
            The model is damaged, or the new one cannot be written.
        MemoryLimitError
            The memory limit cannot work.

        See Also
        --------
        xmc_stream.select_features : a dataset of the selected features alone.
        """
        raise self._no_selection()

    def _no_selection(self) -> InputError:
        return InputError(
            f"{self.path} is a {self.kind} model, which selects no features: take a row-sparse model, as group lasso learns it"
        )

    def reopened(self) -> Model:
        """The model that stands at the path now.

        Returns
        -------
        Model
            Of whatever kind.

        Raises
        ------
        StoreError
            There is none any more.
        """
        return load_model(self.path)


def load_model(path: str | Path) -> Model:
    """Open a trained model.

    Parameters
    ----------
    path : str or Path
        The folder of the model, or its URL, as s3://bucket/wiki.model.

    Returns
    -------
    Model
        Of its kind. Its weights are read when they are needed.

    Raises
    ------
    StoreError
        There is no model, its training is not finished, it is damaged, or its kind is not known.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
    >>> X = sp.csr_matrix(np.repeat(np.eye(3, dtype=np.float32), 10, axis=0))  # row i has label i // 10
    >>> _ = xs.PPDSparse(C=10).fit(X, X, model="loaded.model")
    >>> xs.load_model("loaded.model")
    Model('loaded.model': ppdsparse, 3 x 3, 9 weights)
    """
    found = StoredModel(path)
    kind = found.attributes.get(KIND, "low-rank" if found.attributes.get("rank") else "linear")
    if not isinstance(kind, str) or kind not in KINDS:
        raise StoreError(f"{path} is a model of a kind that is not known here ({kind!r}): update, or load its method")
    model: Model = resolve_name(KINDS[kind])(found.path, found.attributes)
    return model


def as_model(model: Model | str | Path) -> Model:
    """The model, opened where it is given by its path. Raises StoreError where there is none."""
    return model if isinstance(model, Model) else load_model(model)


def compare(model: Model) -> None:
    """Compare all that a model's scores depend on with its checksums. Raises StoreError naming a file that is damaged."""
    for job in model.check_jobs():
        job.run()


def _unpacked(files: Mapping[str, bytes]) -> Model:
    """A model of these files in a temporary folder of its own."""
    with kept_folder() as folder, writing(folder, "load it again"):
        for name, content in files.items():
            path = folder / "model" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        model = load_model(folder / "model")
    model.own(folder)
    return model
