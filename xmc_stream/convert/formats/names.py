"""Names of features or labels that stand in a file of their own: one a line, or as JSON objects with a title."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from xmc_stream.convert.lines.files import file_identity, numbered_lines
from xmc_stream.convert.matrices.source import write_names
from xmc_stream.convert.source import PartRead, Settled, Source
from xmc_stream.errors import InputError
from xmc_stream.runtime.job import Phase, Receipt

_FIELDS = ("title", "name", "label", "text")  # of an object, as in lbl.json of the Extreme Classification Repository
_LONGEST = 2**23  # bytes of a line


def store_names(path: Path, target: Path, n_names: int | None, what: str) -> int:
    """Write the names in a text as a group at `target`; returns how many.

    what: "labels" or "features"; n_names: how many there must be, None for any number. Raises InputError naming file and
    line.
    """
    n = write_names(target, (_name(line, f"{path}:{i}") for i, line in numbered_lines(path, _LONGEST)))
    if n_names is not None and n != n_names:
        raise InputError(f"{path}:{n}: there are {n:,} names for {n_names:,} {what}: one a line")
    return n


def _name(line: bytes, where: str) -> str:
    try:
        text = line.decode().rstrip("\r")
        record = json.loads(text) if text.startswith('{"') else None
        if isinstance(record, dict):
            text = next(record[field] for field in _FIELDS if isinstance(record.get(field), str))
        text.encode()
    except StopIteration:
        raise InputError(f"{where}: there is no name in the object: give one of {', '.join(_FIELDS)}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: the name is not readable ({error}): write it in UTF-8, one a line") from None
    return text


class NamedSource:
    """A source whose features or labels have names in files of their own: all else is that source's.

    files: by "features" and "labels". Where the source does not say how many there are, the names do.
    """

    def __init__(self, source: Source, files: Mapping[str, Path]) -> None:
        self._source = source
        self._files = files
        self.files = [*source.files, *files.values()]
        self.identity = {**source.identity, "names": [[what, *file_identity(path)] for what, path in files.items()]}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for while it is unpickled
            raise AttributeError(name)
        return getattr(self._source, name)

    def settle(self, work: Path, parts: list[PartRead]) -> Generator[Phase, list[Receipt], Settled]:
        """What the source settles, and the names."""
        settled = yield from self._source.settle(work, parts)
        for what, path in self._files.items():
            if f"names/{what}" in settled.folders:
                raise InputError(f"{path}: the {what} have names in the input itself: leave this file out")
            size = f"n_{what}"
            target = work / "names" / what
            said = getattr(self._source, size)
            n, least = store_names(path, target, said, what), getattr(settled, size)
            if n < least:
                raise InputError(f"{path}:{n}: there are {n:,} names for {least:,} {what}: one a line")
            folders = {**settled.folders, f"names/{what}": target}
            settled = replace(settled, folders=folders, **{size: n})  # type: ignore[arg-type]
        return settled
