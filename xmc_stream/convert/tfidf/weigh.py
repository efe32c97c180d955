"""The second pass over raw text: rows of a part's own numbers and counts get the vocabulary's numbers and weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.convert.options import TextOptions
from xmc_stream.convert.pieces import WINDOW, Piece, PieceWriter, begin_folder, finish_folder
from xmc_stream.convert.tfidf.vectorizer import idf_weights, weighted
from xmc_stream.convert.tfidf.vocabulary import SortedRun, chosen
from xmc_stream.jobs.job import Receipt
from xmc_stream.store.encoding import index_dtype
from xmc_stream.store.names import new_vectorizer, open_vectorizer

_ENTRIES = 2**18  # of rows that are weighed together, or one row
_ROWS = 2**16
WEIGH_BYTES = 80 * _ENTRIES + 16 * _ROWS + 24 * WINDOW


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
        folder = Path(self.folder)
        work = begin_folder(folder)
        n = self.text.hash_features or 0
        opened = open_vectorizer(Path(self.like)) if self.like else None
        if opened:
            weights = opened[1].read(0, n)
        else:
            total = np.zeros(n, np.int64)
            for path_ in self.rows:
                total += np.fromfile(path_, np.int64)
            weights = idf_weights(self.text, total, self.n_rows)
        with new_vectorizer(work / "vectorizer", self.text.attributes()) as idf:
            idf.append(weights)
        weights.tofile(work / "weights")
        finish_folder(work, folder)
        return {"n": n}


@dataclass(frozen=True)
class Weigh:
    """A job: the pieces of a part anew, in the folders X-NAME and Y-NAME of `work`.

    lengths: rows of each run; words, labels: the runs with their maps, none where the numbers stay.
    """

    key: str
    pieces: dict[str, dict[str, Any]]
    lengths: list[int]
    words: list[tuple[SortedRun, list[str]]]
    labels: list[tuple[SortedRun, list[str]]]
    text: TextOptions
    n_features: int
    n_labels: int
    work: str
    name: str

    def run(self) -> Receipt:
        """Number, weigh and sort; the receipt has the pieces of X and Y."""
        work = Path(self.work)
        x, y = Piece.of(self.pieces["X"]), Piece.of(self.pieces["Y"])
        receipt = {"X": self._write(x, work / f"X-{self.name}", self.words, work / "features", self.n_features)}
        if self.labels:
            receipt["Y"] = self._write(y, work / f"Y-{self.name}", self.labels, work / "labels", self.n_labels)
        else:
            receipt["Y"] = y.receipt()
        return receipt

    def _write(
        self, piece: Piece, folder: Path, runs: list[tuple[SortedRun, list[str]]], source: Path, bound: int
    ) -> dict[str, Any]:
        dtype = index_dtype(bound)
        blocks = _Blocks(piece)
        with PieceWriter(folder, piece.valued) as writer:
            for i, n_rows in enumerate(self.lengths):
                ids, weights = chosen(*runs[i], source) if runs else (None, np.fromfile(source / "weights"))
                for lengths, numbers, counts in blocks.rows(n_rows):
                    rows = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
                    new = numbers.astype(np.int64) if ids is None else ids[numbers]
                    data = None if counts is None else weighted(self.text, counts, weights[numbers])
                    kept = np.flatnonzero(new >= 0)
                    order = kept[np.lexsort((new[kept], rows[kept]))]
                    indptr = np.zeros(len(lengths) + 1, np.int64)
                    np.cumsum(np.bincount(rows[kept], minlength=len(lengths)), out=indptr[1:])
                    writer.append(indptr, new[order].astype(dtype), None if data is None else data[order])
            blocks.end()
        return writer.piece().receipt()


class _Blocks:
    """The rows of a piece in turn: lengths, indices and values, some at a time."""

    def __init__(self, piece: Piece) -> None:
        self._lengths = _Items(piece.lengths())
        self._indices = _Items(piece.indices())
        self._data = _Items(data for _, data in piece.values()) if piece.valued else None

    def rows(self, n_rows: int) -> Iterator[tuple[NDArray[np.int64], NDArray[Any], NDArray[np.float32] | None]]:
        """The next n_rows rows."""
        while n_rows:
            window = self._lengths.take(min(_ROWS, n_rows))
            n_rows -= len(window)
            while len(window):
                n = max(1, int(np.searchsorted(np.cumsum(window), _ENTRIES, side="right")))
                size = int(window[:n].sum())
                yield window[:n], self._indices.take(size), self._data.take(size) if self._data else None
                window = window[n:]

    def end(self) -> None:
        """Read to the end of the files, where their checksums are compared."""
        for items in (self._lengths, self._indices, self._data):
            if items:
                items.end()


class _Items:
    """Items of a file in any numbers, from windows of it."""

    def __init__(self, windows: Iterator[NDArray[Any]]) -> None:
        self._windows = windows
        self._window: NDArray[Any] = np.empty(0, np.int64)

    def take(self, n: int) -> NDArray[Any]:
        """The next n items, copied."""
        taken = [self._window[:n].copy()]
        missing = n - len(taken[0])
        self._window = self._window[n:]
        while missing:
            window = next(self._windows)
            taken.append(window[:missing].copy())
            self._window = window[missing:]
            missing -= len(taken[-1])
        return np.concatenate([items for items in taken if len(items)] or taken)

    def end(self) -> None:
        for _ in self._windows:
            pass
