"""Jobs of low-rank models: products of X and Y with a range of a factor's columns, and the metrics of rows held out.

Where sums are taken, a job has a range of columns and all rows, so that every sum is taken row after row by one thread: it
comes out the same for any number of threads or processes and any limit, there are no partial sums to be added, and a factor
is in memory once, not once for each thread. The columns of a job are as many as the limit lets them be; X is read once for
each range of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from xmc_stream.factors.factors import ColumnRange, Dense, Panels, by_lines, take
from xmc_stream.factors.kernels.ranges import add_transposed_ranges, multiply_ranges
from xmc_stream.factors.rowblocks import (
    NO_HOLDING,
    ROW_BYTES,
    Array,
    Holding,
    Parts,
    RangedBlock,
    Rows,
    csr,
    row_blocks,
)
from xmc_stream.kernels.lines import CACHE_LINE, aligned_zeros, lanes
from xmc_stream.kernels.permutation import HELD_OUT, held_out
from xmc_stream.kernels.products import add_lines, add_transposed, multiply
from xmc_stream.kernels.ranking import Ranking, fold_top_k
from xmc_stream.metrics import among
from xmc_stream.models.decisions import BEST_LABEL
from xmc_stream.models.runs import filter_pairs, fold_metrics, no_predictions
from xmc_stream.runtime.job import Receipt
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import stream

# rows, or classes, of a product of dense matrices, of which all sides are long: fixed, as its rounding may depend on its shape
BLOCK = 1024
_HELD_SCORES = 1 << 24  # of rows held out, about, at most: half a second's, at rank 100
_LEAST_HELD = 1000  # rows, about, whatever that takes
LEAST_COLUMNS = 48  # of a job, where there are as many: each entry of X takes as long as 32 columns more
PLACES = 5  # of the ranking of a held-out row that are looked at


@dataclass(frozen=True)
class Learned:
    """What is learned from; the same for all jobs of a run. share: of the rows, those that are held out; bias: whether rows

    have one more feature, which is 1.
    """

    path: str
    seed: int
    share: float
    bias: bool

    @classmethod
    def of(cls, dataset: Dataset, held_out: float, seed: int, bias: bool) -> Learned:
        """held_out: the share asked for; fewer rows are held out where scoring all labels of these would take long."""
        most = min(HELD_OUT, max(_LEAST_HELD, _HELD_SCORES // max(dataset.n_labels, 1)))
        return cls(str(dataset.path), seed, min(held_out, most / max(dataset.n_samples, 1)), bias)

    def dataset(self) -> Dataset:
        """The dataset, opened by this job."""
        return Dataset(self.path)

    def n_inputs(self) -> int:
        """Rows of W: features, and the bias."""
        return self.dataset().n_features + self.bias

    def times(self, x: Rows, dense: Array, room: Array | None = None) -> Array:
        """A block of X, with the bias, times a dense matrix."""
        out = times(x, dense, room)
        if self.bias:
            out += dense[-1]
        return out

    def add_transposed(self, x: Rows, lines: Array, out: Array) -> None:
        """out += the transpose of a block of X, with the bias, times a dense matrix."""
        if isinstance(x, RangedBlock):
            add_transposed_ranges(x.entries, lines, out)
        else:
            add_transposed(*csr(x), lines, out)
        if self.bias:
            add_lines(lines, out[-1])

    def kept_out(self, first: int, n: int) -> NDArray[np.bool_] | None:
        """Which of n rows from `first` on are held out; None where no rows are."""
        if not self.share:
            return None
        out = np.empty(n, np.bool_)
        held_out(np.arange(first, first + n), self.seed, self.share, out)
        return out

    def leave_out(self, first: int, lines: Array) -> None:
        """Make lines zero that belong to rows which are held out, of rows from `first` on."""
        held_out = self.kept_out(first, len(lines))
        if held_out is not None:
            lines[held_out] = 0


def column_ranges(rank: int, width: int) -> tuple[ColumnRange, ...]:
    """Ranges of so many columns, a job each."""
    return tuple((first, min(first + width, rank)) for first in range(0, rank, width))


def job_width(rank: int, parts: int) -> int:
    """Columns of a job where that many share them: whole cache lines."""
    width = -(-rank // parts)
    return min(rank, lanes(width)) if width > CACHE_LINE else width


def times(block: Rows, dense: Array, room: Array | None = None) -> Array:
    """A block's rows times a dense matrix, in the first lines of `room` if there is one."""
    out = np.empty((block.n, dense.shape[1]), dense.dtype) if room is None else room[: block.n]
    if isinstance(block, RangedBlock):
        multiply_ranges(block.entries, dense, out)
    else:
        multiply(*csr(block), dense, out)
    return out


