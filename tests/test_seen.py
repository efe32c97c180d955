"""What one sees of a command: a bar on a terminal, lines in a file, what a plan and the end say."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.commands import cli_command, environment
from helpers.forked import forked_command
from helpers.tools import load_tool

import xmc_stream as xs
from xmc_stream.ppdsparse.forecast import spans_of
from xmc_stream.ppdsparse.method import PPDSparseMethod
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.system import progress as seen
from xmc_stream.system.progress import Progress, current, working


def on_terminal(*words: Any, **more: str) -> tuple[int, str]:
    """Exit code of a command in a pseudo-terminal of 120 columns, and all that it drew there."""
    leader, follower = pty.openpty()
    fcntl.ioctl(leader, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    drawn = bytearray()

    def read() -> None:
        try:
            while got := os.read(leader, 65536):
                drawn.extend(got)
        except OSError:  # the command has ended
            pass

    reader = threading.Thread(target=read, daemon=True)
    with subprocess.Popen(
        cli_command(*words), stdout=follower, stderr=follower, stdin=follower, env={**environment(), **more}
    ) as run:
        os.close(follower)
        reader.start()
        code = run.wait()
    reader.join(60)
    os.close(leader)
    return code, drawn.decode()


def drawings(drawn: str) -> list[str]:
    return [line for line in re.split(r"[\r\n]+", drawn) if "%" in line and "|" in line]


@pytest.mark.slow
def test_one_bar_over_the_whole_command_on_a_terminal(tmp_path: Path) -> None:
    data = tmp_path / "data.xmc"  # large enough that each phase lasts for some drawings
    load_tool("make_synthetic").make_synthetic(
        data, n_samples=12_000, n_features=3000, n_labels=4000, features_per_sample=40, n_test_samples=0, seed=1
    )
    code, drawn = on_terminal("train", data, tmp_path / "m", "--set", "epochs=60", "--set", "last_epochs=60")
    assert code == 0, drawn
    bars = drawings(drawn)
    assert len(bars) > 3, drawn
    assert all(bar.startswith("train ") for bar in bars)  # one bar, of the command
    shares = [int(re.match(r"train +(\d+)%", bar)[1]) for bar in bars]  # type: ignore[index]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] > 30
    assert any("solving, round" in bar for bar in bars)
    assert any(re.search(r"about \d+ s left", bar) for bar in bars)
    assert drawn.count("plan: about") == 1
    assert not re.search(r"[\r\n]+\|", drawn)  # no drawing without a name and a share
    assert "objective" in re.split(r"[\r\n]+", drawn.strip())[-3]  # the bar is gone when the end is printed


@pytest.mark.soak
@pytest.mark.slow
def test_a_bar_is_there_in_the_first_seconds_and_compiling_is_said(small: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    code, drawn = on_terminal("train", small, tmp_path / "m", NUMBA_CACHE_DIR=str(cache))
    assert code == 0, drawn
    bars = drawings(drawn)
    assert re.search(r"\| [0-3] s", bars[0]), bars[0]
    assert any("compiling kernels, once on this machine: about" in bar for bar in bars)
    planned = re.search(r"plan: about (\d+) s", drawn)
    took = re.search(r"([0-9.]+) s, \d+ passes", drawn)
    assert planned
    assert took
    assert 0.5 * float(took[1]) < float(planned[1]) < 2.0 * float(took[1])
    again = subprocess.run(
        cli_command("plan", "train", small, "x"), capture_output=True, text=True, check=True,
        env={**environment(), "NUMBA_CACHE_DIR": str(cache)},
    )  # fmt: skip
    assert "compiling" not in again.stdout + again.stderr


def test_in_a_file_there_are_lines_and_no_bar(small: Path, tmp_path: Path) -> None:
    with forked_command("train", small, tmp_path / "m") as run:
        assert run.wait() == 0, run.stderr
        (line,) = run.stderr.splitlines()
        three = (
            r"plan: about \d+ s, peak memory [\d.]+ MB of [\d.]+ GB, \d+ passes over the data \([\d.]+ [kM]B to read\)"
        )
        assert re.fullmatch(three, line)
    with forked_command("train", small, tmp_path / "n", "--quiet") as run:
        assert run.wait() == 0
        assert run.stderr == ""
    with forked_command("train", small, tmp_path / "o", "--verbose") as run:
        assert run.wait() == 0
        lines = run.stderr.splitlines()
    said = [line.split(" ", 1)[1] for line in lines if re.match(r"\d\d:\d\d:\d\d ", line)]
    assert said[:2] == ["loading kernels", "looking at the data"]
    assert "searching for violators, round 2 of 3" in said
    assert said[-1] == "writing the model"


@pytest.mark.parametrize("words", [("verify",), ("split",), ("evaluate",), ("predict",), ("export",)])
def test_every_command_that_works_long_is_quiet_when_asked(
    words: tuple[str, ...], small: Path, trained: Path, tmp_path: Path
) -> None:
    arguments = {
        "verify": (small,), "split": (small, tmp_path / "a", tmp_path / "b"), "evaluate": (trained, small),
        "predict": (trained, small, tmp_path / "p"), "export": (small, tmp_path / "e.npz"),
    }[words[0]]  # fmt: skip
    with forked_command(*words, *arguments, "-q") as run:
        assert run.wait() == 0, run.stderr
        assert run.stderr == ""
        assert run.stdout


def test_python_says_nothing_unless_logging_is_configured(
    small: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    xs.PPDSparse(memory_limit="2GB", progress=True).fit(small, model=tmp_path / "m")
    assert capfd.readouterr() == ("", "")
    with caplog.at_level(logging.DEBUG, "xmc_stream"):
        xs.PPDSparse(memory_limit="2GB").fit(small, model=tmp_path / "n")
    assert any(record.getMessage().startswith("plan: about") for record in caplog.records)
    assert any("solving, round 1 of 3" in record.getMessage() for record in caplog.records)


def test_lines_come_now_and_then(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(seen, "_FIRST_LINE", 0.05)
    monkeypatch.setattr(seen, "_EVERY", 0.01)
    with caplog.at_level(logging.INFO, "xmc_stream"), working("train", False) as bar:
        bar.expect(100.0)
        bar.phase("solving", (0.0, 0.5))
        bar.advance(0.5)
        time.sleep(0.6)
    lines = [record.getMessage() for record in caplog.records]
    assert 1 <= len(lines) <= 5  # each comes after twice the time of the one before
    assert re.fullmatch(r"train: (2[5-9]|3\d)% done after \d s, about \d+ s left: solving", lines[-1])


def test_a_part_of_a_command_has_a_part_of_its_bar() -> None:
    with working("tune", False) as bar:
        with bar.part(0.2, 0.6, "setting 1 of 2, "), working("train", True) as inner:
            assert inner is bar
            assert current() is bar
            inner.phase("solving", (0.5, 1.0))
            assert bar.share == pytest.approx(0.4)
            inner.advance(0.5)
            assert bar.share == pytest.approx(0.5)
            assert bar.words == "setting 1 of 2, solving"
        assert bar.share == pytest.approx(0.6)
        bar.phase("comparing", (0.0, 0.1))  # it never falls
        assert bar.share == pytest.approx(0.6)
    assert current() is not bar


def test_the_time_left_follows_the_forecast_and_then_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(seen.time, "monotonic", lambda: now[0])
    bar = Progress("train")
    assert bar.seconds_left() is None
    bar.expect(100.0)
    assert bar.seconds_left() == pytest.approx(100.0)
    bar.phase("solving", (0.0, 1.0))
    now[0] += 100.0
    bar.advance(0.5)  # twice as slow as foreseen
    left = bar.seconds_left()
    assert left is not None
    assert 85.0 < left < 100.0
    now[0] += 30.0
    assert bar.seconds_left() == pytest.approx(left - 30.0)
    resumed = Progress("train")
    resumed.expect(100.0)
    resumed.phase("solving", (0.8, 1.0))  # done by an earlier session: it says nothing about the pace
    assert resumed.seconds_left() == pytest.approx(20.0)
    resumed.phase("solving, as many rounds as it takes", None)
    assert resumed.seconds_left() is None


@pytest.mark.parametrize("max_rounds", [3, 6])
def test_phases_take_the_whole_run_in_the_shares_foreseen(max_rounds: int) -> None:
    seconds = {
        "solve/0": 2.0,
        "search/1": 1.0,
        "solve/1": 2.0,
        "search/2": 1.0,
        "solve/2": 3.0,
        "search/3": 1.0,
        "finalise": 1.0,
    }
    of_run = spans_of(PPDSparseParameters(max_rounds=max_rounds), seconds)
    names = [*list(seconds)[:-1]]
    names += [name for r in range(3, max_rounds) for name in (f"solve/{r}", f"search/{r + 1}")]
    spans = [of_run[name] for name in (*names, "finalise")]
    at = 0.0
    for span in spans:
        assert span is not None
        assert span[0] == pytest.approx(at)
        at = span[1]
    assert at == 1.0
    first, second = spans[:2]
    assert first is not None
    assert second is not None
    assert first[1] - first[0] == pytest.approx(2 * (second[1] - second[0]))
    assert not spans_of(PPDSparseParameters(max_rounds=None), seconds)


class Noted(Progress):
    """Notes where each phase begins, and what it says."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[float, str]] = []

    def phase(self, words: str, span: tuple[float, float] | None = (0.0, 1.0)) -> None:
        super().phase(words, span)
        self.steps.append((self.share, words))


