"""An index of maximum inner products for users: vectors come, change and go, and queries find the best one."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from xmc_stream.arguments import MOST_INT, seed_of, whole
from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.mips.exact import DenseExact, Exact
from xmc_stream.mips.lsh import MOST_BITS, SimpleLSH
from xmc_stream.mips.oracle import Oracle, count_of
from xmc_stream.mips.smallworld import SmallWorld
from xmc_stream.mips.vectors import ClassVectors, DenseVectors, ranked
from xmc_stream.system.memory import MemoryLimit, available_threads, format_size

_ORACLES: dict[str, type[Oracle]] = {kind.name: kind for kind in (Exact, SmallWorld, DenseExact, SimpleLSH)}
_LABEL = "InnerProductIndex"


class InnerProductIndex:
    """Maximum-inner-product search over vectors that change: argmax over i of v_i.x.

    All is in memory. A vector of zeros is a legal answer with score 0; where no other score is above 0, one of those is drawn.
    Answers do not depend on the number of threads. MEMOIR (2018) uses such an index inside a multi-class SVM.

    Parameters
    ----------
    n_ids, n_features : int
        Ids are 0 ... n_ids - 1; vectors have n_features features.
    oracle : str, default "sw-graph"
        Over sparse vectors "exact" or "sw-graph"; over dense ones "dense-exact" or "simple-lsh".
    memory_limit : str, int or None, default None
        A bound on the memory of the process, "4GB" or bytes; None: what it holds, and three quarters of what is free. The
        vectors may take what the process and the oracle's index leave of it. The rows that are given to a call come on top,
        and for "exact" 48 bytes an entry of the densest 8,192 rows of a query.
    threads : int or None, default None
        Of queries and updates; None takes all processors.
    seed : int, default 0
        Of codes and draws; 0 ... 2^63 - 1.
    **options
        Of the oracle: see `mips.smallworld.SmallWorld` and `mips.lsh.SimpleLSH`.

    Raises
    ------
    InputError
        An argument is not usable.
    MemoryLimitError
        The limit is too small; raised by `add` and `update` too.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
    >>> index = xs.InnerProductIndex(n_ids=3, n_features=4)
    >>> index.add([0, 1, 2], sp.csr_matrix([[1, 0, 0, 2], [0, 1, 0, 1], [0, 0, 3, 0]], dtype=np.float32))
    >>> index.update([1], sp.csr_matrix([[0, 5, 0, 0]], dtype=np.float32))
    >>> ids, scores = index.query(sp.csr_matrix([[0, 1, 0, 1]], dtype=np.float32))
    >>> ids.tolist(), scores.tolist()
    ([1], [5.0])
    >>> index.query(sp.csr_matrix([[0, 1, 0, 1]], dtype=np.float32), exclude=[1])[0].tolist()
    [0]
    """

    def __init__(
        self, n_ids: int, n_features: int, oracle: str = "sw-graph", memory_limit: str | float | None = None,
        threads: int | None = None, seed: int = 0, **options: Any,
    ) -> None:  # fmt: skip
        if oracle not in _ORACLES:
            raise InputError(f"there is no oracle {oracle!r}: take one of {', '.join(_ORACLES)}")
        self.n_ids, self.n_features = whole("n_ids", n_ids, _LABEL), whole("n_features", n_features, _LABEL)
        n_threads = whole("threads", available_threads() if threads is None else threads, _LABEL)
        seed, limit = seed_of(seed, _LABEL), MemoryLimit.of(memory_limit)
        try:
            left = max(limit.budget() - self._taken(oracle, n_threads, options), 0)
            kind: Any = DenseVectors if oracle in ("dense-exact", "simple-lsh") else ClassVectors
            self.vectors: ClassVectors | DenseVectors = kind(self.n_ids, self.n_features, left)
            self.oracle = _ORACLES[oracle](self.vectors, seed, n_threads, **options)
        except TypeError as error:
            raise InputError(f"oracle {oracle!r} does not take these options: {error}") from None
        except MemoryLimitError:
            raise
        except MemoryError:
            raise MemoryLimitError(
                f"an index of {n_ids} ids and {n_features} features cannot reserve memory within its limit of "
                f"{format_size(limit.limit)}, as the machine has less: set a smaller memory_limit"
            ) from None
        self.oracle.barred[:] = True

    def _taken(self, name: str, threads: int, options: dict[str, Any]) -> int:
        """Bytes that the oracle takes beside the vectors and the rows of a query."""
        if name == "sw-graph":
            sizes = {key: value for key, value in options.items() if key in ("links", "sketch", "posts")}
            return SmallWorld.bytes_of(self.n_ids, self.n_features, threads, **SmallWorld.checked_counts(sizes))
        if name == "simple-lsh":
            bits = SimpleLSH.checked_bits(options.get("bits", MOST_BITS))
            return SimpleLSH.bytes_of(self.n_ids, self.n_features, threads, bits)
        if name == "dense-exact":
            return DenseExact.bytes_of(threads)
        return Exact.bytes_of(self.n_features, 0, threads, self.n_ids)

    def _rows(self, X: Any) -> Any:
        """Rows as the oracle takes them."""
        takes_sparse, is_sparse = isinstance(self.vectors, ClassVectors), sp.issparse(X)
        rows: Any = sp.csr_matrix(X, dtype=np.float32, copy=True) if takes_sparse else X.toarray() if is_sparse else X
        values = rows.data if takes_sparse else np.ascontiguousarray(rows, np.float32)
        if rows.ndim != 2 or rows.shape[1] != self.n_features:
            raise InputError(
                f"vectors have {self.n_features} features here, and a matrix of shape {rows.shape} was given"
            )
        if not np.isfinite(values).all():
            raise InputError("a vector has a value that is not finite: leave such vectors out")
        if not takes_sparse:
            return values
        rows.sum_duplicates()
        return ranked(CSR(rows.indptr, rows.indices, rows.data))

    def _ids(self, ids: Any, present: bool) -> NDArray[np.int32]:
        found = np.atleast_1d(np.asarray(ids))
        if not found.size:
            return np.empty(0, np.int32)
        if found.ndim != 1 or found.dtype.kind not in "iu" or found.min() < 0 or found.max() >= self.n_ids:
            raise InputError(f"ids are integers from 0 to {self.n_ids - 1}")
        if len(np.unique(found)) < len(found):
            raise InputError("an id is given twice")
        wrong = found[self.oracle.barred[found] == present]
        if len(wrong):
            raise InputError(
                f"id {wrong[0]} is not in the index: add it first" if present
                else f"id {wrong[0]} is in the index already: update it"
            )  # fmt: skip
        return found.astype(np.int32)

    def _put(self, ids: NDArray[np.int32], X: Any) -> None:
        rows = self._rows(X)
        n = count_of(rows)
        if n != len(ids):
            raise InputError(f"{len(ids)} ids were given, and {n} vectors")
        try:
            self.vectors.put(ids, rows)
        except MemoryLimitError:  # some are whole, one in part, the others cleared
            self._take_out(ids)
            raise
        self.oracle.barred[ids] = False
        self.oracle.refresh(ids)

    def _take_out(self, ids: NDArray[np.int32]) -> None:
        self.vectors.clear(ids)
        self.oracle.barred[ids] = True
        self.oracle.refresh(ids)

    def add(self, ids: Any, X: Any) -> None:
        """Put vectors in.

        Parameters
        ----------
        ids : array of int (n,)
            None of them is in the index.
        X : scipy sparse matrix or array (n, n_features)
            The vectors, taken as float32.

        Raises
        ------
        InputError
            Ids or vectors are not usable; nothing was changed.
        MemoryLimitError
            There is no room; none of these ids is then in the index.
        """
        self._put(self._ids(ids, present=False), X)

    def update(self, ids: Any, X: Any) -> None:
        """Put other vectors in the place of those that ids have.

        Parameters
        ----------
        ids : array of int (n,)
            All of them are in the index.
        X : scipy sparse matrix or array (n, n_features)
            The vectors, taken as float32.

        Raises
        ------
        InputError
            Ids or vectors are not usable; nothing was changed.
        MemoryLimitError
            There is no room; none of these ids is then in the index.
        """
        self._put(self._ids(ids, present=True), X)

    def remove(self, ids: Any) -> None:
        """Take vectors out.

        Parameters
        ----------
        ids : array of int (n,)
            All of them are in the index.

        Raises
        ------
        InputError
            An id is not usable; nothing was changed.
        """
        self._take_out(self._ids(ids, present=True))

    def query(self, X: Any, exclude: Any = None, step: int = 0) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The vector of the largest inner product with each row.

        Parameters
        ----------
        X : scipy sparse matrix or array (n, n_features)
            The rows, taken as float32.
        exclude : None, array of int (n,), or scipy sparse matrix (n, n_ids), default None
            Ids that are no answers for a row: one each (-1 for none), or those with an entry in its row of a matrix.
        step : int, default 0
            A number that changes the draws among vectors of zeros.

        Returns
        -------
        ids : int32 array (n,)
            -1 where the index has no answer.
        scores : float32 array (n,)
            The inner products; -inf where there is no answer.

        Raises
        ------
        InputError
            An argument is not usable.
        """
        step, rows = whole("step", step, f"{_LABEL}.query", 0, MOST_INT), self._rows(X)
        answers = self.oracle.query(rows, self._excluded(exclude, count_of(rows)), step)
        return answers.classes, answers.scores

    def _excluded(self, exclude: Any, n: int) -> Labels:
        if exclude is None:
            return Labels(np.zeros(n + 1, np.int64), np.empty(0, np.int32))
        if sp.issparse(exclude):
            given: Any = exclude
            pairs = given.tocsr()
            if pairs.shape != (n, self.n_ids):
                raise InputError(f"exclude has the shape {pairs.shape}, and {(n, self.n_ids)} is wanted")
            return Labels(pairs.indptr.astype(np.int64), pairs.indices.astype(np.int32))
        one = np.asarray(exclude)
        if one.shape != (n,) or one.dtype.kind not in "iu" or (n and (one.min() < -1 or one.max() >= self.n_ids)):
            raise InputError(f"exclude wants an id for each of the {n} rows, -1 for none")
        return Labels(np.concatenate([[0], np.cumsum(one >= 0)]), one[one >= 0].astype(np.int32))
