"""Parts that are lines of text, a row each, read by the compiled parser."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from xmc_stream.convert.lines.files import Buffers, TextRange
from xmc_stream.convert.lines.parser import LISTED, UNKNOWN, XMLREPO, Dialect, Parser
from xmc_stream.convert.options import Like
from xmc_stream.convert.rows import Rows, positives, row_with_minus_one
from xmc_stream.errors import InputError


@dataclass(frozen=True)
class LinesPart:
    """Lines of X and Y together, or of one of them.

    sides: ("X", "Y"), ("X",), or ("Y",) where lines are `l:v l:v ...` and a label of the value zero is none. bounds: of
    the ids of both sides, or of the one. unlabelled: labels in the lines are passed over, whatever their ids.
    """

    text: TextRange
    buffers: Buffers
    sides: tuple[str, ...]
    bounds: tuple[int, ...]
    like: Like | None
    dialect: Dialect = XMLREPO
    unlabelled: bool = False

    def parser(self, name: str, first_line: Any = 1) -> Parser:
        """What reads the lines."""
        noun = "label" if self.sides == ("Y",) else "feature"
        n_labels = self.bounds[1] if len(self.bounds) == 2 else None
        dialect = self.dialect
        if self.unlabelled:
            n_labels, dialect = UNKNOWN, replace(dialect, y_base=0)
        return Parser(name, self.bounds[0], n_labels, self.like, first_line, noun, dialect)

    def blocks(self, notes: dict[str, Any]) -> Iterator[tuple[Rows, ...]]:
        """The rows; notes: bytes_read, and those of the parser. Raises InputError with file and line, MemoryLimitError."""
        notes["bytes_read"] = 0
        with self.text.open(self.buffers) as file:
            parser = self.parser(file.name, file.first_line)
            for window in file.windows():
                for x_indptr, x_indices, x_data, y_indptr, y_indices in parser.blocks(window):
                    notes["bytes_read"] = file.bytes_read
                    if self.unlabelled:
                        yield (x_indptr, x_indices, x_data), (np.zeros_like(x_indptr), y_indices[:0], None)
                    elif len(self.sides) == 2:
                        yield (x_indptr, x_indices, x_data), (y_indptr, y_indices, None)
                    elif self.sides == ("X",):
                        yield ((x_indptr, x_indices, x_data),)
                    else:
                        if (row := row_with_minus_one(x_indptr, x_data)) is not None:
                            line = file.first_line() + parser.n_lines - (len(x_indptr) - 1) + row
                            raise InputError(
                                f"{file.name}:{line}: a label has the value -1: what is not zero is a positive, leave it out"
                            )
                        yield ((*positives(x_indptr, x_indices, x_data != 0), None),)
                file.n_lines = parser.n_lines
            notes |= parser.notes()
            if self.unlabelled:
                notes["y_ids"] = None


def attributes_of(read: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """What the parts of a source counted, as attributes of the dataset. read: a part's file, for people, and its notes."""
    names = ("skipped", "dropped_features", "dropped_labels", "summed_duplicates", "blank_lines")
    totals: dict[str, Any] = dict.fromkeys(names, 0)
    rows: list[list[Any]] = []
    for file, notes in read:
        for name in names:
            totals[name] += notes[name]
        rows += [[file, *row] for row in notes["skipped_rows"][: LISTED - len(rows)]]
    counts = {name: count for name, count in totals.items() if count}
    return {**counts, "skipped_rows": rows} if rows else counts
