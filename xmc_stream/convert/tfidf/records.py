"""Records with a text and labels, whatever file they stand in, to rows: the parts and the source of raw text.

A part counts the words of its rows by numbers of its own, in a dictionary that is written out as a sorted run and begun
anew when it is full. When all parts are read, the runs are merged into the vocabulary, and the rows get its numbers and
weights. Nothing in memory grows with the vocabulary. Reading files is in `jsonl`, `delimited` and `parquet`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from xmc_stream import flags
from xmc_stream.convert.kernels.tokens import BLANK, HARD, SOUND
from xmc_stream.convert.labels import SEPARATOR, separator_of
from xmc_stream.convert.lines.files import name_of
from xmc_stream.convert.lines.parser import LISTED
from xmc_stream.convert.messages import shown
from xmc_stream.convert.options import ConvertOptions, Like, TextOptions, of_labels
from xmc_stream.convert.pieces import Piece, Rows, work_folder
from xmc_stream.convert.source import Part, PartRead, Settled, Source, names_of
from xmc_stream.convert.tfidf.block import IDS, STRINGS, Block, Record, load_kernels
from xmc_stream.convert.tfidf.counting import (
    BadRowError,
    HashedRows,
    LabelRows,
    RowIds,
    WordRows,
    kind_of,
    kind_of_labels,
    label_base,
    resolved,
    sound,
)
from xmc_stream.convert.tfidf.vectorizer import bytes_per_byte, like_options, stored_options
from xmc_stream.convert.tfidf.vocabulary import (
    CHOICE_BYTES,
    LINE_BITS,
    MERGE_BYTES,
    ChooseFeatures,
    ChooseLabels,
    Maps,
    SortedRun,
    merged,
)
from xmc_stream.convert.tfidf.weigh import IDS_BYTES, WEIGH_BYTES, JoinIds, Weigh, WeighHashed
from xmc_stream.errors import InputError
from xmc_stream.runtime.job import Phase, Receipt
from xmc_stream.store.names import ROW_IDS, NamedIds, ascend, open_names

_TOKENS = 2**17  # of rows that are counted together
_ROWS = 2**14
_BLOCK_BYTES = 64 * _TOKENS + 2**21
_HASHED_BYTES = 120 * _TOKENS  # the same, with the words themselves
_LEAST_LINE, _MOST_LINE = 2**18, 2**24
_LINE_ROOM = 2**27  # bytes for the longest line, where there are as many
_LEAST_DICTIONARY, _MOST_DICTIONARY = 2**22, 2**28
_PLACE = re.compile(r"(.*)[:\[]([0-9]+)\]?", re.DOTALL)  # FILE:LINE, or frame[ROW]


class Records(ABC):
    """Records of a part of a file: picklable, small."""

    @abstractmethod
    def read(self, longest: int, notes: dict[str, Any], text: TextOptions) -> Iterator[tuple[int, Record] | Block]:
        """Number in the part, and record; or many of them, with the places of the fields.

        text: the columns of which are read; longest: bytes of a line that there is room for; notes: gets bytes_read.
        """

    def load_kernels(self) -> None:  # noqa: B027 (some call none)
        """Compile or load what `read` calls."""

    @abstractmethod
    def where(self, number: int) -> str:
        """File and line (or row) of a record, for messages."""


@dataclass(frozen=True)
class RecordsPart:
    """The rows of some records, numbered by a dictionary of their own.

    number: of the part; text: with all fields resolved; like: whose labels bound ids; dictionary, longest: bytes; kind:
    of the labels, as in `LabelRows`, "" where any row may tell.
    """

    number: int
    records: Records
    text: TextOptions
    options: ConvertOptions
    like: Like | None
    dictionary: int
    longest: int
    kind: str

    sides = ("X", "Y")  # also where there are no labels

    def blocks(self, notes: dict[str, Any]) -> Iterator[tuple[Rows, ...]]:
        """The rows; notes gets rows, runs [rows, words, label names] and kind of labels ("names", "ids" or "")."""
        rows = HashedRows(self.text) if self.text.hash_features else WordRows(self.text)
        labels = LabelRows(self.text, self.options, self.like, self.number, self.kind, notes)
        folder = Path(notes["folder"])
        runs: list[list[int]] = []
        n_rows = n_run = taken = 0
        notes.update({"skipped": 0, "skipped_rows": [], "blank_lines": 0})
        with ExitStack() as opened:
            ids = RowIds(self.text.id_field, folder, opened)
            for n in self._taken(rows, labels, ids, notes):
                n_run, taken = n_run + n, taken + n
                full = max(rows.size, labels.size) > self.dictionary
                if full or taken >= _ROWS or rows.n_tokens >= _TOKENS or labels.n_ids >= _TOKENS:
                    yield rows.take(), labels.take()
                    taken = 0
                if full:
                    runs.append([n_run, *self._write(folder, len(runs), rows, labels)])
                    n_rows, n_run = n_rows + n_run, 0
            yield rows.take(), labels.take()
            ids.close()
        if n_run or not runs:
            runs.append([n_run, *self._write(folder, len(runs), rows, labels)])
        notes.update({"rows": n_rows + n_run, "runs": runs, "kind": labels.kind, "most_label": labels.most})

    def _taken(
        self, rows: WordRows | HashedRows, labels: LabelRows, ids: RowIds, notes: dict[str, Any]
    ) -> Iterator[int]:
        """Take records; yields how many were taken since."""
        fields = self.text.columns
        texts = np.array([fields.index(field) for field in self.text.text_fields])
        label, own = (fields.index(field) if field else -1 for field in (self.text.label_field, self.text.id_field))
        for found in self.records.read(self.longest, notes, self.text):
            if not isinstance(found, Block):
                yield self._take(*found, rows, labels, ids, notes)
                continue
            for column in texts:
                found.require(column, STRINGS)
            if own >= 0:
                found.require(own, IDS)
            if label >= 0:
                labels.look(found, label)
            for status, start, stop in found.runs():
                if status == SOUND:
                    rows.extend(found.texts(start, stop, texts))
                    labels.extend(found, start, stop)
                    if own >= 0:
                        ids.extend(found, start, stop, own)
                    yield stop - start
                elif status == BLANK:
                    notes["blank_lines"] += stop - start
                elif status == HARD:
                    for i in range(start, stop):
                        yield self._take(int(found.numbers[i]), found.record(i), rows, labels, ids, notes)

    def _take(
        self, line: int, record: Record, rows: WordRows | HashedRows, labels: LabelRows, ids: RowIds,
        notes: dict[str, Any],
    ) -> int:  # fmt: skip
        """Take a record, if it is a row; whether it was."""
        if record is None:
            notes["blank_lines"] += 1
            return 0
        try:
            if isinstance(record, str):
                raise BadRowError(record)
            text = self._text(record)
            name = ids.of(record)
            labels.add(record, line)
        except BadRowError as error:
            if not self.options.skip:
                raise InputError(f"{self.records.where(line)}: " + error.args[0]) from None
            notes["skipped"] += 1
            if len(notes["skipped_rows"]) < LISTED:
                place = _PLACE.fullmatch(self.records.where(line))
                notes["skipped_rows"].append([*((place[1], int(place[2])) if place else ("", line)), str(error)])
            return 0
        rows.add(text)
        ids.add(name)
        return 1

    @staticmethod
    def _write(folder: Path, run: int, rows: WordRows | HashedRows, labels: LabelRows) -> tuple[int, int]:
        """Write what the dictionaries hold as a run, durably, and begin with empty ones."""
        with work_folder(folder / f"{run:04d}") as work:
            return rows.write(work / "words"), labels.write(work / "labels")

    def _text(self, record: Mapping[str, Any]) -> str:
        texts = []
        for name in self.text.text_fields:
            try:
                text = record[name]
            except KeyError:
                raise BadRowError(
                    f"there is no field {name!r}: name the fields of the text (" + flags.TEXT_FIELD + ")"
                ) from None
            if not isinstance(text, str):
                raise BadRowError(f"field {name!r} is {kind_of(text)}, not a text")
            texts.append(sound(text.replace("\0", " "), name))  # an escaped NUL is no damage: it separates words
        return "\n".join(texts)


@dataclass(frozen=True)
class Input:
    """Records that a format has found. name: of the format, in words; paths: of files; records: of each part, in order;
    first: a record, which shows the fields; more: what tells these files from others, besides what they are.

    largest: bytes of text of one of them at most, None if unknown; alone: they can be read once; overhead: bytes that
    reading them takes beside the parts' own; in_memory: the only path is no file, but what messages call the records.
    """

    name: str
    paths: Sequence[Path]
    records: Sequence[Records]
    first: Mapping[str, Any]
    largest: int | None
    more: Sequence[Any] = ()
    alone: bool = False
    overhead: int = 0
    in_memory: bool = False


class RecordsSource(Source):
    """Raw text in files of one kind: what `source.Source` asks for."""

    def __init__(self, found: Input, options: ConvertOptions, like: Like | None) -> None:
        name, paths, first = found.name, found.paths, found.first
        super().__init__([] if found.in_memory else paths, found.alone)
        if options.label_files:
            raise InputError(f"{paths[0]} is {name}: its labels stand in a field of it, not in a file of their own")
        if options.n_features is not None:
            raise InputError(
                f"{paths[0]} is {name}: how many features there are, its words tell (max_features bounds them)"
            )
        given = options.text_options or TextOptions()
        text = like_options(stored_options(like.path, like.name), given, like.name) if like else given
        if options.unlabelled:
            text, given = replace(text, label_field=""), replace(given, label_field="")
        self.text, self._chosen = resolved(text, given, first, name_of(paths[0]), like is not None)
        self._name, self._paths, self._records, self._largest = name, paths, found.records, found.largest
        self._options, self._like, self._base = options, like, label_base(options, like)
        self.attributes = {"source": names_of(paths), "source_format": name}
        stamps = [*self.identity["files"], *found.more]
        self.identity = {"files": stamps, "text": self.text.attributes(), "runs": 2}
        self.n_features = like.n_features if like else self.text.hash_features
        kept = of_labels(like)
        self.n_labels = kept.n_labels if kept else None
        self.overhead = {"decompression": found.overhead} if found.overhead else {}
        known = open_names(kept.path, "labels") if kept and not options.unlabelled else None
        if known is not None and not ascend(known):
            self.overhead["labels by name"] = NamedIds.BYTES * len(known)
        self._kind = kind_of_labels(self.text, first)
        self._dictionary, self._longest = _LEAST_DICTIONARY, _LEAST_LINE

    def load_kernels(self) -> None:
        """Compile or load what the parts call."""
        few = replace(self.text, hash_features=2) if self.text.hash_features else self.text
        rows = HashedRows(few) if self.text.hash_features else WordRows(few)
        rows.add("a few words")
        rows.take()
        load_kernels()
        for records in self._records[:1]:
            records.load_kernels()

    def fit(self, room: int) -> int:
        """Dictionary and longest line for `room` bytes: what is left beside the blocks, in halves.

        Where that is little, the line gets up to _LINE_ROOM of it first.
        """
        n_hashed = self.text.hash_features or 0
        room -= IDS_BYTES if self.text.id_field else 0
        fixed = (_HASHED_BYTES + 24 * n_hashed if n_hashed else _BLOCK_BYTES) + 2**21
        per_byte = bytes_per_byte(self.text)
        largest = _MOST_LINE if self._largest is None else self._largest + 2
        line = max((room - fixed) // 2, min(_LINE_ROOM, (room - fixed) * 7 // 8))
        self._longest = min(max(_LEAST_LINE, min(_MOST_LINE, line // per_byte)), largest)
        rest = room - fixed - self._longest * per_byte
        self._dictionary = max(_LEAST_DICTIONARY, min(_MOST_DICTIONARY, 80 * largest, rest * 9 // 10))
        reading = fixed + self._longest * per_byte + self._dictionary * 10 // 9
        weighing = WEIGH_BYTES + max(self._dictionary // 4, 16 * n_hashed) + 40 * self._longest
        ids = IDS_BYTES if self.text.id_field else 0
        return max(reading + ids, weighing, MERGE_BYTES, CHOICE_BYTES, ids)

    def parts(self) -> list[Part]:
        """The parts, with the sizes that `fit` chose."""
        return [
            RecordsPart(i, records, self.text, self._options, self._like, self._dictionary, self._longest, self._kind)
            for i, records in enumerate(self._records)
        ]

    def settle(self, work: Path, parts: list[PartRead]) -> Generator[Phase, list[Receipt], Settled]:
        """Merge the words of all parts into the vocabulary, the names of labels too, and number and weigh the rows."""
        work = work / "text"
        notes = [part.notes for part in parts]
        n_rows = sum(note["rows"] for note in notes)
        kinds = {note["kind"] for note in notes} - {""}
        if len(kinds) > 1:
            raise InputError(
                f"{self._paths[0]}: labels are numbers in some rows and names in others: write them all alike"
            )
        words = yield from self._words(work, notes, n_rows)
        folders: dict[str, Path] = dict(words.folders)
        labels = yield from self._labels(work, notes, kinds, folders)
        jobs = list(self._weighing(work, parts, words, labels))
        receipts = yield Phase("weigh", jobs, twice=True)
        attributes: dict[str, Any] = {"text_fields": list(self.text.text_fields), "label_field": self.text.label_field}
        if self.text.id_field:
            attributes["id_field"] = self.text.id_field
            folders[ROW_IDS] = work / ROW_IDS
            join = JoinIds(tuple(note["folder"] for note in notes), str(folders[ROW_IDS]))
            yield Phase("join ids", [join], twice=True)
        attributes.update(words.attributes)
        in_texts = 2 * sum(note["label_texts"] for note in notes) > n_rows
        if in_texts and labels.held and (separator := separator_of(labels.held)):
            attributes[SEPARATOR] = separator
        if kinds == {"ids"}:
            attributes["label_base"] = self._base
        attributes.update(_left_out(notes, labels.dropped))
        return Settled(
            words.n,
            labels.n,
            [Piece.of(receipt["X"]) for receipt in receipts],
            [Piece.of(receipt["Y"]) for receipt in receipts],
            f"{self._name}, {n_rows:,} rows, {self._chosen}{labels.said}, {words.said}",
            y_base=0 if labels.runs else self._base,
            normalize="l2",
            attributes=attributes,
            folders=folders,
        )

    def _words(
        self, work: Path, notes: list[dict[str, Any]], n_rows: int
    ) -> Generator[Phase, list[Receipt], _Numbered]:
        """The vocabulary, or what hashes make of the words."""
        like = str(self._like.path) if self._like else ""
        runs, features = _sorted_runs(notes, "words", 1), work / "features"
        folders = {"vectorizer": features / "vectorizer"}
        if self.text.hash_features:
            rows_files = tuple(f"{run.folder}/rows" for run in runs)
            job = WeighHashed("features", rows_files, n_rows, self.text, str(features), like)
            yield Phase("weigh hashes", [job], twice=True)
            n = self.text.hash_features
            return _Numbered(n, f"words hashed to {n:,} features", folders=folders)
        vocabulary, maps = yield from merged(work, "words", runs)
        n_like = self._like.n_features if self._like else 0
        choose = ChooseFeatures("features", vocabulary, n_rows, self.text, str(features), like, n_like)
        (receipt,) = yield Phase("choose words", [choose], twice=True)
        folders["names/features"] = features / "names"
        if self._like:
            about = {"unknown_words": receipt["unknown_words"], "dropped_features": receipt["unknown"]}
            said = f"{receipt['unknown']:,} words that {self._like.name} does not have left out"
        else:
            about = {"different_words": vocabulary.n}
            said = f"{receipt['n']:,} of {about['different_words']:,} words"
        if not receipt["n"] and n_rows:
            raise InputError(f"{self._paths[0]}: no words are left as features: lower min_df, or raise max_df")
        return _Numbered(receipt["n"], said, runs, maps, attributes=about, folders=folders)

    def _weighing(self, work: Path, parts: list[PartRead], words: _Numbered, labels: _Numbered) -> Iterator[Weigh]:
        """A job for each part: its rows get the numbers of the vocabulary, and weights."""
        at = 0
        for i, part in enumerate(parts):
            lengths = [run[0] for run in part.notes["runs"]]
            here = slice(at, at + len(lengths))
            at += len(lengths)
            yield Weigh(
                f"weigh/{i:05d}",
                {side: piece.receipt() for side, piece in part.pieces.items()},
                lengths,
                list(zip(words.runs[here], words.maps[here], strict=True)),
                list(zip(labels.runs[here], labels.maps[here], strict=True)),
                self.text,
                words.n,
                labels.n,
                str(work),
                f"{i:05d}",
            )

    def _labels(
        self, work: Path, notes: list[dict[str, Any]], kinds: set[str], folders: dict[str, Path]
    ) -> Generator[Phase, list[Receipt], _Numbered]:
        """Labels: without runs where they are ids. folders: gets that of their names."""
        like = of_labels(self._like)
        if kinds != {"names"}:
            most = max((note["most_label"] for note in notes), default=-1) + 1 - self._base
            n_labels = like.n_labels if like else max(most, self._options.n_labels or 0, 0)
            if like and open_names(like.path, "labels") is not None:
                copied = ChooseLabels(
                    "labels", (yield from merged(work, "labels", []))[0], str(work / "labels"), str(like.path)
                )
                yield Phase("copy names", [copied], twice=True)
                folders["names/labels"] = work / "labels" / "names"
            return _Numbered(n_labels, f" (ids from {self._base})" if kinds else "")
        if like and open_names(like.path, "labels") is None:
            raise InputError(
                f"{self._paths[0]} has names of labels, and {like.name} has ids: write ids here too ("
                + flags.LABEL_IDS
                + ")"
            )
        runs = _sorted_runs(notes, "labels", 2)
        names, maps = yield from merged(work, "labels", runs)
        choose = ChooseLabels("labels", names, str(work / "labels"), str(like.path) if like else "")
        (receipt,) = yield Phase("choose labels", [choose], twice=True)
        if like and receipt["unknown"] and not self._options.drop_unseen:
            part, line = receipt["first"] >> LINE_BITS, receipt["first"] & (2**LINE_BITS - 1)
            raise InputError(
                f"{self._records[part].where(line)}: label {shown(receipt['name'].encode())} does not occur in {like.name}: "
                + flags.UNSEEN_DROP
                + " leaves out such labels, "
                + flags.NEW_LABELS
                + " takes them for `xmc-stream append`"
            )
        folders["names/labels"] = work / "labels" / "names"
        return _Numbered(receipt["n"], " (names)", runs, maps, dropped=receipt["unknown"], held=receipt["held"])


@dataclass(frozen=True)
class _Numbered:
    """Words, or labels, of all parts. n: of those that are kept; said: in words; runs, maps: of each part, to their numbers.

    held: what names of labels hold, see `held_by`; [] where they are ids.
    """

    n: int
    said: str
    runs: list[SortedRun] = field(default_factory=list)
    maps: list[Maps] = field(default_factory=list)
    dropped: int = 0
    held: list[list[int]] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)
    folders: dict[str, Path] = field(default_factory=dict)


def _left_out(notes: list[dict[str, Any]], dropped: int) -> dict[str, Any]:
    """What was left out or added up in all parts, for the dataset's attributes. dropped: labels, besides those of the notes."""
    summed = {key: sum(note[key] for note in notes) for key in ("skipped", "blank_lines", "summed_duplicates")}
    summed["dropped_labels"] = dropped + sum(note["dropped_labels"] for note in notes)
    about: dict[str, Any] = {key: n for key, n in summed.items() if n}
    if summed["skipped"]:
        about["skipped_rows"] = [row for note in notes for row in note["skipped_rows"]][:LISTED]
    return about


def _sorted_runs(notes: list[dict[str, Any]], kind: str, column: int) -> list[SortedRun]:
    """The runs of all parts in turn."""
    return [
        SortedRun(f"{note['folder']}/{i:04d}/{kind}", run[column])
        for note in notes
        for i, run in enumerate(note["runs"])
    ]
