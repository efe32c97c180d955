"""The memory plan of a conversion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xmc_stream.convert import Source

_MAX_TRANSPOSITION = 2**28  # bytes of the buffers that make Y by columns: beyond, more passes cost little
_MIN_TRANSPOSITION = 2**22


@dataclass(frozen=True)
class ConversionPlan:
    """budget: bytes there are; max_bytes: of the buffers that make Y by columns; needs: bytes by component, at most."""

    budget: int
    max_bytes: int
    needs: dict[str, int]


def plan_memory(source: Source, budget: int, x_entries: int | None, y_entries: int | None) -> ConversionPlan:
    """Fit a conversion into a budget. x_entries, y_entries: values and positives, at most or as foreseen; None: many.

    Three stages follow each other: rows are read and a chunk of each array is buffered (the store copies a full chunk
    to check it); the last chunks are written (copied twice, being padded); Y by columns is made.
    """
    from xmc_stream.store.encoding import CHUNK_BYTES, index_dtype

    def chunk(items: int | None, itemsize: int) -> int:
        return CHUNK_BYTES if items is None else min(CHUNK_BYTES, items * itemsize + 2**16)

    n_rows, n_features, n_labels = source.n_samples, source.n_features, source.n_labels
    chunks = [
        chunk(n_rows + 1, 8),
        chunk(x_entries, index_dtype(n_features).itemsize),
        chunk(x_entries, 4),
        chunk(n_rows + 1, 8),
        chunk(y_entries, index_dtype(n_labels).itemsize),
        chunk(n_rows, 4),
    ]
    counts = 8 * (n_features + n_labels)
    kept = {**source.held, f"counts of {n_features} features and {n_labels} labels": counts}
    free = budget - sum(kept.values())

    reading = {"chunks being written": sum(chunks) + max(chunks)}
    reading["blocks of rows"] = source.fit(free - reading["chunks being written"])
    closing = {"chunks being written": sum(chunks) + 2 * max(chunks)}
    columns = [chunk(n_labels + 1, 8), chunk(y_entries, index_dtype(n_rows).itemsize)]
    counted = chunk(max(n_features, n_labels), 8)
    # where each column begins and ends is held in four arrays, each as long as there are labels
    by_columns = max(3 * counted, counted + sum(columns) + 2 * max(columns) + 4 * 8 * n_labels)
    max_bytes = max(_MIN_TRANSPOSITION, min(_MAX_TRANSPOSITION, budget // 4, free - by_columns))
    entries = max_bytes if y_entries is None else min(max_bytes, 16 * y_entries + 2**16)
    transposing = {"chunks being written": by_columns, "labels by columns": entries}
    largest = max((reading, closing, transposing), key=lambda stage: sum(stage.values()))
    return ConversionPlan(budget, max_bytes, {**kept, **largest})
