"""The rows' own ids: written by each part, joined in the order of the rows."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmc_stream.convert.tfidf.block import Block
from xmc_stream.convert.tfidf.counting import id_of
from xmc_stream.runtime.job import Receipt
from xmc_stream.store.names import WRITER_BYTES, Names, new_names

_BATCH_BYTES = 2**18  # of ids that are written together
_NAME = "ids"
IDS_BYTES = WRITER_BYTES + 2**23


class RowIds:
    """Writes ids of rows into a folder, while `opened` is; nothing without a field."""

    def __init__(self, field: str | None, folder: Path, opened: ExitStack) -> None:
        self._field = field
        self._batch: list[bytes] = []
        self._size = 0
        if field:
            self._names = opened.enter_context(new_names(folder / _NAME))

    def of(self, record: Mapping[str, Any]) -> bytes:
        """The id of a row. Raises BadRowError."""
        return id_of(record, self._field) if self._field else b""

    def add(self, name: bytes) -> None:
        """Take the id of a sound row."""
        if self._field:
            self._batch.append(name)
            self._size += len(name) + 64
            if self._size > _BATCH_BYTES:
                self.close()

    def extend(self, block: Block, start: int, stop: int, column: int) -> None:
        """Take the ids of sound lines."""
        for name in block.values(start, stop, column):
            self.add(name)

    def close(self) -> None:
        """Write what is at hand."""
        if self._batch:
            self._names.append(self._batch)
            self._batch, self._size = [], 0


@dataclass(frozen=True)
class JoinIds:
    """A job: the ids of all parts in one. parts: the folders of the parts; target: made anew."""

    parts: tuple[str, ...]
    target: str
    key: str = "join ids"

    def run(self) -> Receipt:
        """Copy; the receipt has n."""
        with new_names(Path(self.target)) as names:
            for part in self.parts:
                for window in Names(Path(part) / _NAME).windows():
                    names.append(window)
            return {"n": names.n}
