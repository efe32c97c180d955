"""What a job raises comes back through the engine as it was raised, and nothing else is printed."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
from dataclasses import dataclass

from xmc_stream import errors
from xmc_stream.runtime.engine import Engine
from xmc_stream.runtime.job import Notes, Phase
from xmc_stream.system.memory import MemoryLimit


@dataclass(frozen=True)
class Failing:
    key: str

    def run(self):
        raise getattr(errors, self.key)("what, where, what to do")


def loop(kind):
    yield Phase("fail", [Failing(kind)])
    return {}


for kind in ("InputError", "StoreError", "MemoryLimitError", "ResumeError"):
    try:
        with Engine(MemoryLimit.of("3GB"), 1) as engine:
            engine.run(loop(kind), Notes())
    except errors.XmcStreamError as error:
        print(type(error).__name__, error)
"""


def test_errors_of_jobs_come_back_alone() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True)
    kinds = ("InputError", "StoreError", "MemoryLimitError", "ResumeError")
    assert done.stdout.splitlines() == [f"{kind} what, where, what to do" for kind in kinds]
    assert done.stderr == ""