@pytest.mark.parametrize("solver", ["ppdsparse", "pdsparse", "leml", "cplst", "group-lasso", "memoir", "tree"])
def test_every_method_says_how_far_it_is(solver: str, tmp_path: Path) -> None:
    from xmc_stream.methods.contract import Task
    from xmc_stream.methods.registry import parameters
    from xmc_stream.models import Execution
    from xmc_stream.training.train import train

    X = sp.csr_matrix(np.repeat(np.eye(4, dtype=np.float32), 60, axis=0))
    data = xs.convert(X, tmp_path / "d.xmc", labels=X)
    values: dict[str, dict[str, Any]] = {"leml": {"rank": 2}, "cplst": {"rank": 2}, "group-lasso": {"lam": [0.1, 0.01]}}
    noted = Noted()
    token = seen._current.set(noted)
    try:
        train(Task(data, parameters(solver, values.get(solver, {})), 0), tmp_path / "m", Execution("2GB", 1))
    finally:
        seen._current.reset(token)
    shares = [share for share, _ in noted.steps]
    assert shares == sorted(shares)
    assert noted.steps[-1][1] == "writing the model"
    assert noted.share > 0.9
    assert len({round(share, 3) for share in shares}) > 3, noted.steps
    assert not any(re.search(r"A\^T A|, W$", words) for _, words in noted.steps)


