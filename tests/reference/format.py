"""Rows as text in plain Python."""

from __future__ import annotations

from typing import Any


def format_rows(y_indptr: Any, y_indices: Any, x_indptr: Any, x_indices: Any, x_data: Any, base: int) -> bytes:
    lines = []
    for i in range(len(x_indptr) - 1):
        labels = [str(label + base) for label in y_indices[y_indptr[i] : y_indptr[i + 1]]]
        row = slice(x_indptr[i], x_indptr[i + 1])
        pairs = [f" {j + base}:{value:.9g}" for j, value in zip(x_indices[row], x_data[row], strict=True)]
        lines.append(",".join(labels) + "".join(pairs) + "\n")
    return "".join(lines).encode()
