"""Jobs that multiply the rows of X by a factor: A = X W, for products that follow, and to rank labels by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from xmc_stream.factors.factors import ColumnRange, Dense, Panels, take
from xmc_stream.factors.heldrows import NO_HOLDING, Holding, Pair, held_or_read
from xmc_stream.factors.products import ROW_BYTES, Learned, blocks, csr
from xmc_stream.kernels.lines import aligned_zeros
from xmc_stream.kernels.products import add_transposed
from xmc_stream.runtime.job import Receipt
from xmc_stream.store.matrix import SparseMatrix, stream

Parts = tuple[tuple[int, int], ...]


def row_blocks(X: SparseMatrix, Y: SparseMatrix | None, parts: Parts, holding: Holding) -> Iterator[Pair]:
    """Row blocks of parts of the rows, of which some may be in memory, see `held_or_read`."""
    for rows in parts:
        if holding.room:
            yield from held_or_read(X, Y, rows, ROW_BYTES, holding)
        else:  # for one product it does not pay to sort them
            yield from ((x, None) for (x,) in blocks(X, rows=rows))


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