def test_the_end_says_that_all_is_well_or_what_to_do() -> None:
    report = {
        "objective": 1000.0, "duality_gap_mean": 0.012, "duality_gap": 0.2, "n_open": 12_194, "rounds": 6,
        "params": {"max_rounds": 6, "tol": 0.01},
    }  # fmt: skip
    usual, well = PPDSparseMethod().summary(report)
    assert usual == "objective 1000: within 1.2 % of its optimum on average, 20 % for the worst class"
    assert well.startswith("trained as far as it pays")
    assert "--set max_rounds=none" in well
    (_, far) = PPDSparseMethod().summary({**report, "duality_gap_mean": 0.4})
    assert "farther than usual" in far
    assert "--set max_rounds=none" in far
    (_, done) = PPDSparseMethod().summary({**report, "n_open": 0})
    assert done.startswith("every class is within tol")
    (_, stopped) = PPDSparseMethod().summary({**report, "rounds": 40, "params": {"max_rounds": None, "tol": 0.01}})
    assert "did not halve in 5 rounds of 640 epochs" in stopped
    for line in (usual, well, far, done, stopped):
        assert "stopped short" not in line


@pytest.mark.slow
def test_a_plan_that_does_not_fit_ends_with_one_limit_and_exit_code_1(
    small: Path, commands: Callable[..., Any], tmp_path: Path
) -> None:
    line = commands("plan", "train", small, tmp_path / "m", "--memory-limit", "100MB", fails=True)
    assert line.startswith("xmc-stream: train does not fit: ")
    assert len(re.findall(r"\d+MB", line)) == 1  # the limits that are left are sizes in words
    (least,) = re.findall(r"set --memory-limit to (\d+MB)", line)
    assert commands("plan", "train", small, tmp_path / "m", "--memory-limit", least)["fits"]
    done = subprocess.run(
        [sys.executable, "-m", "xmc_stream.cli", "plan", "train", str(small), "m", "--memory-limit", "100MB", "--json"],
        capture_output=True, text=True, check=False, env=environment(),
    )  # fmt: skip
    assert done.returncode == 1
    assert '"fits": false' in done.stdout


