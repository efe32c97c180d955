"""Plain twins of kernels.csr.keep_selected and grouplasso.kernels.rows."""

from __future__ import annotations

from typing import Any

import numpy as np


def kept(indptr: Any, indices: Any, data: Any, features: Any) -> tuple[Any, Any, Any]:
    """A csr triple of the entries of some features, whose indices are places among these."""
    mask = np.isin(indices, features)
    ends = np.concatenate([[0], np.cumsum(mask)])[indptr]
    return ends, np.searchsorted(features, indices[mask]), data[mask]


def products(indptr: Any, places: Any, data: Any, dense: Any) -> Any:
    """Rows times a dense matrix in float32, entry after entry."""
    out = np.zeros((len(indptr) - 1, dense.shape[1]), np.float32)
    for i in range(len(out)):
        for p in range(indptr[i], indptr[i + 1]):
            out[i] += data[p] * dense[places[p]]
    return out
