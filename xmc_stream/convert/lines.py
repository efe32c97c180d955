"""Parts that are lines of text, a row each, read by the compiled parser."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from xmc_stream.convert.parser import Parser
from xmc_stream.convert.scipy_matrices import positives
from xmc_stream.convert.source import Like, Rows
from xmc_stream.convert.text import Buffers, TextRange


@dataclass(frozen=True)
class LinesPart:
    """Lines of X and Y together, or of one of them.

    sides: ("X", "Y"), ("X",), or ("Y",) where lines are `l:v l:v ...` and a label of the value zero is none. bounds: of
    the ids of both sides, or of the one.
    """

    text: TextRange
    buffers: Buffers
    sides: tuple[str, ...]
    bounds: tuple[int, ...]
    like: Like | None

    def parser(self, name: str, first_line: Any = 1) -> Parser:
        """What reads the lines."""
        noun = "label" if self.sides == ("Y",) else "feature"
        n_labels = self.bounds[1] if len(self.bounds) == 2 else None
        return Parser(name, self.bounds[0], n_labels, self.like, first_line, noun)

    def blocks(self, notes: dict[str, Any]) -> Iterator[tuple[Rows, ...]]:
        """The rows; notes: rows, bytes_read. Raises InputError with file and line, MemoryLimitError."""
        notes |= {"rows": 0, "bytes_read": 0}
        with self.text.open(self.buffers) as file:
            parser = self.parser(file.name, file.first_line)
            for piece in file.pieces():
                for x_indptr, x_indices, x_data, y_indptr, y_indices in parser.blocks(piece):
                    notes["bytes_read"] = file.bytes_read
                    if len(self.sides) == 2:
                        yield (x_indptr, x_indices, x_data), (y_indptr, y_indices, None)
                    elif self.sides == ("X",):
                        yield ((x_indptr, x_indices, x_data),)
                    else:
                        yield ((*positives(x_indptr, x_indices, x_data != 0), None),)
                file.lines = notes["rows"] = parser.n_rows
