"""Rows of length one: whether rows have it, and giving it to rows that a model is asked about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.store.names import SELECTED
from xmc_stream.system.memory import FEW_BYTES, MemoryLimit

if TYPE_CHECKING:
    from xmc_stream.models.execution import Execution
    from xmc_stream.store.model import StoredModel

_NEAR = 1e-4  # as far from one is the length of what was written with few digits, or summed in another order
_ENTRY_BYTES = 4 + 4 + 8 + 1  # of a value: before and after, its column, and whether its row stays


def of_length_one(norms: NDArray[Any]) -> NDArray[np.bool_]:
    """Which rows need not be normalised, by their l2 norms: those of length one, and of zeros alone."""
    return np.asarray((np.abs(norms - 1.0) <= _NEAR) | (norms == 0.0))


def normalised(model: StoredModel, X: Any, execution: Execution) -> Any:
    """A scipy matrix whose rows have length one where the model learned from such; the same object where they do already.

    Each row is as a conversion makes it, bit for bit. A model of selected features knows the rows before the selection
    alone: nothing is done for it. Raises InputError for a matrix that contradicts its shape, MemoryLimitError.
    """
    if model.attributes.get("normalize") != "l2" or SELECTED in model.attributes:
        return X
    from scipy.sparse import csr_matrix

    from xmc_stream.convert.matrices.whole import as_csr
    from xmc_stream.kernels.csr import row_norms, scale_rows_l2

    csr = as_csr(X, "X")
    if csr.dtype.kind not in "biuf":
        return X
    with np.errstate(over="ignore"):  # what is not finite is refused later
        data = np.ascontiguousarray(csr.data, np.float32)
    indptr, norms = np.ascontiguousarray(csr.indptr, np.int64), np.empty(csr.shape[0], np.float32)
    row_norms(indptr, data, norms)
    stay = of_length_one(norms)
    if stay.all() or not np.isfinite(norms).all():
        return X
    if (n_bytes := _ENTRY_BYTES * len(data)) > FEW_BYTES:  # asking the system what is free takes its time
        MemoryLimit.of(execution.memory_limit).check({"rows of length one": n_bytes}, "normalising rows")
    scaled = data.copy()
    scale_rows_l2(indptr, scaled)
    kept = np.repeat(stay, np.diff(indptr))
    scaled[kept] = data[kept]
    return csr_matrix((scaled, csr.indices, csr.indptr), shape=csr.shape)