def held_out_metrics(learned: Learned, scores: Panels, labels: Dense, criterion: str) -> Receipt:
    """Of the rows held out, if there are any: how many, hits among the first 1, ..., PLACES predictions, and if asked the AUC.

    The AUC is in `auc_units`.
    """
    if not learned.share:
        return {}
    Y, hits, n, auc = learned.dataset().Y_rows(), np.zeros(PLACES, np.int64), 0, 0
    nothing, counts = filter_pairs(), np.zeros((3, labels.n if criterion == "auc" else 0), np.int32)
    for first in range(0, scores.n, BLOCK):
        last = min(first + BLOCK, scores.n)
        held_out = learned.kept_out(first, last - first)
        if held_out is None or not held_out.any():
            continue
        lines, y = scores.read(first, last)[held_out], Y.gather(first + np.flatnonzero(held_out))
        best = Ranking(*no_predictions(len(lines), PLACES))
        if criterion == "auc":
            auc += fold_metrics(partial(tiles, lines, labels), y, nothing, BEST_LABEL, best, counts)
        else:
            for low, tile in tiles(lines, labels):
                fold_top_k(tile, low, nothing, *best)
        right = among(np.arange(len(lines))[:, None], best.labels, y.indptr, y.indices)
        hits += np.cumsum(right, axis=1).sum(axis=0)
        n += len(lines)
    metrics = {"hits": hits.tolist(), "n_held_out": n, "bytes_read": Y.bytes_read}
    return {**metrics, **({"auc": auc} if criterion == "auc" else {})}


def tiles(lines: Array, labels: Dense | Array) -> Iterator[tuple[int, Array]]:
    """Lines of A times H^T, by tiles of classes: the first class, scores (rows x classes)."""
    for number, some in enumerate(by_lines(labels, BLOCK)):
        yield number * BLOCK, lines @ some.T


@dataclass(frozen=True)
class ProjectJob:
    """A = X W, of a range of columns, for parts of the rows; sums: also Y^T A over the rows that are learned from.

    parts: all rows, where there are sums. holding: what may stay in memory.
    """

    learned: Learned
    name: str
    cols: ColumnRange
    source: Dense
    out: Panels
    parts: Parts
    holding: Holding = NO_HOLDING
    sums: Panels | None = None

    @property
    def key(self) -> str:
        """What for, columns and the first row."""
        return f"{self.name}/{self.cols[0]}-{self.cols[1]}/{self.parts[0][0]}"

    def run(self) -> Receipt:
        """Write; the receipt counts the positives of rows that are learned from."""
        dataset = self.learned.dataset()
        X, Y = dataset.X_rows(), dataset.Y_rows() if self.sums else None
        w, width, positives = take(self.source, self.cols), self.cols[1] - self.cols[0], 0
        total = aligned_zeros((dataset.n_labels if self.sums else 0, w.shape[1]))
        for x, labels in row_blocks(X, Y, self.parts, self.holding):
            scores = self.learned.times(x, w)
            self.out.write(self.cols, x.start, scores[:, :width])
            if Y is None:
                continue
            held_out = self.learned.kept_out(x.start, x.n)
            if held_out is not None:
                scores[held_out] = 0
            for y in [labels] if labels else (y for (y,) in stream((Y,), ROW_BYTES, x.start, x.start + x.n)):
                low = y.start - x.start
                add_transposed(*csr(y), scores[low : low + y.n], total)
                lengths = np.diff(y.indptr)
                positives += int((lengths if held_out is None else lengths[~held_out[low : low + y.n]]).sum())
        if self.sums is not None:
            self.sums.write(self.cols, 0, total[:, :width])
        share = width / self.out.columns * sum(last - first for first, last in self.parts) / max(self.out.n, 1)
        return {"positives": positives, "passes": share, "bytes_read": X.bytes_read + (Y.bytes_read if Y else 0)}
