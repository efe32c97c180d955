"""Products of sparse rows with a matrix that has few rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.jit import kernel


@kernel
def add_products(
    indptr: NDArray[np.int64], places: NDArray[Any], data: NDArray[Any], first: int, dense: NDArray[Any],
    at: NDArray[np.int64], out: NDArray[Any],
) -> None:  # fmt: skip
    """out (n x c) += the rows (n x d, csr) times rows [first, first + m) of a d x c matrix, which are `dense` (m x c).

    at (n,): the next entry of each row, moved on. Called for all of the matrix, in ascending order, it sums the entries of
    a row in their order, however the matrix is cut.
    """
    last = first + len(dense)
    for i in range(len(at)):
        row = out[i]
        p, end = at[i], indptr[i + 1]
        while p < end and places[p] < last:
            x, other = data[p], dense[places[p] - first]
            for c in range(len(row)):
                row[c] += x * other[c]
            p += 1
        at[i] = p
