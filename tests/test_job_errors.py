"""What a job raises comes back through the engine as it was raised, and nothing else is printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from xmc_stream import errors
from xmc_stream.engine.runner import Engine
from xmc_stream.jobs.job import Loop, Notes, Phase
from xmc_stream.memory import MemoryLimit


@dataclass(frozen=True)
class Failing:
    """A job that raises an error of a kind."""

    kind: str

    @property
    def key(self) -> str:
        return "fail"

    def run(self) -> dict[str, Any]:
        raise getattr(errors, self.kind)("what, where, what to do")


@pytest.mark.parametrize("kind", ["InputError", "StoreError", "MemoryLimitError", "ResumeError"])
def test_errors_of_jobs_come_back_alone(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    def loop() -> Loop:
        yield Phase("fail", [Failing(kind)])
        return {}

    with (
        pytest.raises(getattr(errors, kind), match="^what, where, what to do$"),
        Engine(MemoryLimit.of("1GB"), 1) as engine,
    ):
        engine.run(loop(), Notes())
    assert capfd.readouterr().err == ""
