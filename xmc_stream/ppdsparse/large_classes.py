"""Large classes of a share, solved while X streams by: how many go together, and what comes out."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.linear.kernels.dcd import dual_terms, take_weights
from xmc_stream.linear.kernels.penalty import Ramp, of_class
from xmc_stream.ppdsparse.active_rows import DiskRows, MemoryRows, rows_on_disk
from xmc_stream.ppdsparse.plan import StreamRoom
from xmc_stream.ppdsparse.sets import RoundSets
from xmc_stream.ppdsparse.solver import Solver
from xmc_stream.ppdsparse.spill import SpilledRows
from xmc_stream.ppdsparse.state import BIAS, DUAL, INSIDE, KEPT, UnitStateWriter
from xmc_stream.ppdsparse.streaming import StreamedRows, StreamSolver
from xmc_stream.ppdsparse.weights import ShareWeights
from xmc_stream.runtime.plan import MIB
from xmc_stream.store.matrix import SparseMatrix

_STEP = MIB // 8  # active rows whose weights are read at a time
AnyRows = MemoryRows | SpilledRows | DiskRows


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
        self.rows = StreamedRows(X, room.nnz, weights.reader())
        self.fresh = self.used = 0
        self.passes = 0

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
                self.rows.beside = stack.enter_context(ThreadPoolExecutor(1)) if self.room.threads > 1 else None
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
        stream = StreamSolver(self.solver, active, self.rows, of_classes, min(self.room.threads, len(classes)))
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
