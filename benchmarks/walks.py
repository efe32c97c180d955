"""How much of the package a user's first commands walk through: files and functions entered, and modules of no use.

    python benchmarks/walks.py            # a table
    python benchmarks/walks.py --check    # ends with 1 where a walk is longer than its ceiling
    python benchmarks/walks.py --list     # and the functions of each file

Calls of functions that stand in files of the package are counted, from the first call on; what runs while a module is imported
does not count. Nothing is compiled, so that kernels are seen too. Each walk runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import click

PACKAGE = Path(__file__).parents[1] / "xmc_stream"
CEILINGS = {"convert": 38, "fit and predict": 84, "solve": 29}  # files; to be lowered where a walk becomes shorter
TEXT = "3 4 3\n0,1 0:1.0 2:0.5\n2 1:1 3:1\n1 0:2\n"


class Walk:
    """The functions of the package that are called in a block, by file; those that import something are left out."""

    def __init__(self, begins: str = "") -> None:
        self.entered: Counter[tuple[str, str]] = Counter()
        self._begins = begins  # the function by whose first call it begins
        self._importing = threading.local()

    def __enter__(self) -> Walk:
        threading.setprofile(self._seen)
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _seen(self, frame: FrameType, event: str, _: Any) -> None:
        code, here = frame.f_code, self._importing
        if code.co_name == "<module>" or code.co_filename.startswith("<frozen importlib"):
            here.depth = getattr(here, "depth", 0) + (event == "call") - (event == "return")
        elif event == "call" and not getattr(here, "depth", 0):
            path = Path(code.co_filename)
            if path.is_relative_to(PACKAGE) and not code.co_name.startswith("<"):
                self.entered[str(path.relative_to(PACKAGE)), f"{code.co_name}:{code.co_firstlineno}"] += 1

    def told(self) -> dict[str, Any]:
        """Files, functions, and modules of the package that were imported although no function of theirs was called."""
        files = {file for file, _ in self.entered}
        imported = {
            str(Path(module.__file__).relative_to(PACKAGE))
            for name, module in sys.modules.items()
            if name.startswith("xmc_stream.") and module.__file__
        }
        functions: dict[str, list[str]] = {file: [] for file in sorted(files)}
        for file, function in sorted(self.entered):
            functions[file].append(function.partition(":")[0])
        return {"files": len(files), "functions": len(self.entered), "idle": sorted(imported - files), "of": functions}


def convert(folder: Path) -> Walk:
    """Convert a text of three rows."""
    (folder / "t.txt").write_text(TEXT)
    import xmc_stream as xs

    with Walk() as walk:
        xs.convert(folder / "t.txt", folder / "t.xmc")
    return walk


def fit_and_predict(folder: Path) -> Walk:
    """Fit PPDSparse on thirty rows, and predict."""
    X, Y = thirty_rows()
    import xmc_stream as xs

    with Walk() as walk:
        xs.PPDSparse().fit(X, Y).predict(X)
    return walk


def solve(folder: Path) -> Walk:
    """One job that solves classes, of PPDSparse on thirty rows."""
    X, Y = thirty_rows()
    import xmc_stream as xs
    from xmc_stream.ppdsparse.solve import SolveJob

    walk, run = Walk(), SolveJob.run

    def walked(job: SolveJob) -> Any:
        if walk.entered:
            return run(job)
        with walk:
            return run(job)

    with mock.patch.object(SolveJob, "run", walked):
        xs.PPDSparse(all_rows=False, threads=1).fit(X, Y)
    return walk


def thirty_rows() -> tuple[Any, Any]:
    """A sparse problem of twenty features and six labels."""
    import numpy as np
    import scipy.sparse as sp

    rng = np.random.default_rng(0)
    X = sp.random(30, 20, 0.3, format="csr", dtype=np.float32, random_state=rng)
    return X, sp.random(30, 6, 0.3, format="csr", random_state=rng)


WALKS: dict[str, Callable[[Path], Walk]] = {"convert": convert, "fit and predict": fit_and_predict, "solve": solve}


def walked(name: str) -> dict[str, Any]:
    """What a walk is told of, from a process of its own."""
    code = f"import json, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import walks; walks.tell({name!r})"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, stdout=subprocess.PIPE, check=True
    )
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def tell(name: str) -> None:
    """Walk, and print what was seen."""
    with tempfile.TemporaryDirectory() as folder:
        walk = WALKS[name](Path(folder))
    print(json.dumps(walk.told()))


@click.command()
@click.option("--check", is_flag=True, help="End with 1 where a walk is longer than its ceiling.")
@click.option("--list", "listed", is_flag=True, help="Name the functions of each file.")
def main(check: bool, listed: bool) -> None:
    """Walk, and print how long each walk was."""
    print(f"{'walk':16} {'files':>6} {'ceiling':>8} {'functions':>10} {'modules of no use':>18}")
    too_long = False
    for name in WALKS:
        told = walked(name)
        too_long |= told["files"] > CEILINGS[name]
        print(f"{name:16} {told['files']:6} {CEILINGS[name]:8} {told['functions']:10} {len(told['idle']):18}")
        if listed:
            for file, functions in told["of"].items():
                print(f"    {file}: {', '.join(functions)}")
            print(f"    imported, not entered: {', '.join(told['idle'])}")
    if check and too_long:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
