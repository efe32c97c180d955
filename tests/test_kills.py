"""Commands killed at instants uniform over a run end as the undisturbed run did, whatever limit they go on with.

`python benchmarks/kills.py FOLDER --kills 50` is what is run by hand: every phase is hit there.
"""

from __future__ import annotations

import importlib
import os
import random
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from helpers.compiler import needs_compiler
from helpers.forked import Forked
from helpers.tools import ROOT

import xmc_stream as xs
from xmc_stream.runtime.ledger import Ledger

N_KILLS = int(os.environ.get("XMC_STREAM_KILLS", "3"))
SHAPE = "--samples 1500 --features 800 --labels 1100 --features-per-sample 30 --test-samples 5000".split()


def _python(words: Sequence[str], said: str | None) -> None:
    """Be what Python is with these words: a script or a module, and its arguments."""
    if said is not None:
        with open(said, "wb") as file:
            os.dup2(file.fileno(), 2)
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


class Command(Forked):
    """As `subprocess.Popen`."""

    def __init__(self, words: Sequence[Any], said: Path | None = None) -> None:
        super().__init__(_python, [str(word) for word in words[1:]], None if said is None else str(said))

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, seconds: float | None = None) -> int | None:
        if (code := super().wait(seconds)) is None:
            raise subprocess.TimeoutExpired("command", seconds or 0)
        return code


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The benchmark. Its commands are forked: no kill falls into the start of Python."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    module = importlib.import_module("kills")

    def start(step: Any, folder: Path, execution: tuple[str, int]) -> Command:
        module.beacon.make(folder / "beacon")
        return processes.enter_context(Command(step.command(folder, execution), folder / "said"))

    def run(words: Sequence[Any], **_: Any) -> None:
        with Command(words) as command:
            assert command.wait() == 0, command.stderr

    with ExitStack() as processes:
        monkeypatch.setattr(module, "start", start)
        monkeypatch.setattr(module, "subprocess", SimpleNamespace(**{**vars(subprocess), "run": run}))
        yield module


@pytest.mark.slow
@needs_compiler
def test_every_killed_command_ends_as_the_undisturbed_one(tmp_path: Path, kills: ModuleType) -> None:
    done = kills.campaign(tmp_path / "kills", N_KILLS, 3, SHAPE)
    assert [(kill.step.name, kill.phases, kill.why) for kill in done if not kill.same] == []
    assert len(done) >= N_KILLS
    assert all(kill.kills for kill in done)


@pytest.fixture(scope="module")
def pd_sparse(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A training, run undisturbed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        folder = tmp_path_factory.mktemp("pdsparse")
        return importlib.import_module("kills").steps(folder, SHAPE, ["max_passes=8"], False, "pdsparse", ["train"])[0]


@pytest.mark.soak
@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(("phase", "seconds"), [("pass", 0.2), ("weights", 0.0)])
def test_pd_sparse_killed_ends_as_the_undisturbed_run(
    tmp_path: Path, kills: ModuleType, pd_sparse: Any, phase: str, seconds: float
) -> None:
    killed = kills.disturbed(pd_sparse, tmp_path / "kill", random.Random(0), seconds, phase)
    assert (killed.same, killed.why) == (True, "")
    assert killed.kills == 1 or phase == "weights"  # which takes milliseconds: the kill may come too late


def test_what_a_killed_prediction_left_beside_its_file_is_replaced(small: Path, trained: Path, tmp_path: Path) -> None:
    model, test = xs.load_model(trained), xs.open_dataset(small.with_name("small-test.xmc"))
    xs.predict(model, test, tmp_path / "whole.txt", k=2)
    work = tmp_path / "pred.txt.partial"  # killed while it was turned into lines
    with Ledger(work / "ledger", {"command": "predict"}):
        xs.predict(model, test, work / "predictions", k=3)
        (work / "store").write_text("1:0.5 2:")
    xs.predict(model, test, tmp_path / "pred.txt", k=2)
    assert (tmp_path / "pred.txt").read_bytes() == (tmp_path / "whole.txt").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pred.txt", "whole.txt"]
