"""JSONL: one object a line with a text and labels, as the Extreme Classification Repository's raw form (trn.json.gz).

There, a line is {"uid": ..., "title": ..., "content": ..., "target_ind": [ids from 0], "target_rel": [...]}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.convert.formats.texts import TextInput, looked_at, text_records
from xmc_stream.convert.kernels.jsonlines import read_objects
from xmc_stream.convert.lines.files import HEAD, Buffers, TextFile, TextRange, place_of
from xmc_stream.convert.options import ConvertOptions, Like, TextOptions
from xmc_stream.convert.tfidf.block import LINES, Block, Record
from xmc_stream.convert.tfidf.records import Records, RecordsSource
from xmc_stream.errors import InputError

_WINDOW = 2**20  # bytes of lines at hand
_LONGEST_FIRST = 2**24  # bytes of the line that shows the fields


def recognises(head: bytes) -> bool:
    """Whether a text begins like an object, or like an array of them (which is refused with what to do)."""
    begin = head.lstrip()
    if begin[:1] == b"[":
        return begin[1:].lstrip()[:1] in (b"{", b"]")
    return begin[:1] == b"{" and begin[1:].lstrip()[:1] in (b'"', b"}")


@dataclass(frozen=True)
class JsonLines(Records):
    """The objects of some lines."""

    text: TextRange

    def read(self, longest: int, notes: dict[str, Any], text: TextOptions) -> Iterator[Block]:
        """The lines, numbered in the range from 1."""
        names = [field.encode("utf-8", "surrogatepass") for field in text.columns]
        wanted = np.frombuffer(bytearray(b"".join(names)) or bytearray(1), np.uint8)
        ends = np.cumsum([0, *map(len, names)])
        begins, status = np.empty(LINES + 1, np.int64), np.empty(LINES, np.uint8)
        places = np.empty((LINES, len(names), 3), np.int32)
        with self.text.open(Buffers(min(_WINDOW, longest), longest)) as file:
            for window in file.windows():
                notes["bytes_read"] = file.bytes_read
                at = 0
                while at < len(window):
                    n = read_objects(window, at, wanted, ends, begins, status, places)

                    def record(i: int, lines: NDArray[np.uint8] = window) -> Record:
                        return _object(lines[begins[i] : begins[i + 1] - 1].tobytes())

                    numbers = np.arange(file.n_lines + 1, file.n_lines + n + 1)
                    yield Block(numbers, window, status[:n], places[:n], False, record)
                    at = int(begins[n])
                    file.n_lines += n
            notes["bytes_read"] = file.bytes_read

    def load_kernels(self) -> None:
        """Read an object."""
        line, name = (np.frombuffer(bytearray(some), np.uint8) for some in (b'{"a": 1}\n', b"a"))
        places = np.empty((1, 1, 3), np.int32)
        read_objects(line, 0, name, np.array([0, 1]), np.empty(2, np.int64), np.empty(1, np.uint8), places)

    def where(self, number: int) -> str:
        """File and line; the lines before the range are counted when it is asked."""
        return place_of(self.text, number)


def _object(line: bytes) -> Record:
    if not line.strip():
        return None
    if b"\0" in line:
        return "there is a NUL byte in the line: the file is damaged or not a text"
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return f"byte {error.start + 1} of the line is not UTF-8: convert the file to UTF-8"
    except json.JSONDecodeError as error:
        return f"the line is not a JSON object ({error.msg}: character {error.colno})"
    except (ValueError, RecursionError) as error:
        return f"the line is not a usable JSON object ({error})"
    if isinstance(record, list):
        return "there is a JSON array, not an object a line: write each of its objects on a line of its own"
    if not isinstance(record, dict):
        return "the line is not a JSON object: write {...} with a text and labels"
    return record


def open_source(paths: Sequence[Path], options: ConvertOptions, like: Like | None) -> RecordsSource:
    """Files of JSONL as one set. Raises InputError where the first line shows no fields of text and labels."""
    files, first = [], None
    for path in paths:
        with looked_at(path) as file:
            first = first or _first(file, options)
            files.append(TextInput.of(path, file))
    records = [JsonLines(text) for file in files for text in file.ranges()]
    return RecordsSource(text_records("JSONL", files, records, first or {}), options, like)


def _first(file: TextFile, options: ConvertOptions) -> Mapping[str, Any]:
    """The first object of a file; where rows may be left out the first one that is sound and has the fields asked for."""
    size, skip, wanted = HEAD, options.skip, set(options.text_options.columns if options.text_options else ())
    while True:
        head = file.head(size)
        lines = head.split(b"\n")
        whole = len(head) < size
        sound: Mapping[str, Any] | None = None
        for number, line in enumerate(lines if whole else lines[:-1], 1):
            record = _object(line)
            if isinstance(record, Mapping):
                if not skip or wanted <= record.keys():
                    return record
                sound = sound or record
            elif record is not None and not skip:
                raise InputError(f"{file.name}:{number}: {record}")
        if whole or size >= _LONGEST_FIRST:
            if sound:
                return sound
            raise InputError(f"{file.name}:1: there is no JSON object: give a file with one a line")
        size *= 4
