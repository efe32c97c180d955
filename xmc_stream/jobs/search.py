"""Search jobs: a range of rows, scored for all classes of a block; what violates most outside the active sets is kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.jobs.job import Receipt
from xmc_stream.jobs.plan import MemoryPlan
from xmc_stream.jobs.tiles import Tile, make_tile, shared_cache, tile_width
from xmc_stream.kernels.active import clip_rows
from xmc_stream.kernels.csr import count_indices
from xmc_stream.kernels.sample import count_work, keep_large, sparsify
from xmc_stream.kernels.scores import NO_LOSS, places, search, sort_best
from xmc_stream.solvers.ppdsparse import PPDSparseParameters, added_sizes
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import Block, SparseMatrix, stream
from xmc_stream.store.model import UNIT
from xmc_stream.store.state import BIAS, OPEN, STATUS, UnitState, new_found

_WINDOW = 1 << 19  # entries of active sets read at a time


@dataclass(frozen=True)
class Piece:
    """Classes [first, last) of one unit, the state of the unit, and the bytes of their tile (or a bound)."""

    first: int
    last: int
    state: str
    tile_bytes: int


class _PieceSearch:
    """The search state of one piece: what was found, thresholds, the active rows still ahead, losses; one entry a slot."""

    def __init__(self, piece: Piece, job: SearchJob, n_samples: int) -> None:
        self.piece, self.job = piece, job
        start, stop, parameters = job.start, job.stop, job.parameters
        low = piece.first % UNIT
        state = UnitState(Path(piece.state))
        mine = slice(low, low + piece.last - piece.first)
        open_ = state.figures[mine, STATUS] == OPEN
        self.classes = np.flatnonzero(open_)  # of each slot, from piece.first
        self.slot_of = np.full(len(open_), -1, np.int16)
        self.slot_of[open_] = np.arange(len(self.classes))
        self.bias = state.figures[mine, BIAS][open_].astype(np.float32)
        self.width = tile_width(len(self.classes))

        sizes = np.diff(state.active.indptr.read(mine.start, mine.stop + 1))[open_]
        room = added_sizes(sizes, parameters.added, n_samples, job.round, parameters.growth)
        capacity = np.minimum(room, 1 if job.check else stop - start)
        self.capacity = np.zeros(self.width, np.int64)
        self.capacity[: len(capacity)] = capacity
        self.best_start = np.concatenate([[0], np.cumsum(places(self.capacity, stop - start))])
        self.best_size = np.zeros(self.width, np.int64)
        self.best_scores = np.empty(self.best_start[-1], np.float32)
        self.best_rows = np.empty(self.best_start[-1], np.int32)
        self.threshold = np.full(self.width, np.inf, np.float32)
        near = -parameters.tol if job.rough else parameters.near
        self.threshold[: len(capacity)][capacity > 0] = np.float32(-1.0 - near)
        self.losses = np.zeros(self.width)
        self.scores = np.empty(self.width, np.float32)

        self.active_next = np.zeros(self.width, np.int64)
        self.active_end = np.zeros(self.width, np.int64)
        self.active = self._active_rows(state.active, mine, start, stop)
        self.bytes_read = state.bytes_read

    def _active_rows(self, active: SparseMatrix, mine: slice, start: int, stop: int) -> NDArray[np.int32]:
        """Rows of the active sets in [start, stop), as numbers from start, class after class."""
        ptr = active.indptr.read(mine.start, mine.stop + 1)
        begins, ends = np.full(len(ptr) - 1, -1), np.zeros(len(ptr) - 1, np.int64)
        parts, filled = [], 0
        for low in range(int(ptr[0]), int(ptr[-1]) + 1, _WINDOW):
            high = min(low + _WINDOW, int(ptr[-1]))
            # the classes with entries in the window: the last one may go on in the next
            a, b = int(np.searchsorted(ptr, low, "right")) - 1, int(np.searchsorted(ptr, high, "left"))
            out = np.empty(high - low, np.int32)
            places = np.clip(ptr[a : b + 1], low, high) - low
            n = clip_rows(places, active.indices.read(low, high), start, stop, begins[a:b], ends[a:b], out, filled)
            parts.append(out[:n].copy())
            filled += n
        self.active_next[: len(self.classes)] = begins[self.classes]
        self.active_end[: len(self.classes)] = ends[self.classes]
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def make_tile(self, n_features: int) -> Tile:
        """Weights of the open classes, by feature; a rough search draws some of them."""
        weights = SparseMatrix(Path(self.piece.state) / "weights")
        low, job = self.piece.first % UNIT, self.job
        classes = self.classes.astype(np.int64)
        block = weights.gather(low + classes)
        n = len(block.indices)
        if job.rough and job.parameters.delta > 0:
            labels = self.piece.first + classes
            n = sparsify(
                block.indptr, block.indices, block.values, labels, job.seed, job.round, job.parameters.delta
            )  # fmt: skip
        return make_tile(block.indptr, block.indices[:n], block.values[:n], self.bias, n_features)

    @contextmanager
    def tile(self, n_features: int) -> Iterator[Tile]:
        """The tile, from the process's cache or made."""
        key = (self.piece.state, self.piece.first, self.piece.last, self.job.rough)
        with shared_cache(self.job.cache_bytes).use(
            key, self.piece.tile_bytes, partial(self.make_tile, n_features)
        ) as tile:
            yield tile

    def search(self, x: Block, y: Block, tile: Tile) -> None:
        """Score a row block."""
        first_row = x.start - self.job.start
        loss = NO_LOSS if self.job.rough else self.job.parameters.loss_code
        search(
            x.indptr, x.indices, x.values, y.indptr, y.indices, first_row, self.piece.first, self.slot_of,
            tile.start, tile.slots, tile.weights, tile.bias, self.active_next, self.active_end, self.active,
            self.capacity, self.best_start, self.best_size, self.best_scores, self.best_rows, self.threshold, loss, self.losses,
            self.scores,
        )  # fmt: skip


