"""A command of the library that says what it is doing, for a watcher that wants to kill it there.

    python benchmarks/beacon.py FILE train DATA MODEL ...

FILE holds a counter a phase (int32): how many threads are in it. It is a map that outlives the process.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

# in a solve job or a pass and reading its rows: gather too; compilation: with a cache of kernels of its own
PHASES = (
    "conversion", "compilation", "check", "search", "gather", "solve", "pass", "objective", "weights", "vectors", "split",
    "root", "beam", "choice", "children", "finalise", "prediction",
)  # fmt: skip


def make(path: Path) -> np.ndarray:
    """A file of counters at zero."""
    counts = np.memmap(path, np.int32, "w+", shape=len(PHASES))
    counts[:] = 0
    return counts


def active(path: Path) -> list[str]:
    """The phases that a process is in, or was in when it was killed."""
    counts = np.fromfile(path, np.int32)
    return [phase for phase, n in zip(PHASES, counts, strict=True) if n > 0]


def main(path: Path, arguments: list[str]) -> None:
    from xmc_stream import cli
    from xmc_stream.linear import predict
    from xmc_stream.pdsparse import jobs
    from xmc_stream.pdsparse import method as pd_method
    from xmc_stream.ppdsparse import method, search, solve, state
    from xmc_stream.runtime import check
    from xmc_stream.store.matrix import SparseMatrix
    from xmc_stream.tree import beams, choice, clustering, streaming, units
    from xmc_stream.tree import method as tree_method
    from xmc_stream.tree import predict as tree_predict
    from xmc_stream.tree import solve as tree_solve

    counts = np.memmap(path, np.int32, "r+", shape=len(PHASES))
    lock, warming = threading.Lock(), threading.Event()
    cold = "NUMBA_CACHE_DIR" in os.environ

    def marked(method: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*values: Any, **options: Any) -> Any:
            if phase == "compilation":
                warming.set()
            elif warming.is_set():  # the little training that loads the kernels
                return method(*values, **options)
            told = phase != "compilation" or cold
            with lock:
                counts[PHASES.index(phase)] += told
            try:
                return method(*values, **options)
            finally:
                warming.clear()
                with lock:
                    counts[PHASES.index(phase)] -= told

        return run

    if arguments[0] == "convert":
        counts[PHASES.index("conversion")] = 1
    for owner, phase in (
        (check.CheckJob, "check"), (search.SearchJob, "search"), (solve.SolveJob, "solve"),
        (state.FinaliseJob, "finalise"), (predict.PredictJob, "prediction"), (jobs.SegmentJob, "pass"),
        (jobs.ObjectiveJob, "objective"), (jobs.WeightsJob, "weights"), (jobs.UnitJob, "finalise"),
        (clustering.VectorsJob, "vectors"), (clustering.SplitJob, "split"), (streaming.StreamJob, "root"),
        (beams.BeamJob, "beam"), (choice.ChoiceJob, "choice"), (tree_solve.SolveJob, "children"), (units.UnitJob, "finalise"),
        (tree_predict.TreeJob, "prediction"),
        (method.PPDSparseWarmUp, "compilation"), (pd_method.PDSparseWarmUp, "compilation"),
        (tree_method.TreeWarmUp, "compilation"),
    ):  # fmt: skip
        mock.patch.object(owner, "run", marked(owner.run, phase)).start()  # to the end of the process
    mock.patch.object(SparseMatrix, "gather", marked(SparseMatrix.gather, "gather")).start()
    cli.main(arguments)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
