"""XMLRepo text in plain Python: a regular expression a line, float() for every value."""

from __future__ import annotations

import re

import numpy as np

Row = tuple[list[int], list[tuple[int, np.float32]]]

_LABELS = re.compile(rb"\d+(?:,[ \t]*\d+)*(?![^ \t])")
_FEATURE = re.compile(rb"(\d+):([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)")


class BadLineError(ValueError):
    """A line that is no row. line: its number in the text, from 1."""

    def __init__(self, line: int) -> None:
        super().__init__(line)
        self.line = line


def parse(text: bytes, n_features: int, n_labels: int) -> list[Row]:
    """Rows of sorted labels and sorted (feature, value) pairs."""
    lines = text.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    rows = []
    for number, line in enumerate(lines, start=1):
        row = _row(line.removesuffix(b"\r"), n_features, n_labels)
        if row is None:
            raise BadLineError(number)
        rows.append(row)
    return rows


def _row(line: bytes, n_features: int, n_labels: int) -> Row | None:
    field = _LABELS.match(line)
    labels = sorted(int(label) for label in field[0].split(b",")) if field else []
    pairs = []
    for token in re.split(rb"[ \t]+", line[field.end() if field else 0 :]):
        if token:
            feature = _FEATURE.fullmatch(token)
            if feature is None:
                return None
            with np.errstate(over="ignore"):
                pairs.append((int(feature[1]), np.float32(float(feature[2]))))
    pairs.sort(key=lambda pair: pair[0])
    features = [feature for feature, _ in pairs]
    twice = len(set(labels)) < len(labels) or len(set(features)) < len(features)
    beyond = any(label >= n_labels for label in labels) or any(feature >= n_features for feature in features)
    if twice or beyond or any(np.isinf(value) for _, value in pairs):
        return None
    return labels, pairs
