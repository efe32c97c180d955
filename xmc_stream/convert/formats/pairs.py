"""Filter files: lines `row label`, from zero, plain or compressed, of pairs that a set's evaluation leaves out.

Sets whose labels are documents of the same kind as their samples come with one (filter_labels_test.txt): a document
must not be predicted for itself. Files of the pairs whose labels are known (`observed`) look the same. Pairs may come in
any order and more than once; blank lines are skipped.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.convert.lines.files import numbered_lines, stamps, unchanged
from xmc_stream.convert.messages import shown
from xmc_stream.errors import InputError
from xmc_stream.system.memory import MemoryLimit

_LINE = re.compile(rb"[ \t]*(\d{1,18})[ \t]+(\d{1,18})[ \t]*\r?\n?")
_LONGEST_LINE = 1000
_PAIR_BYTES = 20  # of an array that grows, and its copy; later a mark and a copy without what comes twice
_STEP = 1 << 16  # pairs read between two looks at the limit; rows written at a time


def store_pairs(source: Path, target: Path, n_samples: int, n_labels: int, limit: MemoryLimit) -> None:
    """Write the pairs of a filter file as a matrix of ones (n_samples x n_labels, csr) at `target`.

    Raises InputError with file and line for what is no pair or lies outside the matrix, MemoryLimitError where the pairs
    do not fit in memory (they are sorted there, 20 bytes each).
    """
    from xmc_stream.store.encoding import SCRATCH_CHUNK_BYTES, new_matrix

    if n_samples * n_labels >= 2**63:
        raise InputError(f"{source}: {n_samples} rows of {n_labels} labels are too many for a filter: cut the rows")
    with unchanged(stamps([source])):
        keys = _distinct(_keys(source, n_samples, n_labels, limit))
    with new_matrix(target, "csr_matrix", (n_samples, n_labels), None, chunk_bytes=SCRATCH_CHUNK_BYTES) as writer:
        for start in range(0, n_samples, _STEP):
            rows = np.arange(start, min(start + _STEP, n_samples) + 1, dtype=np.int64)
            ends = np.searchsorted(keys, rows * n_labels)
            writer.append(np.diff(ends), np.empty(0, np.int64))
            for first in range(int(ends[0]), int(ends[-1]), _STEP):
                window = keys[first : min(first + _STEP, int(ends[-1]))]
                writer.append(np.empty(0, np.int64), window % n_labels)


def _distinct(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """The keys ascending, each once."""
    keys.sort()
    first = np.ones(len(keys), np.bool_)
    np.not_equal(keys[1:], keys[:-1], out=first[1:])
    return keys[first]


def refuse_no_pairs(source: Path) -> None:
    """Raise InputError with file and line for what is no pair, before the sizes of the matrix are known."""
    for _ in _pairs(source):
        pass


def _pairs(source: Path) -> Iterator[tuple[int, int, int]]:
    """Number, row and label of each line that is not blank."""
    for number, line in numbered_lines(source, _LONGEST_LINE):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line) if len(line) < _LONGEST_LINE else None
        if match is None:
            raise InputError(
                f"{source}:{number}: {shown(line)} is not a pair 'row label' of numbers from zero: correct it"
            )
        yield number, int(match[1]), int(match[2])


def _keys(source: Path, n_samples: int, n_labels: int, limit: MemoryLimit) -> NDArray[np.int64]:
    """row * n_labels + label of each line."""
    budget = limit.budget()
    keys = array("q")
    for number, row, label in _pairs(source):
        if row >= n_samples or label >= n_labels:
            kind, value, bound = ("row", row, n_samples) if row >= n_samples else ("label", label, n_labels)
            raise InputError(
                f"{source}:{number}: {kind} {value} is not below {bound}, the data's number of {kind}s: they count from "
                "0; is this the filter of another set?"
            )
        if len(keys) % _STEP == 0:
            limit.check({f"{source.name}": _PAIR_BYTES * (len(keys) + _STEP)}, "leaving out pairs", budget)
        keys.append(row * n_labels + label)
    return np.frombuffer(keys, np.int64)
