"""Words of texts, labels in texts, and lines of JSON and CSV, in plain Python."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Collection
from typing import Any

_WORD = re.compile(r"(?u)\b\w\w+\b")


def terms(text: str, ngrams: tuple[int, int], stops: Collection[str] = (), lowercase: bool = True) -> Counter[str]:
    """How often each term stands in a text: so many neighbouring words, of those that are not in `stops`."""
    words = [word for word in _WORD.findall(text.lower() if lowercase else text) if word not in stops]
    return Counter(
        " ".join(words[i : i + n]) for n in range(ngrams[0], ngrams[1] + 1) for i in range(len(words) - n + 1)
    )


def json_line(line: bytes) -> dict[str, Any] | None:
    """The object in a line, None where json finds none in it."""
    try:
        found = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def csv_row(content: bytes, delimiter: str, quote: str | None) -> list[str] | None:
    """The cells of a row, None where csv refuses it."""
    quoting = csv.QUOTE_NONE if quote is None else csv.QUOTE_MINIMAL
    try:
        lines = [line + "\n" for line in content.decode().split("\n")[:-1]]
        rows = list(csv.reader(lines, delimiter=delimiter, quotechar=quote, strict=True, quoting=quoting))
    except (csv.Error, UnicodeDecodeError):
        return None
    return rows[0] if rows else []


def label_names(text: str, delimiter: str) -> list[str]:
    """The names in a text that a delimiter parts."""
    return [name.strip() for name in text.split(delimiter)] if text.strip() else []
