"""The parser beside its twin: what test_parse.py and test_fuzz_parser.py compare."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray
from reference import parse as twin

from xmc_stream.convert.lines.parser import Dialect, Parser
from xmc_stream.errors import InputError

NAME = "data.txt"


def lines_of(text: bytes) -> NDArray[np.uint8]:
    """A text as the parser gets it: the last line has a newline too."""
    return np.frombuffer(bytearray(text if text.endswith(b"\n") or not text else text + b"\n"), np.uint8)


def read(text: bytes, n_features: int, n_labels: int, rules: twin.Rules) -> tuple[list[twin.Row], dict[str, Any]]:
    """Rows as the twin gives them, and notes; what the arrays must be is checked on the way."""
    rows = []
    parser = Parser(NAME, n_features, n_labels, first_line=1, dialect=Dialect(**asdict(rules)))
    for x_indptr, x_indices, x_data, y_indptr, y_indices in parser.blocks(lines_of(text)):
        assert x_indptr[0] == y_indptr[0] == 0
        assert len(x_indptr) == len(y_indptr)
        assert (x_indptr[-1], y_indptr[-1]) == (len(x_indices), len(y_indices))
        assert x_data.dtype == np.float32
        for i in range(len(x_indptr) - 1):
            x = slice(x_indptr[i], x_indptr[i + 1])
            labels = y_indices[y_indptr[i] : y_indptr[i + 1]].tolist()
            rows.append((labels, list(zip(x_indices[x].tolist(), x_data[x].copy(), strict=True))))
    assert parser.n_rows == len(rows)
    return rows, parser.notes()


def bits(rows: list[twin.Row]) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Rows with the bits of their values, so that -0.0 is not 0.0."""
    return [(labels, [(j, int(v.view(np.uint32))) for j, v in pairs]) for labels, pairs in rows]


def agree(text: bytes, n_features: int, n_labels: int, rules: twin.Rules = twin.XMLREPO) -> bool:
    """The same rows and counts, or an error in the same line; returns whether there are rows."""
    bad_line, message = 0, ""
    try:
        expected = twin.read(text, n_features, n_labels, rules)
    except twin.BadLineError as error:
        bad_line = error.line
    try:
        rows, notes = read(text, n_features, n_labels, rules)
    except InputError as error:
        message = str(error)
    if bad_line or message:
        assert message.startswith(f"{NAME}:{bad_line}: "), message
        assert message.isprintable()  # hence one line
        assert len(message) < 300
        return False
    assert bits(rows) == bits(expected.rows)
    assert notes["skipped"] == len(expected.skipped)
    assert [line for line, _ in notes["skipped_rows"]] == expected.skipped[:1000]
    assert all(reason.isprintable() and len(reason) < 300 for _, reason in notes["skipped_rows"])
    for count in ("lines", "blank_lines", "dropped_features", "dropped_labels", "summed_duplicates"):
        assert notes[count] == getattr(expected, count), count
    for name, ids in (
        ("x_ids", [feature for _, pairs in rows for feature, _ in pairs]),
        ("y_ids", [label for labels, _ in rows for label in labels]),
    ):
        assert notes[name] == ([min(ids), max(ids)] if ids else None)
    return bool(rows)
