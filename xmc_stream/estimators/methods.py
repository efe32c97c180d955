"""The methods as estimators."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.utils.validation import _check_sample_weight, check_is_fitted

from xmc_stream.arguments import native_arguments
from xmc_stream.errors import InputError
from xmc_stream.estimators.base import Estimator
from xmc_stream.estimators.given import Target
from xmc_stream.grouplasso.parameters import GroupLassoParameters
from xmc_stream.lowrank.parameters import CPLSTParameters, LEMLParameters
from xmc_stream.memoir.parameters import MEMOIRParameters
from xmc_stream.methods.weights import Given, read_weights
from xmc_stream.models import Model
from xmc_stream.pdsparse.parameters import PDSparseParameters
from xmc_stream.ppdsparse.parameters import DISMEC, PPDSparseParameters
from xmc_stream.store.dataset import Dataset
from xmc_stream.tree.given import structure_of
from xmc_stream.tree.parameters import TreeParameters


class _Weighted(Estimator):
    """An estimator that takes weights of samples, and of labels as the parameter class_weight."""

    class_weight: Any

    @native_arguments
    def fit(
        self,
        X: Any,
        y: Any = None,
        model: str | Path | None = None,
        *,
        sample_weight: Any = None,
        overwrite: bool = False,
        force: bool = False,
        check: bool = True,
        warm_start: Model | str | Path | None = None,
        calibrate: float = 0.0,
    ) -> Self:
        """Train a model, as every estimator does (see `xmc_stream.LEML.fit`), with weights of samples.

        Parameters
        ----------
        X, y, model : with the types and defaults of `xmc_stream.LEML.fit`
            The rows, their labels, and where the model is written.
        sample_weight : array (n,), number, str, Path or None, default None
            How many times C counts for each row, 0 or more; a path is that of a .npy file, which is read in parts. A row
            of weight 0 counts as if it were not there. It does not go together with calibrate.
        overwrite, force, check, warm_start, calibrate : with those of `xmc_stream.LEML.fit`, and its defaults
            How to go on with a run, what to begin from, and whether scores are calibrated.

        Returns
        -------
        self
            With `model_` and `report_`.

        Raises
        ------
        InputError
            As of every estimator; or weights are not as many as the rows, negative, not finite, or all 0.

        Examples
        --------
        >>> import numpy as np, xmc_stream as xs
        >>> X, y = np.repeat(np.eye(3), 10, axis=0), np.repeat(["a", "b", "c"], 10)
        >>> y[0] = "b"  # by mistake
        >>> xs.PPDSparse(C=10).fit(X, y, sample_weight=[0] + 29 * [1]).predict(X[[0, 29]]).tolist()
        ['a', 'c']
        """
        how = {"overwrite": overwrite, "force": force, "check": check}
        return self._fit(X, y, model, warm_start, calibrate, how, sample_weight)

    def _given(self, sample_weight: Any, dataset: Dataset, target: Target) -> Given | None:
        samples = labels = None
        if isinstance(sample_weight, str | Path):
            samples = read_weights(sample_weight)
        elif sample_weight is not None:
            samples = _check_sample_weight(sample_weight, np.empty((dataset.n_samples, 0)), dtype=np.float64)
        weights = self.class_weight
        if isinstance(weights, Mapping):
            numbers = {label: i for i, label in enumerate(target.classes.tolist())}
            labels = np.ones(len(numbers))
            for label, weight in weights.items():
                if label not in numbers:
                    raise InputError(f"class_weight has the label {label!r}, and y does not")
                if not isinstance(weight, Real):
                    raise InputError(f"class_weight of {label!r} is {weight!r}: give a number")
                labels[numbers[label]] = weight
        elif weights is not None and not isinstance(weights, str):
            labels = np.asarray(weights)
        return None if samples is None and labels is None else Given(samples, labels)


class PPDSparse(_Weighted, parameters=PPDSparseParameters):
    """Class-separable primal-dual sparse one-vs-rest learning, from data on disk, in bounded memory.

    Yen, Huang, Dai, Ravikumar, Dhillon, Xing: PPDSparse, KDD 2017. For each class, with y_i = 1 or -1, it minimises
    (section 3.2, eq. 9, with tau and C added, section 5.2)

        F(w) = lam sum_{j>=1} |w_j| + (tau/2) ||w||^2 + C sum_i s_i loss(w.x_i, y_i)

    where w_0 is the bias and s_i, 1 if nothing is said, the weight of the sample (`fit`), times positive_weight and that of
    the class (class_weight) for positives. The losses of a score z are (sections 3 and 5.2)

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
        PPDSparse(C=2.0, guide=0.0, lam=0.0, max_rounds=5, positive_weight=1.0,
                  prune=0.02, rounds=5)
        """
        return cls(**{**DISMEC, **parameters})


class PDSparse(Estimator, parameters=PDSparseParameters):
    """Max-margin learning of all classes at once, from data on disk, in bounded memory.

    Yen, Huang, Zhong, Ravikumar, Dhillon: PD-Sparse, ICML 2016. It minimises (section 2, eq. 13 with the loss of eq. 2)

        sum_k (1/2 ||w_k||^2 + lam ||w_k||_1) + C sum_i max_{n not in y_i, p in y_i} (1 + w_n.x_i - w_p.x_i)_+

    where y_i are the labels of row i. There is no bias. Each step takes a row, searches labels that violate its margin,
    and solves for the row's active labels (section 3.1, block-coordinate Frank-Wolfe). `parts` and `rate` make the
    search approximate (sections 3.2 and 4.4); `post_solve` is section 4.3. The defaults are for rows of length one
    (`normalize`). `fit` checks the parameters.

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
    `model_.factors()` returns W and H. The rank is that of Z at most: D or K. `fit` checks the parameters.

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

    def _takes_several(self) -> bool:
        return self.loss in ("multitask", "label-ranking")


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


