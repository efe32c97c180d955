"""Names of features or labels that stand in a file of their own: one a line, or as JSON objects with a title."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xmc_stream.convert.lines.files import Buffers, TextRange, file_identity
from xmc_stream.convert.source import PartRead, Settled, Source
from xmc_stream.errors import InputError
from xmc_stream.runtime.job import Phase, Receipt
from xmc_stream.store.names import new_names

_FIELDS = ("title", "name", "label", "text")  # of an object, as in lbl.json of the Extreme Classification Repository
_WINDOW = 2**20


def store_names(text: TextRange, target: Path, n_names: int | None, what: str) -> int:
    """Write the names in a text as a group at `target`; returns how many.

    what: "labels" or "features"; n_names: how many there must be, None for any number. Raises InputError naming file and
    line.
    """
    with text.open(Buffers(_WINDOW, 16 * _WINDOW)) as file, new_names(target) as names:
        for window in file.windows():
            lines = window.tobytes().split(b"\n")[:-1]
            names.append([_name(line, f"{file.name}:{file.n_lines + i}") for i, line in enumerate(lines, 1)])
            file.n_lines += len(lines)
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
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: the name is not readable ({error}): write it in UTF-8, one a line") from None


@dataclass(frozen=True)
class StoreNames:
    """A job: `store_names`."""

    text: TextRange
    target: str
    n_names: int | None
    what: str

    @property
    def key(self) -> str:
        """Names it in its run."""
        return f"names/{self.what}"

    def run(self) -> Receipt:
        """Write the names; the receipt has n."""
        return {"n": store_names(self.text, Path(self.target), self.n_names, self.what)}


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
            job = StoreNames(TextRange(path), str(target), said, what)
            (receipt,) = yield Phase(f"names of {what}", [job], twice=True)
            if receipt["n"] < getattr(settled, size):
                raise InputError(
                    f"{path}:{receipt['n']}: there are {receipt['n']:,} names for {getattr(settled, size):,} {what}: one a line"
                )
            folders = {**settled.folders, f"names/{what}": target}
            settled = replace(settled, folders=folders, **{size: receipt["n"]})
        return settled