@dataclass(frozen=True)
class SearchJob:
    """Rows [start, stop) for the classes of a block, from the weights of the round before.

    Writes, for each class [first, last) of the block, the rows outside its active set that score highest above
    -1 + tol (above -1 - near, without a cap on rounds), at most as many as the next round may add, and the loss summed
    over the rows. check: no round follows, so the highest one is enough. rough: with the parameters' delta and
    min_value, so that losses are no losses and only the rows count; else exact.
    """

    data: str
    parameters: PPDSparseParameters
    seed: int
    round: int
    check: bool
    rough: bool
    start: int
    stop: int
    pieces: tuple[Piece, ...]
    out: str
    plan: MemoryPlan
    cache_bytes: int

    @property
    def first(self) -> int:
        """First class of the block."""
        return self.pieces[0].first

    @property
    def last(self) -> int:
        """Last class of the block, plus one."""
        return self.pieces[-1].last

    @property
    def key(self) -> str:
        """Round, classes, rows."""
        kind = "rough/" if self.rough else ""
        return f"search/{self.round}/{kind}{self.first}-{self.last}/{self.start}-{self.stop}"

    def run(self) -> Receipt:
        """Search; the receipt counts classes with violators (`found`), bytes, row blocks and, where searches may be
        rough, multiply-adds.
        """
        dataset = Dataset(self.data)
        p, d = self.parameters, dataset.n_features
        X, Y = dataset.X_rows(), dataset.Y_rows()
        searches = [_PieceSearch(piece, self, dataset.n_samples) for piece in self.pieces]
        searches = [piece for piece in searches if len(piece.classes)]
        entries = np.zeros(d if p.approximate else 0, np.int32)  # scored, of each feature
        n_blocks = 0
        for x, y in stream((X, Y), self.plan.row_block_bytes, self.start, self.stop, self.plan.cuts.rows):
            n_blocks += 1
            if self.rough and p.min_value > 0:
                keep_large(x.indptr, x.indices, x.values, p.min_value)
            if p.approximate:
                count_indices(x.indices[: x.indptr[-1]], entries)
            for piece in searches:
                with piece.tile(d) as tile:
                    piece.search(x, y, tile)
                del tile  # or it would stay beside the next one, uncounted
        work = {}
        if p.approximate:
            work["work"] = 0
            for piece in searches:
                with piece.tile(d) as tile:
                    work["work"] += count_work(entries, tile.start, tile.weights, piece.width)
                del tile
        return {
            "found": self._write(searches, dataset.n_samples),
            "row_blocks": n_blocks,
            "passes": (self.stop - self.start) / dataset.n_samples,
            "bytes_read": X.bytes_read + Y.bytes_read,
            **work,
        }

    def _write(self, searches: list[_PieceSearch], n_samples: int) -> int:
        with new_found(Path(self.out), self.last - self.first, n_samples) as writer:
            done = self.first
            for piece in searches:
                n = sort_best(piece.capacity, piece.best_start, piece.best_size, piece.best_scores, piece.best_rows)
                counts = np.zeros(piece.piece.last - done, np.int64)
                places = piece.piece.first - done + piece.classes
                counts[places] = piece.best_size[: len(piece.classes)]
                some = places[counts[places] > 0]
                firsts = np.cumsum(counts) - counts
                writer.best[done - self.first + some] = piece.best_scores[firsts[some]]
                rows = piece.best_rows[:n]
                for begin in range(0, max(n, 1), 1 << 20):  # absolute numbers may be twice as wide
                    part = slice(begin, min(begin + (1 << 20), n))
                    writer.rows.append(
                        counts if begin == 0 else counts[:0], rows[part] + np.int64(self.start), piece.best_scores[part]
                    )
                writer.losses[done - self.first + places] = piece.losses[: len(piece.classes)]
                done = piece.piece.last
            writer.rows.append(np.zeros(self.last - done, np.int64), np.empty(0, np.int32), np.empty(0, np.float32))
        return int(self.parameters.violates(writer.best).sum())
