"""Any small matrices, drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from hypothesis import strategies as st

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def matrices(draw: st.DrawFn) -> tuple[Any, Any]:
    """X with any finite values, stored zeros among them, and Y; rows and columns may be empty."""
    n, d, k = draw(st.integers(1, 8)), draw(st.integers(1, 12)), draw(st.integers(1, 6))
    parts = []
    for width in (d, k):
        rows = draw(st.lists(st.sets(st.integers(0, width - 1), max_size=5), min_size=n, max_size=n))
        indices = np.array([j for row in rows for j in sorted(row)], np.int32)
        indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
        parts.append((indices, indptr, (n, width)))
    (xi, xp, x_shape), (yi, yp, y_shape) = parts
    data = np.array(draw(st.lists(finite, min_size=len(xi), max_size=len(xi))), np.float32)
    return sp.csr_matrix((data, xi, xp), x_shape), sp.csr_matrix((np.ones(len(yi), np.float32), yi, yp), y_shape)
