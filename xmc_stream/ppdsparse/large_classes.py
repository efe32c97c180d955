"""Large classes of a share, solved while X streams by: how many go together, and what comes out."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import MemoryLimitError
from xmc_stream.linear.kernels.dcd import dual_terms, take_weights
from xmc_stream.linear.kernels.penalty import Ramp, of_class
from xmc_stream.ppdsparse.active_rows import DiskRows, MemoryRows, rows_on_disk
from xmc_stream.ppdsparse.plan import StreamRoom
from xmc_stream.ppdsparse.sets import RoundSets
from xmc_stream.ppdsparse.solver import Solver
from xmc_stream.ppdsparse.spill import SpilledRows
from xmc_stream.ppdsparse.state import BIAS, DUAL, INSIDE, KEPT, UnitStateWriter
from xmc_stream.ppdsparse.streaming import BUFFERS, StreamSolver
from xmc_stream.ppdsparse.weights import ShareWeights
from xmc_stream.runtime.plan import MIB
from xmc_stream.store.matrix import Block, Buffer, SparseMatrix

_STEP = MIB // 8  # active rows whose weights are read at a time
AnyRows = MemoryRows | SpilledRows | DiskRows


class _Rows:
    """The rows of X, read as they stream by; see `streaming.Rows`."""

    def __init__(self, X: SparseMatrix, room: StreamRoom, weights: ShareWeights) -> None:
        self.X, self.n_features, self._room = X, X.shape[1], room
        self._buffers = [Buffer(X, min(room.nnz, X.nnz)) for _ in range(BUFFERS)]
        self._lookup = SparseMatrix(X.path)  # looks rows up, in another thread than the one that reads them
        self._weights = weights.reader()
        self.beside: Executor | None = None  # reads values where a job has several threads

    @property
    def bytes_read(self) -> int:
        """Beside what was read of X by way of the matrix given."""
        return self._lookup.bytes_read

    def gather(self, lines: NDArray[np.int64], number: int) -> Callable[[], Block] | None:
        spans, most = self._lookup.lengths(lines), self._room.nnz
        total = int(spans[1].sum())
        if total <= most:
            return partial(self.X.gather, lines, self._buffers[number], spans, self.beside)
        if len(lines) == 1:
            raise MemoryLimitError(
                f"row {lines[0]} of {self.X.path} has {total} entries, more than the "
                f"{most} planned for: raise --memory-limit or lower --threads"
            )
        return None

    def ahead(self, ranges: Sequence[tuple[int, int]]) -> None:
        for start, stop in ranges:
            self._lookup.will_need(start, stop)

    def weights(self, lines: NDArray[np.int64]) -> NDArray[np.float64]:
        return self._weights.of(lines)


class LargeClasses:
    """Solves large classes of a share, a range of them at a time, and writes their lines of a unit's state in order.

    sets: active sets of the share's classes. ramp: of a warm start's alpha, else None. scratch: a folder for active rows
    that memory has no room for.
    """

    def __init__(
        self, solver: Solver, sets: RoundSets, X: SparseMatrix, room: StreamRoom, weights: ShareWeights, ramp: Ramp | None,
        scratch: Path,
    ) -> None:  # fmt: skip
        self.solver, self.sets, self.X, self.room, self.scratch = solver, sets, X, room, scratch
        self._weights, self._ramp = weights, ramp
        self._rows = _Rows(X, room, weights)
        self.fresh = self.used = 0
        self.passes = 0

    @property
    def bytes_read(self) -> int:
        """Beside what was read of X by way of the matrix given."""
        return self._rows.bytes_read

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
        kept = np.empty(len(classes), np.int64)
        turns, spilled = self.room.together(n_active, self.solver.steps.epochs, self.X.nnz, n_found)
        for begin, end in turns:
            mine = slice(begin, end)
            fits = self.room.bytes(n_active[mine], n_found[mine], spilled) <= self.room.classes
            with ExitStack() as stack:
                self._rows.beside = stack.enter_context(ThreadPoolExecutor(1)) if self.room.threads > 1 else None
                shutil.rmtree(self.scratch, ignore_errors=True)  # of a run that was killed
                stack.callback(shutil.rmtree, self.scratch, ignore_errors=True)
                active = self._active(classes[mine], n_active[mine], fits, spilled)
                stack.callback(active.close)
                self._solve(classes[mine], active, begin, writer, kept[mine])
                del active  # or they would stay beside the next ones, uncounted
        return kept

    def _active(self, classes: NDArray[np.int64], n_active: NDArray[np.int64], fits: bool, spilled: bool) -> AnyRows:
        """The active sets of some classes."""
        order, approximate = self.solver.order, self.sets.approximate
        if not fits:
            return rows_on_disk(self.scratch, self.sets, int(classes[0]))
        if spilled:
            on_disk = SpilledRows(self.scratch, len(classes), order.n_samples, order.strip_bits)
            for i, c in enumerate(classes.tolist()):
                on_disk.put(i, self.sets.of(c, c + 1), approximate)
            on_disk.arrange()
            return on_disk
        active = MemoryRows(n_active, order, approximate)
        for i, c in enumerate(classes.tolist()):
            active.put(i, self.sets.of(c, c + 1))
        return active

    def _solve(
        self, classes: NDArray[np.int64], active: AnyRows, line: int, writer: UnitStateWriter, kept: NDArray[np.int64]
    ) -> None:
        of_classes = self._weights.of(classes)
        stream = StreamSolver(self.solver, active, self._rows, of_classes, min(self.room.threads, len(classes)))
        inside = stream.solve((self.sets.start_weights(classes), self._ramp) if self._ramp else None)
        self.passes += stream.passes
        if isinstance(active, SpilledRows):
            active.collect()
        if self.sets.approximate:
            fresh, used = active.fresh()
            self.fresh, self.used = self.fresh + fresh, self.used + used
        p, n_features, of_rows = self.solver.parameters, self.X.shape[1], self._weights.reader()
        features, local_of = np.arange(n_features, dtype=np.int32), np.empty(n_features, np.int32)
        w_features, w_values = np.empty(n_features, np.int32), np.empty(n_features, np.float32)
        for i in range(active.n_classes):
            dual, kept[i] = 0.0, 0
            penalty = of_class(i, of_classes, self.solver.penalty)
            for rows, sign, alpha in active.parts(i):
                for low in range(0, len(rows), _STEP):
                    part = slice(low, low + _STEP)
                    dual = dual_terms(sign[part], alpha[part], penalty, of_rows.of(rows[part]), dual)
                kept[i] += int(((sign > 0) | (alpha > 0.0)).sum())
            local_of[:] = features
            n, square, objective, bias = take_weights(
                n_features, features, local_of, stream.v[i], stream.v0[i], p.lam, p.tau, w_features, w_values
            )
            writer.weights.append(np.array([n], np.int64), w_features[:n], w_values[:n])
            writer.statistics[line + i, [BIAS, DUAL, KEPT, INSIDE]] = (
                bias, 0.5 * p.tau * square + dual, objective, inside[i],
            )  # fmt: skip
            counts = kept[i : i + 1]
            for rows, sign, alpha in active.parts(i):
                mine = (sign > 0) | (alpha > 0.0)
                writer.active.append(counts, rows[mine], alpha[mine])
                counts = counts[:0]
