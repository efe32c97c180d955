"""Names of features or labels that stand in a file of their own: one a line, or as JSON objects with a title."""

from __future__ import annotations

import json
from pathlib import Path

from xmc_stream.convert.text import Buffers, TextRange
from xmc_stream.errors import InputError
from xmc_stream.store.names import new_names

_FIELDS = ("title", "name", "label", "text")  # of an object, as in lbl.json of the Extreme Classification Repository
_PIECE = 2**20


def store_names(source: Path, target: Path, n_names: int | None, what: str) -> int:
    """Write the names in a text as a group at `target`; returns how many.

    what: "labels" or "features"; n_names: how many there must be, None for any number. Raises InputError naming file and
    line.
    """
    with TextRange(source).open(Buffers(_PIECE, 16 * _PIECE)) as file, new_names(target) as names:
        for piece in file.pieces():
            lines = piece.tobytes().split(b"\n")
            if not lines[-1]:
                lines.pop()  # behind the last newline
            names.append([_name(line, f"{file.name}:{file.lines + i}") for i, line in enumerate(lines, 1)])
            file.lines += len(lines)
        if n_names is not None and names.n != n_names:
            raise InputError(f"{file.name}:{names.n}: there are {names.n:,} names for {n_names:,} {what}: one a line")
        return names.n


def _name(line: bytes, where: str) -> bytes:
    try:
        text = line.decode().rstrip("\r")
        record = json.loads(text) if text.startswith('{"') else None
        if isinstance(record, dict):
            text = next(record[field] for field in _FIELDS if isinstance(record.get(field), str))
        return text.encode()
    except StopIteration:
        raise InputError(f"{where}: there is no name in the object: give one of {', '.join(_FIELDS)}") from None
    except ValueError as error:
        raise InputError(f"{where}: the name is not readable ({error}): write it in UTF-8, one a line") from None
