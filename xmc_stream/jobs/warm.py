"""Loading every kernel that some work needs.

Kernels are compiled once a machine (seconds), by doing the work on a few made-up rows. A list is kept of what the same
work loads the second time, and other processes load that. A plan can only count what is left of the limit when that is
over.
"""

from __future__ import annotations

import pickle
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import numpy as np

from xmc_stream.folders import temporary_folder
from xmc_stream.jobs.job import Receipt
from xmc_stream.kernels.cache import compiled_before, load_noted, note_calls, note_compiled
from xmc_stream.kernels.jit import calls_listed
from xmc_stream.progress import LOG, current, duration
from xmc_stream.store.dataset import Dataset, new_dataset

_loaded: set[str] = set()  # what this process has loaded


class WarmUp(ABC):
    """A job that calls each kernel of some work once. It is pickled: a process of its own may have to compile.

    seconds: that compiling takes on a processor of today.
    """

    seconds: ClassVar[float] = 20.0

    @property
    def key(self) -> str:
        """Never in a ledger."""
        return "warm"

    @property
    @abstractmethod
    def loads(self) -> str:
        """The name of what it loads. Where its fields decide which kernels that is, they are part of it."""

    @abstractmethod
    def load(self) -> None:
        """Do the work on a few made-up rows, in a temporary folder."""

    def run(self) -> Receipt:
        """Compile, if that was never done on this machine, and load, once in a process.

        A process of its own compiles, as a compiler leaves 200 MB behind; where that fails, this one does and says why.
        The receipt has the seconds that each took.
        """
        name = self.loads
        if name in _loaded:
            return {}
        began = time.perf_counter()
        compiled = compiled_before(name)
        if not compiled:
            LOG.info(_compiling(self.seconds))
            current().phase(_compiling(self.seconds), (0.0, 0.0))
            if self._elsewhere("load") == 0 and (self._elsewhere("note") != 0 or self._elsewhere("load_noted") != 0):
                note_compiled(name)  # at least that
            current().phase("loading kernels", (0.0, 0.0))
        between = time.perf_counter()
        try:
            noted = self.load_noted()
        except (AttributeError, ImportError):  # of a method of somebody else's, which has changed since
            noted = False
        if not noted:
            self.load()
        _loaded.add(name)
        return {"compiling": 0.0 if compiled else between - began, "loading": time.perf_counter() - between}

    def note(self) -> None:
        """Load, in a process that has loaded nothing, what is compiled; and keep what is called of it."""
        with calls_listed() as calls:
            self.load()
        note_calls(self.loads, calls)

    def load_noted(self) -> bool:
        """Load what was kept; False where nothing was. Another process tries it first."""
        return load_noted(self.loads)

    def _elsewhere(self, what: str) -> int:
        """Do it in a process of its own; returns how that ended."""
        import subprocess  # where all is compiled nobody needs it

        code = f"import pickle, sys; pickle.load(sys.stdin.buffer).{what}()"
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(self), check=False, **quiet)  # type: ignore[call-overload]
        return int(done.returncode)


@contextmanager
def loading(name: str, seconds: float) -> Iterator[None]:
    """A block that loads a few kernels, and compiles them where that was never done: so few seconds only the bar tells."""
    current().phase("loading kernels" if compiled_before(name) else _compiling(seconds), (0.0, 0.0))
    yield
    note_compiled(name)


def _compiling(seconds: float) -> str:
    return f"compiling kernels, once on this machine: about {duration(seconds)}"


@contextmanager
def a_few_rows(n: int = 40, d: int = 12) -> Iterator[Dataset]:
    """A dataset of n rows, d features and three labels, of which a row has one, in a temporary folder."""
    with temporary_folder() as folder:
        path = folder / "warm.xmc"
        rng = np.random.default_rng(0)
        with new_dataset(path, d, 3, {}) as writer:
            x = np.sort(rng.permuted(np.tile(np.arange(d, dtype=np.int32), (n, 1)), axis=1)[:, :4], axis=1)
            every = np.arange(n + 1, dtype=np.int64)
            values = rng.random(4 * n, np.float32)
            writer.append(4 * every, x.ravel(), values, every, (np.arange(n) < 3).astype(np.int32))
        yield Dataset(path)
