"""JSONL: one object a line with a text and labels, as the Extreme Classification Repository's raw form (trn.json.gz).

There, a line is {"uid": ..., "title": ..., "content": ..., "target_ind": [ids from 0], "target_rel": [...]}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xmc_stream.convert.lines import BOM, Lines, ranges
from xmc_stream.convert.records import TextSource
from xmc_stream.convert.source import Like, Options
from xmc_stream.errors import InputError

NAME = "jsonl"
_PART_BYTES = 2**26  # of a plain file
_HEAD_LINE = 2**24


def recognises(path: Path, head: bytes) -> bool:
    """Whether a text begins like an object, or like an array of them (which is refused with what to do)."""
    begin = head.removeprefix(BOM).lstrip()
    if begin[:1] == b"[":
        return begin[1:].lstrip()[:1] in (b"{", b"]")
    return begin[:1] == b"{" and begin[1:].lstrip()[:1] in (b'"', b"}", b"")


@dataclass(frozen=True)
class JsonLines:
    """The objects of some lines."""

    lines: Lines

    def read(self, longest: int) -> Iterator[tuple[int, Mapping[str, Any] | str | None]]:
        """Number and object of each line, or what is wrong with it; None for a blank line."""
        for number, line in replace(self.lines, longest=longest).read():
            yield number, _object(line)

    def where(self, number: int) -> str:
        """File and line."""
        return f"{self.lines.path}:{self.lines.in_file(number)}"


def _object(line: bytes) -> Mapping[str, Any] | str | None:
    if not line.strip():
        return None
    if b"\0" in line:
        return "there is a NUL byte in the line: the file is damaged or not a text"
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start + 1} of the line is not UTF-8: convert the file to UTF-8"
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        return f"the line is not a JSON object ({error.msg} at character {error.colno})"
    except (ValueError, RecursionError) as error:
        return f"the line is not a usable JSON object ({error})"
    if isinstance(record, list):
        return "there is a JSON array, not an object a line: write each of its objects on a line of its own"
    if not isinstance(record, dict):
        return "the line is not a JSON object: write {...} with a text and labels"
    return record


def open_source(
    paths: Sequence[Path], options: Options, like: Like | None, part_bytes: int = _PART_BYTES
) -> TextSource:
    """Files of JSONL as one set. Raises InputError where the first line shows no fields of text and labels."""
    records = [JsonLines(Lines(str(path), *span)) for path in paths for span in ranges(path, part_bytes)]
    return TextSource("JSONL", paths, records, _first(records[0], options.skip), options, like)


def _first(records: JsonLines, skip: bool) -> Mapping[str, Any]:
    """The first object; with skip the first one that is sound."""
    for number, record in records.read(_HEAD_LINE):
        if isinstance(record, Mapping):
            return record
        if record is not None and not skip:
            raise InputError(f"{records.where(number)}: {record}")
    raise InputError(f"{records.lines.path} holds no JSON objects: give a file with one a line")
