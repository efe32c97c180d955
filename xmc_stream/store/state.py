"""What a run keeps between its jobs: the state of a unit of classes after a round, and what a search job found.

Scratch of one run: written whole or not at all, read by the next jobs, removed when no job needs it any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.store.chunks import read_small
from xmc_stream.store.encoding import (
    SCRATCH_CHUNK_BYTES,
    ArrayWriter,
    MatrixWriter,
    new_store,
)
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.store.nodes import Group

# columns of a state's figures, one row a class
BIAS, DUAL, KEPT, INSIDE, OUTSIDE, LOSS, STATUS, N_FIGURES = range(8)
OPEN, DONE, EMPTY = 0.0, 1.0, 2.0  # values of STATUS: still to solve; within the tolerance; without positives
WRITER_BYTES = 6 * 2 * SCRATCH_CHUNK_BYTES  # two matrices of three arrays: a chunk and its checksummed copy each


class UnitStateWriter:
    """active: classes x N (csr), its values alpha; weights: D x classes (csc); figures: classes x N_FIGURES."""

    def __init__(self, group: Group, n_classes: int, n_samples: int, n_features: int) -> None:
        chunk = SCRATCH_CHUNK_BYTES
        shape = (n_classes, n_samples)
        self.active = MatrixWriter(group.create_group("active"), "csr_matrix", shape, np.float64, chunk)
        self.weights = MatrixWriter(
            group.create_group("weights"), "csc_matrix", (n_features, n_classes), np.float32, chunk
        )
        self.figures = np.zeros((n_classes, N_FIGURES))


@contextmanager
def new_unit_state(path: Path, n_classes: int, n_samples: int, n_features: int) -> Iterator[UnitStateWriter]:
    """A unit's state after a round, under its name when the block ends well."""
    with new_store(path, {}) as group:
        writer = UnitStateWriter(group, n_classes, n_samples, n_features)
        yield writer
        writer.active.close()
        writer.weights.close()
        _write(group, "figures", writer.figures.ravel())


class UnitState:
    """A unit's state, opened for reading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.figures = read_small(path, "figures").reshape(-1, N_FIGURES)
        self.active = SparseMatrix(path / "active")
        self.weights = SparseMatrix(path / "weights")

    @property
    def bytes_read(self) -> int:
        """Bytes of the ranges read so far."""
        return self.active.bytes_read + self.weights.bytes_read


class FoundWriter:
    """rows: classes x N (csr), values the scores, best first in each class.

    losses (classes,): summed over the rows searched; best (classes,): the best score outside the active set, if found.
    """

    def __init__(self, group: Group, n_classes: int, n_samples: int) -> None:
        self.rows = MatrixWriter(
            group.create_group("rows"), "csr_matrix", (n_classes, n_samples), np.float32, SCRATCH_CHUNK_BYTES
        )
        self.losses = np.zeros(n_classes)
        self.best = np.full(n_classes, -np.inf)


@contextmanager
def new_found(path: Path, n_classes: int, n_samples: int) -> Iterator[FoundWriter]:
    """What a search job found for a run of classes, under its name when the block ends well."""
    with new_store(path, {}) as group:
        writer = FoundWriter(group, n_classes, n_samples)
        yield writer
        writer.rows.close()
        _write(group, "losses", writer.losses)
        _write(group, "best", writer.best)


class Found:
    """What a search job found, opened for reading."""

    def __init__(self, path: Path) -> None:
        self.rows = SparseMatrix(path / "rows")
        self.losses, self.best = read_small(path, "losses"), read_small(path, "best")


def _write(group: Group, name: str, values: NDArray[Any]) -> None:
    writer = ArrayWriter(group, name, values.dtype, SCRATCH_CHUNK_BYTES)
    writer.append(values)
    writer.close()
