"""Commands in child processes: started, waited for, and what a failing one says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xmc_stream


def cli_command(*arguments: Any) -> list[str]:
    return [sys.executable, "-m", "xmc_stream.cli", *map(str, arguments)]


@contextmanager
def start(*arguments: Any, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A command in a child process, which ends with the block."""
    with subprocess.Popen(
        cli_command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    ) as run:
        try:
            yield run
        finally:
            run.kill()


def wait_until(run: subprocess.Popen[str] | None, ready: Callable[[], bool], seconds: float = 100) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "it took too long"
        assert run is None or run.poll() is None, run.communicate()
        time.sleep(0.01)


def said_at_last(said: str) -> list[str]:
    """Lines of stderr without those of work under way: a plan, what is compiled, how far it is after ten seconds."""
    return [line for line in said.splitlines() if not re.match(r"plan: |compiling kernels|\d\d:\d\d:\d\d ", line)]


def one_line(*arguments: Any) -> str:
    """What a command that fails says."""
    done = subprocess.run(cli_command(*arguments), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, ""), done
    lines = [line for line in said_at_last(done.stderr) if not line.startswith("note: ")]
    assert len(lines) == 1, done.stderr
    [line] = lines
    return line


def environment() -> dict[str, str]:
    """This process's environment, in which a child finds the library."""
    places = (str(Path(xmc_stream.__file__).parents[1]), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