def test_a_gap_that_rounding_hides_ends_a_class() -> None:
    from xmc_stream.ppdsparse.state import DONE, DUAL, INSIDE, KEPT, N_STATISTICS, STATUS, update_statistics

    p = PPDSparseParameters(C=1.0, positive_weight=1.0, max_rounds=None, tol=1e-5)
    statistics = np.zeros((4, N_STATISTICS))
    statistics[:, KEPT], statistics[:, INSIDE] = 100.0, 0.1  # never within tol
    gaps = np.array([-1e-9, 1e-9, 50.0, 50.0])
    for round_ in range(1, 36):
        statistics[:, DUAL] = -100.0 + gaps
        statistics[:, DUAL] -= np.array([0.0, 0.0, 0.0, 30.0]) * (round_ == 35)  # one has halved its gap
        update_statistics(statistics, (), 0, p, round_, np.ones((4, 2)))
        if round_ < 10:
            assert not (statistics[:, STATUS] == DONE).any()
        elif round_ < 35:  # the others have more epochs in each round
            assert (statistics[:, STATUS] == DONE).tolist() == [True, True, False, False]
            assert p.epochs_of(round_) == 10 * 2 ** (round_ // 5)
    assert (statistics[:, STATUS] == DONE).tolist() == [True, True, True, False]
    assert p.epochs_of(35) == p.epochs_of(30) == p.epochs_of(100) == 640


@pytest.mark.slow
def test_a_run_without_a_cap_ends_on_rows_that_do_not_converge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = os.environ.get("XMC_STREAM_DATA")
    if not folder:
        pytest.skip("XMC_STREAM_DATA is not set: no real data sets at hand")
    data = xs.convert(Path(folder) / "letter" / "train.txt.gz", tmp_path / "letter.xmc")  # rows of length 30
    for module in ("parameters", "state"):
        monkeypatch.setattr(f"xmc_stream.ppdsparse.{module}.DOUBLINGS", 0)
    clf = xs.PPDSparse(memory_limit="2GB", max_rounds=None).fit(data, model=tmp_path / "m")
    assert clf.report_["n_open"] > 0
    assert clf.report_["rounds"] <= 25
    (_, why) = PPDSparseMethod().summary(clf.report_)
    assert "did not halve in 5 rounds of 10 epochs" in why


def test_info_shows_the_beginning_and_the_end_of_a_long_history() -> None:
    from xmc_stream.cli.datasets import _model_lines

    report = {"kind": "model", "history": [{"pass": i, "dual": 1.0} for i in range(1500)], "run": {"sessions": 0}}
    lines = _model_lines(report)
    assert len(lines) < 50
    assert any("1,460 more (--json has them all)" in line for line in lines)
    assert lines[-1].strip() == "pass 1,499: dual 1"
