"""Where records of delimited text begin, by Python's csv."""

from __future__ import annotations

import csv
from collections.abc import Iterator


def record_starts(text: bytes, delimiter: str, quote: str | None) -> list[int]:
    """The byte behind the newline of each record, sound or not, that ends in one."""
    starts: list[int] = []
    at = 0

    def lines() -> Iterator[str]:
        nonlocal at
        for line in text.decode("latin-1").split("\n")[:-1]:
            at += len(line) + 1
            yield line + "\n"

    quoting = csv.QUOTE_NONE if quote is None else csv.QUOTE_MINIMAL
    rows = csv.reader(lines(), delimiter=delimiter, quotechar=quote, strict=True, quoting=quoting)
    while True:
        try:
            next(rows)
        except StopIteration:
            return starts
        except csv.Error as error:
            if "unexpected end" in str(error):
                return starts
        starts.append(at)
