"""The second pass over raw text: rows of a part's own numbers and counts get the vocabulary's numbers and weights."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xmc_stream.convert.options import TextOptions
from xmc_stream.convert.pieces import WINDOW, Piece, PieceRows, PieceWriter, new_piece, work_folder
from xmc_stream.convert.tfidf.counting import PART_IDS
from xmc_stream.convert.tfidf.vectorizer import idf_weights, weighted
from xmc_stream.convert.tfidf.vocabulary import Maps, SortedRun, chosen
from xmc_stream.runtime.job import Receipt
from xmc_stream.store.encoding import index_dtype
from xmc_stream.store.names import WRITER_BYTES, Names, new_names, new_vectorizer, open_vectorizer

IDS_BYTES = WRITER_BYTES + 2**23
WEIGH_BYTES = 80 * PieceRows.ENTRIES + 16 * PieceRows.ROWS + 24 * WINDOW


@dataclass(frozen=True)
class WeighHashed:
    """A job: idf of hashed features, in the files `weights` and `vectorizer` of `folder`. rows: files of counts."""

    key: str
    rows: tuple[str, ...]
    n_rows: int
    text: TextOptions
    folder: str
    like: str

    def run(self) -> Receipt:
        """Add up the counts of all parts, or take the weights of `like`."""
        n = self.text.hash_features or 0
        opened = open_vectorizer(Path(self.like)) if self.like else None
        if opened:
            weights = opened[1].read(0, n)
        else:
            total = np.zeros(n, np.int64)
            for path_ in self.rows:
                total += np.fromfile(path_, np.int64)
            weights = idf_weights(self.text, total, self.n_rows)
        with work_folder(Path(self.folder)) as work:
            with new_vectorizer(work / "vectorizer", self.text.attributes()) as idf:
                idf.append(weights)
            weights.tofile(work / "weights")
        return {"n": n}


@dataclass(frozen=True)
class Weigh:
    """A job: the pieces of a part anew, in the folders X-NAME and Y-NAME of `work`.

    lengths: rows of each run; words, labels: the runs with their maps, none where the numbers stay.
    """

    key: str
    pieces: dict[str, dict[str, Any]]
    lengths: list[int]
    words: list[tuple[SortedRun, Maps]]
    labels: list[tuple[SortedRun, Maps]]
    text: TextOptions
    n_features: int
    n_labels: int
    work: str
    name: str

    def run(self) -> Receipt:
        """Number, weigh and sort; the receipt has the pieces of X and Y."""
        work, pieces = Path(self.work), {side: Piece.of(self.pieces[side]) for side in ("X", "Y")}
        sides = ("X", "Y") if self.labels else ("X",)
        with ExitStack() as stack:  # both from the beginning: a late copy replaces none that another one has made since
            writers = {
                side: stack.enter_context(new_piece(work / f"{side}-{self.name}", pieces[side].valued))
                for side in sides
            }
            self._write(pieces["X"], writers["X"], self.words, work / "features", self.n_features)
            if self.labels:
                self._write(pieces["Y"], writers["Y"], self.labels, work / "labels", self.n_labels)
        return {**self.pieces, **{side: writer.piece().receipt() for side, writer in writers.items()}}

    def _write(
        self, piece: Piece, writer: PieceWriter, runs: list[tuple[SortedRun, Maps]], source: Path, bound: int
    ) -> None:
        dtype = index_dtype(bound)
        blocks = PieceRows(piece)
        for i, n_rows in enumerate(self.lengths):
            ids, weights = chosen(*runs[i], source) if runs else (None, np.fromfile(source / "weights"))
            for lengths, numbers, counts in blocks.rows(n_rows):
                ends = np.cumsum(lengths)
                # the row of each entry: how many have ended before (np.repeat would hold the interpreter's lock)
                rows = np.cumsum(np.bincount(ends[:-1], minlength=len(numbers))[: len(numbers)])
                new = numbers.astype(np.int64) if ids is None else ids[numbers]
                data = None if counts is None else weighted(self.text, counts, weights[numbers])
                if new.min(initial=0) < 0:
                    kept = new >= 0
                    rows, new, data = rows[kept], new[kept], None if data is None else data[kept]
                order = np.argsort(rows * bound + new)  # below 2^16 rows and 2^47 words, all different
                indptr = np.zeros(len(lengths) + 1, np.int64)
                np.cumsum(np.bincount(rows, minlength=len(lengths)), out=indptr[1:])
                writer.append(indptr, new[order].astype(dtype), None if data is None else data[order])
        blocks.end()


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
                for window in Names(Path(part) / PART_IDS).windows():
                    names.append(window)
            return {"n": names.n}
