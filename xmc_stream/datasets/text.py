"""Writing XMLRepo and libsvm text, plain or compressed by gzip."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

STANDARD_OUTPUT = Path("-")
Append = Callable[[NDArray[np.int64], NDArray[Any], NDArray[np.float32], NDArray[np.int64], NDArray[Any]], None]


@contextmanager
def text_writer(
    path: Path, compressed: bool, n_samples: int, n_features: int, n_labels: int, header: bool = True, base: int = 0
) -> Iterator[Append]:
    """A function that appends rows, two CSR triples with indptr from 0, to a text. A path of "-" is standard output.

    header: XMLRepo's first line `N D K`; base: added to features and labels. compressed: by gzip, with no
    name or time inside. Values are the shortest decimals that give back the same float32.
    """
    from xmc_stream.datasets.kernels.format import write_rows

    buffer = np.empty(0, np.uint8)
    first = f"{n_samples} {n_features} {n_labels}\n".encode()
    file: Any

    def append(x_indptr: Any, x_indices: Any, x_data: Any, y_indptr: Any, y_indices: Any) -> None:
        nonlocal buffer
        need = text_bytes(len(x_indptr) - 1, len(x_indices), len(y_indices), n_features, n_labels)
        if need > len(buffer):
            buffer = np.empty(need, np.uint8)
        n = write_rows(
            np.asarray(x_indptr, np.int64), x_indices, x_data, np.asarray(y_indptr, np.int64), y_indices, base, buffer
        )
        file.write(buffer[:n].data)

    if path == STANDARD_OUTPUT:
        file = sys.stdout.buffer
        if header:
            file.write(first)
        yield append
        file.flush()
        return
    with open(path, "wb") as raw, ExitStack() as stack:
        file = raw
        if compressed:
            file = stack.enter_context(gzip.GzipFile("", "wb", 4, raw, mtime=0))
        if header:
            file.write(first)
        yield append


def text_bytes(n_rows: int, n_values: int, n_positives: int, n_features: int, n_labels: int) -> int:
    """Bytes of so many rows as text, at most."""
    from xmc_stream.datasets.kernels.format import VALUE_BYTES

    feature, label = len(str(n_features + 1)), len(str(n_labels + 1))
    return 2 * n_rows + (feature + VALUE_BYTES + 2) * n_values + (label + 1) * n_positives
