"""Commands killed at instants uniform over a run end as the undisturbed run did, whatever limit they go on with.

`python benchmarks/kills.py FOLDER --kills 50` is what is run by hand: every phase is hit there.
"""

from __future__ import annotations

import importlib
import os
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.compiler import needs_compiler
from helpers.tools import ROOT

import xmc_stream as xs
from xmc_stream.runtime.ledger import Ledger

N_KILLS = int(os.environ.get("XMC_STREAM_KILLS", "3"))
SHAPE = "--samples 1500 --features 800 --labels 1100 --features-per-sample 30 --test-samples 5000".split()


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("kills")


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
