"""Transposition of entries in plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np


def scatter_lines(
    indptr: Any, indices: Any, data: Any, first_line: int, places: Any, out_indices: Any, out_data: Any
) -> None:
    lines = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    scatter_entries(indices, lines, data, first_line, places, out_indices, out_data)


def sort_by_bucket(
    indptr: Any,
    indices: Any,
    data: Any,
    bucket_of: Any,
    bounds: Any,
    starts: Any,
    out_columns: Any,
    out_lines: Any,
    out_data: Any,
) -> None:
    buckets = bucket_of[indices]
    order = np.argsort(buckets, kind="stable")
    starts[:] = np.searchsorted(buckets[order], np.arange(len(starts)))
    out_columns[: len(order)] = (indices - bounds[buckets])[order]
    out_lines[: len(order)] = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))[order]
    if len(data):
        out_data[: len(order)] = data[order]


def scatter_entries(
    columns: Any, lines: Any, data: Any, first_line: int, places: Any, out_indices: Any, out_data: Any
) -> None:
    for p, (column, line) in enumerate(zip(columns, lines, strict=True)):
        out_indices[places[column]] = first_line + int(line)
        if len(data):
            out_data[places[column]] = data[p]
        places[column] += 1
