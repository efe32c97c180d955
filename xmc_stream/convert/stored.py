"""X and Y in memory as a dataset of this process, without parts and pieces: rows go straight into its arrays, in one pass.

This is how estimators learn from matrices, and how models are asked about large ones. A kill leaves nothing to go on from.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from xmc_stream.convert.matrices.memory import dense_side
from xmc_stream.convert.matrices.rules import checked_rows
from xmc_stream.convert.matrices.sides import Side, block_bytes, fitted
from xmc_stream.convert.matrices.whole import in_memory
from xmc_stream.convert.plan import plan_writing
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.names import new_names
from xmc_stream.store.new_dataset import load_kernels, new_dataset
from xmc_stream.store.places import writing
from xmc_stream.system.memory import MemoryLimit


def stored(
    X: Any, Y: Any, path: Path, memory_limit: str | float | None, normalize: str = "none", names: Sequence[bytes] = ()
) -> Dataset:
    """X, a scipy matrix or an array, and Y, a scipy matrix, as a dataset in a temporary folder of this process.

    normalize: "l2" or "none"; names: of the labels, where they have some. Raises InputError and MemoryLimitError as a
    conversion does, StoreError where there is no room on the disk.
    """
    from xmc_stream.kernels.csr import scale_rows_l2

    x: Side = in_memory(X, "X") if hasattr(X, "tocsr") else dense_side(X, "X")
    y = in_memory(Y, "Y")
    n_features, n_labels = X.shape[1], Y.shape[1]
    load_kernels(x.n_rows, n_features, n_labels)
    plan = partial(
        plan_writing, threads=1, n_features=n_features, n_labels=n_labels, x_entries=x.entries, y_entries=y.entries
    )
    limit = MemoryLimit.kept(memory_limit)
    budget = limit.budget()
    limit.check(lambda budget: {"X as CSR": x.load_bytes, **plan(budget).needs}, "writing X", budget)
    room = budget - x.load_bytes - 8 * (n_features + n_labels)
    x_size, y_size = (fitted(room, block_bytes(False), side.entries, side.n_rows) for side in (x, y))
    about = {"source": "scipy matrices", "source_format": "scipy matrices", "normalize": normalize}
    with (
        writing(path, "try again"),
        new_dataset(path, n_features, n_labels, about, plan(budget).max_bytes) as writer,
    ):
        rows: Any
        for rows in checked_rows(x, x_size):
            if normalize == "l2":
                scale_rows_l2(rows[0], rows[2])
            writer.append_X(*rows)
        for indptr, indices, _ in checked_rows(y, y_size):
            writer.append_Y(indptr, indices)
        if names:
            with new_names(writer.folder / "names" / "labels") as labels:
                labels.append(names)
    return Dataset(path)
