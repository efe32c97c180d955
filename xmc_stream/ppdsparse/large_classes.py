"""Large classes of a unit, solved while X streams by: how many go together, and what comes out."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import MemoryLimitError
from xmc_stream.kernels.blocks import ActiveSets
from xmc_stream.kernels.order import RowOrder
from xmc_stream.linear.kernels.dcd import dual_terms, take_weights
from xmc_stream.linear.kernels.penalty import of_class
from xmc_stream.ppdsparse.active_rows import DiskRows, MemoryRows
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.ppdsparse.plan import StreamRoom
from xmc_stream.ppdsparse.solver import has_dense_rows
from xmc_stream.ppdsparse.spill import SpilledRows
from xmc_stream.ppdsparse.state import BIAS, DUAL, INSIDE, KEPT, UnitStateWriter
from xmc_stream.ppdsparse.streaming import BUFFERS, StreamSolver, Weights
from xmc_stream.ppdsparse.weights import LossWeights, RowWeights
from xmc_stream.runtime.plan import MIB
from xmc_stream.store.matrix import Block, Buffer, SparseMatrix

_STEP = MIB // 8  # active rows whose weights are read at a time
AnyRows = MemoryRows | SpilledRows | DiskRows


class LargeClasses:
    """Solves large classes of a unit, a range of them at a time, and writes their lines of a unit's state in order.

    active_set: of a class, in memory. rows_on_disk: of a class that is too large for that, in a folder. weights: those of a
    warm start of some classes, or None. start_slopes: of its alpha. loss_weights: of the run; of_classes (n, 2): of all
    classes of the unit, or of no length.
    """

    def __init__(
        self,
        parameters: PPDSparseParameters,
        seed: int,
        round_: int,
        order: RowOrder,
        X: SparseMatrix,
        room: StreamRoom,
        approximate: bool,
        active_set: Callable[[int], ActiveSets],
        rows_on_disk: Callable[[int, Path], DiskRows],
        weights: Callable[[NDArray[np.int64]], Iterator[Weights]] | None,
        start_slopes: tuple[float, float],
        scratch: Path,
        loss_weights: LossWeights,
        of_classes: NDArray[np.float64],
    ) -> None:
        self.parameters, self.seed, self.round, self.order = parameters, seed, round_, order
        self.X, self.room, self.approximate, self.scratch = X, room, approximate, scratch
        self._active_set, self._rows_on_disk, self._weights = active_set, rows_on_disk, weights
        self.start_slopes = start_slopes
        self._loss_weights, self._of_classes = loss_weights, of_classes
        self.fresh = self.used = 0
        self.passes = 0
        self._lookup = SparseMatrix(X.path)  # looks rows up, in another thread than the one that reads them
        self._beside: Executor | None = None  # reads values where a job has several threads

    @property
    def bytes_read(self) -> int:
        """Beside what was read of X by way of the matrix given."""
        return self._lookup.bytes_read

    def solve(
        self,
        classes: NDArray[np.int64],
        n_active: NDArray[np.int64],
        n_found: NDArray[np.int64],
        writer: UnitStateWriter,
    ) -> NDArray[np.int64]:
        """Solve; class classes[i], with so many active rows and rows found, is line i of the state.

        Returns the sizes of the active sets that are kept.
        """
        buffers = [Buffer(self.X, min(self.room.nnz, self.X.nnz)) for _ in range(BUFFERS)]
        kept = np.empty(len(classes), np.int64)
        turns, spilled = self.room.together(n_active, self.parameters.epochs_of(self.round), self.X.nnz, n_found)
        for begin, end in turns:
            mine = slice(begin, end)
            fits = self.room.bytes(n_active[mine], n_found[mine], spilled) <= self.room.classes
            with ExitStack() as stack:
                self._beside = stack.enter_context(ThreadPoolExecutor(1)) if self.room.threads > 1 else None
                shutil.rmtree(self.scratch, ignore_errors=True)  # of a run that was killed
                stack.callback(shutil.rmtree, self.scratch, ignore_errors=True)
                active = self._active(classes[mine], n_active[mine], fits, spilled)
                stack.callback(active.close)
                self._solve(classes[mine], active, begin, buffers, writer, kept[mine])
                del active  # or they would stay beside the next ones, uncounted
        return kept

    def _active(self, classes: NDArray[np.int64], n_active: NDArray[np.int64], fits: bool, spilled: bool) -> AnyRows:
        """The active sets of some classes."""
        n = self.order.n_samples
        if not fits:
            return self._rows_on_disk(int(classes[0]), self.scratch)
        if spilled:
            on_disk = SpilledRows(self.scratch, len(classes), n, self.order.strip_bits)
            for i, c in enumerate(classes):
                on_disk.put(i, self._active_set(int(c)), self.approximate)
            on_disk.arrange()
            return on_disk
        active = MemoryRows(n_active, self.order, self.approximate)
        for i, c in enumerate(classes):
            active.put(i, self._active_set(int(c)))
        return active

    def _solve(
        self, classes: NDArray[np.int64], active: AnyRows, line: int, buffers: list[Buffer], writer: UnitStateWriter,
        kept: NDArray[np.int64],
    ) -> None:  # fmt: skip
        def gather(lines: NDArray[np.int64], number: int) -> Callable[[], Block] | None:
            spans = self._lookup.lengths(lines)
            total = int(spans[1].sum())
            if total > self.room.nnz:
                if len(lines) == 1:
                    raise MemoryLimitError(
                        f"row {lines[0]} of {self.X.path} has {total} entries, more than the "
                        f"{self.room.nnz} planned for: raise --memory-limit or lower --threads"
                    )
                return None
            return partial(self.X.gather, lines, buffers[number], spans, self._beside)

        def ahead(ranges: Sequence[tuple[int, int]]) -> None:
            for start, stop in ranges:
                self._lookup.will_need(start, stop)

        solver = StreamSolver(
            self.parameters, self.seed, self.order.n_samples, self.X.shape[1], self.order.strip_bits, active, gather,
            ahead, RowWeights(self._loss_weights), self._of_classes[classes] if len(self._of_classes) else self._of_classes,
            min(self.room.threads, len(classes)),
            has_dense_rows(self.order.n_samples, self.X.shape[1], self.X.nnz),
        )  # fmt: skip
        inside = solver.solve(self.round, self._weights(classes) if self._weights else None, self.start_slopes)
        self.passes += solver.passes
        if isinstance(active, SpilledRows):
            active.collect()
        if self.approximate:
            fresh, used = active.fresh()
            self.fresh, self.used = self.fresh + fresh, self.used + used
        self._write(classes, active, solver, inside, line, writer, kept)

    def _write(
        self, classes: NDArray[np.int64], active: AnyRows, solver: StreamSolver, inside: NDArray[np.float64], line: int,
        writer: UnitStateWriter, kept: NDArray[np.int64],
    ) -> None:  # fmt: skip
        p, n_features = self.parameters, self.X.shape[1]
        features, local_of = np.arange(n_features, dtype=np.int32), np.empty(n_features, np.int32)
        w_features, w_values = np.empty(n_features, np.int32), np.empty(n_features, np.float32)
        of_rows = RowWeights(self._loss_weights)
        for i in range(active.n_classes):
            dual, kept[i] = 0.0, 0
            penalty = of_class(int(classes[i]), self._of_classes, solver.penalty)
            for rows, sign, alpha in active.parts(i):
                for low in range(0, len(rows), _STEP):
                    part = slice(low, low + _STEP)
                    dual = dual_terms(sign[part], alpha[part], penalty, of_rows.of(rows[part]), dual)
                kept[i] += int(((sign > 0) | (alpha > 0.0)).sum())
            local_of[:] = features
            n, square, objective, bias = take_weights(
                n_features, features, local_of, solver.v[i], solver.v0[i], p.lam, p.tau, w_features, w_values
            )
            one = np.array([n], np.int64)
            writer.weights.append(one, w_features[:n], w_values[:n])
            writer.statistics[line + i, [BIAS, DUAL, KEPT, INSIDE]] = (
                bias, 0.5 * p.tau * square + dual, objective, inside[i],
            )  # fmt: skip
            counts = kept[i : i + 1]
            for rows, sign, alpha in active.parts(i):
                mine = (sign > 0) | (alpha > 0.0)
                writer.active.append(counts, rows[mine], alpha[mine])
                counts = counts[:0]