class LabelTree(_Weighted, parameters=TreeParameters):
    """A tree of labels: each row goes down it, and meets a few labels in place of all.

    Labels with similar rows share a leaf (balanced 2-means of sums of their rows). A node c and a label k are linear
    classifiers z = w.x + b, trained on the rows R of their parent: those with a label below it, and some of the others whose
    beam reaches it. With y_i = 1 for rows with a label below, else -1, each minimises

        lam ||w||_1 + 1/2 (||w||^2 + b^2) + C sum_{i in R} 1/2 max(0, 1 - y_i z_i)^2

    with lam = 0 for nodes, by dual coordinate descent (Hsieh et al., ICML 2008, section 2). A row goes on from the `beam`
    nodes of a level with the largest path S_c = S_parent - max(0, 1 - z_c)^3. A label's score is -max(0, 1.3 - z)^3 + a
    S_leaf and what groups of labels like it say: see
    `docs/tree.md`. After Parabel (Prabhu et al., WWW 2018), Bonsai (Khandagale et al., Machine Learning 2020) and PECOS
    XR-Linear (Yu et al., JMLR 2022).

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
    >>> X = sp.csr_matrix(np.repeat(np.eye(3, dtype=np.float32), 10, axis=0))
    >>> Y = sp.csr_matrix(np.repeat(np.eye(3), 10, axis=0))
    >>> clf = xs.LabelTree(max_leaf=2).fit(X, Y)
    >>> labels, scores = clf.predict_topk(X[[0, 10, 20]], k=1)
    >>> labels.tolist()
    [[0], [1], [2]]

    A tree that is given, by pairs (child, parent) or a file of them:

    >>> clf = xs.LabelTree(tree=[(0, "small"), (1, "small"), (2, "large")]).fit(X, Y)
    >>> clf.model_.tree()[:2]
    [('node-0-0', 'root'), ('node-0-1', 'root')]
    """

    tree: Any

    def _given(self, sample_weight: Any, dataset: Dataset, target: Target) -> Given | None:
        weights = super()._given(sample_weight, dataset, target)
        if self.tree is None:
            return weights
        tree = structure_of(self.tree, dataset, self.memory_limit).arrays()
        return Given(None, None, tree) if weights is None else replace(weights, tree=tree)

    def with_beam(self, beam: int | None) -> Self:
        """The same, fitted, whose predictions go by another beam. See `Model.with_beam`.

        Parameters
        ----------
        beam : int or None
            Nodes of a level that a row goes on from, from 1 on. None: all, so that every label is scored.

        Returns
        -------
        LabelTree
            With the same model. The parameter `beam` stays that of the training.

        Raises
        ------
        InputError
            beam is out of range.

        Examples
        --------
        >>> import numpy as np, xmc_stream as xs
        >>> X, y = np.repeat(np.eye(3), 10, axis=0), np.repeat(["a", "b", "c"], 10)
        >>> clf = xs.LabelTree(max_leaf=1, beam=1).fit(X, y)
        >>> scores = [of.decision_function(X[:1]) for of in (clf, clf.with_beam(None))]
        >>> [int((score < -1e30).sum()) for score in scores]  # labels that no beam reached
        [1, 0]
        """
        check_is_fitted(self, "model_")
        made = copy(self)
        made.model_ = self.model_.with_beam(beam)
        return made
