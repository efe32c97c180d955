"""Loading every kernel that some work needs, by doing the work on a few made-up rows.

Kernels are compiled once a machine (seconds). A plan can only count what is left of the limit when that is over.
"""

from __future__ import annotations

import pickle
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from xmc_stream.kernels.cache import compiled_before, folder, note_compiled, turn
from xmc_stream.kernels.jit import COMPILED
from xmc_stream.runtime.job import Notes, Receipt, run_here
from xmc_stream.runtime.plan import MIB, MemoryPlan
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.model import begin_model
from xmc_stream.store.new_dataset import new_dataset
from xmc_stream.system.files import temporary_folder
from xmc_stream.system.progress import LOG, current, duration

_loaded: set[str] = set()  # what this process has loaded


class WarmUp(ABC):
    """A job that calls each kernel of some work once. It is pickled: processes of their own may have to compile."""

    @property
    def seconds(self) -> float:
        """That compiling takes on a machine of today."""
        return 20.0

    @property
    def key(self) -> str:
        """Never in a ledger."""
        return "warm"

    @property
    def loads(self) -> str:
        """The name of what it loads: its own, and its fields, which decide which kernels that is."""
        return repr(self)

    @abstractmethod
    def load(self) -> None:
        """Do the work on a few made-up rows, in a temporary folder."""

    def run(self) -> Receipt:
        """Compile, if that was never done on this machine, and load, once in a process.

        A process of its own compiles, as a compiler leaves 200 MB behind; where that fails, this one does and says why.
        The receipt has the seconds that each took.
        """
        name = self.loads
        if name in _loaded or not COMPILED:
            return {}
        began = time.perf_counter()
        compiled = compiled_before(name)
        if not compiled:
            LOG.info(_compiling(self.seconds))
            current().phase(_compiling(self.seconds), None)
            with turn(name):
                if folder() is not None and not compiled_before(name) and self._compile():
                    note_compiled(name)
            current().phase("loading kernels", None)
        between = time.perf_counter()
        self.load()
        if not compiled:
            note_compiled(name)
        _loaded.add(name)
        return {"compiling": 0.0 if compiled else between - began, "loading": time.perf_counter() - between}

    def _compile(self) -> bool:
        """Load in a process of its own; whether that ended well."""
        import subprocess  # where all is compiled nobody needs it

        code = "import pickle, sys; pickle.loads(bytes.fromhex(sys.argv[1])).load()"
        command = [sys.executable, "-c", code, pickle.dumps(self).hex()]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextmanager
def loading(name: str, seconds: float) -> Iterator[None]:
    """A block that loads a few kernels, and compiles them where that was never done: so few seconds only the bar tells."""
    current().phase("loading kernels" if compiled_before(name) else _compiling(seconds), (0.0, 0.0))
    yield
    note_compiled(name)


def _compiling(seconds: float) -> str:
    return f"compiling kernels, once on this machine: about {duration(seconds)}"


def train_a_few(run: Callable[..., Any], dataset: Dataset, name: str, parameters: Any) -> Receipt:
    """Train on a few rows, into a folder beside them; returns attributes of the model. run: makes a run of the method."""
    work, notes = dataset.path.with_name(f"{name}.partial"), Notes()
    begin_model(work)
    return run_here(run(dataset, work, parameters, 0, MemoryPlan(2**40, 256 * MIB, 1), notes).loop(), notes)


@contextmanager
def a_few_rows(n: int = 40, d: int = 12, k: int = 3, several: bool = False) -> Iterator[Dataset]:
    """A dataset of n rows with four of d features and at most one of k labels, in a temporary folder.

    several: each row has label 0 and another one.
    """
    with temporary_folder() as folder:
        path = folder / "warm.xmc"
        rng = np.random.default_rng(0)
        with new_dataset(path, d, k, {}) as writer:
            x = np.sort(rng.permuted(np.tile(np.arange(d, dtype=np.int32), (n, 1)), axis=1)[:, :4], axis=1)
            every = np.arange(n + 1, dtype=np.int64)
            values = rng.random(4 * n, np.float32)
            ends, labels = every, (np.arange(n) < 3).astype(np.int32)
            if several:
                ends, labels = (
                    2 * every,
                    np.column_stack([np.zeros(n), 1 + np.arange(n) % (k - 1)]).astype(np.int32).ravel(),
                )
            writer.append(4 * every, x.ravel(), values, ends, labels)
        yield Dataset(path)
