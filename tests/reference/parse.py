"""Lines of text to rows in plain Python: a regular expression a line, float() for every value."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Row = tuple[list[int], list[tuple[int, np.float32]]]

_LABELS = re.compile(rb"\d+(?:,[ \t]*\d+)*(?![^ \t])")
_LIBSVM_LABELS = re.compile(rb"[ \t]*(\+?\d+(?:\.0*)?(?:,[ \t]*\+?\d+(?:\.0*)?)*(?![^ \t]))")
_FEATURE = re.compile(rb"(\d+):([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)")


class BadLineError(ValueError):
    """A line that is no row. line: its number in the text, from 1."""

    def __init__(self, line: int) -> None:
        super().__init__(line)
        self.line = line


@dataclass(frozen=True)
class Rules:
    """As the parser's dialect; a base of None allows ids from 0 to the size."""

    libsvm: bool = False
    x_base: int | None = 0
    y_base: int | None = 0
    skip: bool = False
    sum_duplicates: bool = False
    drop_unseen: bool = False


XMLREPO = Rules()


@dataclass
class Read:
    """Rows of sorted labels and sorted (feature, value) pairs, and what was counted; skipped: numbers of lines."""

    rows: list[Row] = field(default_factory=list)
    lines: int = 0
    blank_lines: int = 0
    skipped: list[int] = field(default_factory=list)
    dropped_features: int = 0
    dropped_labels: int = 0
    summed_duplicates: int = 0


def parse(text: bytes, n_features: int, n_labels: int) -> list[Row]:
    """The rows of XMLRepo text."""
    return read(text, n_features, n_labels, XMLREPO).rows


def read(text: bytes, n_features: int, n_labels: int, rules: Rules) -> Read:
    """All that a text holds. Raises BadLineError for the first bad line, unless such lines are skipped."""
    lines = text.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    result = Read(lines=len(lines))
    for number, line in enumerate(lines, start=1):
        line = line.removesuffix(b"\r")
        if rules.libsvm:
            line = line.split(b"#")[0]
            if not line.strip(b" \t"):
                result.blank_lines += 1
                continue
        try:
            _add_row(result, line, n_features, n_labels, rules)
        except ValueError:
            if not rules.skip:
                raise BadLineError(number) from None
            result.skipped.append(number)
    return result


def _add_row(result: Read, line: bytes, n_features: int, n_labels: int, rules: Rules) -> None:
    """Add a line's row. Raises ValueError where it is none."""
    found = (_LIBSVM_LABELS if rules.libsvm else _LABELS).match(line)
    labels = [_id(label.strip(b" \t+").split(b".")[0]) for label in found[0].split(b",")] if found else []
    tokens = [token for token in re.split(rb"[ \t]+", line[found.end() if found else 0 :]) if token]
    matches = [_FEATURE.fullmatch(token) for token in tokens]
    if None in matches:
        raise ValueError
    pairs = [(_id(match[1]), _float32(match[2])) for match in matches]
    kept_labels = _kept(labels, labels, n_labels, rules.y_base, rules)
    kept_pairs = _kept(pairs, [feature for feature, _ in pairs], n_features, rules.x_base, rules)
    if rules.sum_duplicates:
        row = sorted(set(kept_labels)), _added(kept_pairs)
    else:
        row = sorted(kept_labels), sorted(kept_pairs, key=lambda pair: pair[0])
        if len(set(kept_labels)) < len(kept_labels) or len({feature for feature, _ in kept_pairs}) < len(kept_pairs):
            raise ValueError
    result.rows.append(row)
    result.dropped_labels += len(labels) - len(kept_labels)
    result.dropped_features += len(pairs) - len(kept_pairs)
    result.summed_duplicates += len(kept_labels) - len(row[0]) + len(kept_pairs) - len(row[1])


def _kept(entries: list[Any], ids: list[int], n: int, base: int | None, rules: Rules) -> list[Any]:
    """The entries with ids among n from the base on; others are left out where they may be."""
    low, high = (0, n + 1) if base is None else (base, base + n)
    if any(i < low for i in ids) or (any(i >= high for i in ids) and not rules.drop_unseen):
        raise ValueError
    return [entry for entry, i in zip(entries, ids, strict=True) if i < high]


def _added(pairs: list[tuple[int, np.float32]]) -> list[tuple[int, np.float32]]:
    """Pairs of the same feature as one, the values added in float32 from the smallest up."""
    sums: dict[int, np.float32] = {}
    with np.errstate(over="ignore", invalid="ignore"):
        for feature, value in sorted(pairs):
            sums[feature] = sums[feature] + value if feature in sums else value
    if not np.isfinite(list(sums.values())).all():
        raise ValueError
    return list(sums.items())


def _id(digits: bytes) -> int:
    """The number, or one beyond all bounds where Python refuses to read so many digits."""
    digits = digits.lstrip(b"0")
    return int(digits or b"0") if len(digits) < 100 else 10**100


def _float32(number: bytes) -> np.float32:
    """The number as float32(float()). Raises ValueError where that is infinite."""
    with np.errstate(over="ignore"):
        value = np.float32(float(number))
    if np.isinf(value):
        raise ValueError
    return value
