"""benchmarks/peers.py: its rows, and what it does about programs that are missing or too slow."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.tools import ROOT, load_tool
from sklearn.multiclass import OneVsRestClassifier
from sklearn.svm import LinearSVC

import xmc_stream as xs

# as if only scikit-learn, which the tests need anyway, were installed of the others
FEW_PEERS = """
import importlib.util, runpy, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: name not in ("napkinxc", "pecos", "omikuji") and find_spec(name, *rest) or None
folder = sys.argv.pop(1)
sys.path.insert(0, folder)
runpy.run_path(folder + "/peers.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one small set as text, named "made"."""
    folder = tmp_path_factory.mktemp("peers")
    (folder / "made").mkdir()
    load_tool("make_synthetic").make_synthetic(
        folder / "made" / "train.txt.gz", n_samples=400, n_features=300, n_labels=30, features_per_sample=20,
        n_test_samples=100, seed=1,
    )  # fmt: skip
    (folder / "made" / "train-test.txt.gz").rename(folder / "made" / "test.txt.gz")
    return folder


def precision(scores: np.ndarray, truth: np.ndarray, k: int) -> float:
    """P@k in per cent of dense scores and truth (n, K)."""
    top = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return 100 * float(np.take_along_axis(truth, top, axis=1).mean())


@pytest.mark.slow
@pytest.mark.soak
def test_every_program_is_judged_alike_and_what_is_missing_or_fails_is_named(data: Path, tmp_path: Path) -> None:
    log_path = tmp_path / "log.jsonl"
    options = ["made", "--repeats", "1", "--solver", "tree", "--ours", "refused: --set lam=-1", "--log", str(log_path)]
    done = subprocess.run(
        [sys.executable, "-c", FEW_PEERS, str(ROOT / "benchmarks"), *options],
        capture_output=True, text=True, env={**os.environ, "XMC_STREAM_DATA": str(data)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    napkinxc = ("napkinXC one-vs-rest", "napkinXC PLT", "napkinXC 3 PLTs")
    for name in (*napkinxc, "PECOS XR-Linear", "Omikuji Parabel", "Omikuji Bonsai"):
        (line,) = [line for line in lines if line.startswith(name) and "skipped" in line]
        assert "pip install 'xmc-stream[peers]'" in line
    ours, svm_name = "xmc_stream tree", "OneVsRest(LinearSVC)"
    assert sum(line.startswith(f"made: {ours} - {svm_name}: P@1 ") and line.count(" +- ") == 3 for line in lines) == 1
    rows = {
        row[2]: row[3:] for row in ([cell.strip() for cell in line.split("|")] for line in lines if "| made" in line)
    }
    log = {record["program"]: record for record in map(json.loads, log_path.read_text().splitlines())}
    assert list(rows) == list(log) == ["xmc_stream tree", "xmc_stream refused", "OneVsRest(LinearSVC)"]
    default, refused, svm = log.values()
    assert refused["failure"] == rows["xmc_stream refused"][-1] == "fit: exit code 1"
    assert rows["xmc_stream refused"][0] == "-"
    for record in (default, svm):
        assert min(record["fit s"], record["cpu s"], record["ms/row"], record["model MB"]) > 0
        assert record["peak MB"] > 30

    train = xs.convert(data / "made" / "train.txt.gz", tmp_path / "train.xmc", normalize="l2")
    test = xs.convert(data / "made" / "test.txt.gz", tmp_path / "test.xmc", like=train)
    (X, Y), (X_test, Y_test) = (dense(part) for part in (train, test))
    scores = OneVsRestClassifier(LinearSVC()).fit(X, Y).decision_function(X_test)
    for k, cell in zip((1, 3, 5), rows["OneVsRest(LinearSVC)"][4:7], strict=True):
        expected = precision(scores, Y_test, k)
        assert svm[f"P@{k}"] == pytest.approx(expected, abs=1e-9)
        assert float(cell) == pytest.approx(expected, abs=0.006)
        assert default[f"P@{k}"] == pytest.approx(expected, rel=0.15)  # another loss and regularisation, much the same


def test_a_program_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    peers = importlib.import_module("peers")
    contest = peers.Contest("made", tmp_path, tmp_path, tmp_path, 1, "1GB", timeout=0.01)
    for program in (peers.ours("ours", ()), peers.theirs("sklearn", peers.PEERS["sklearn"])):
        record = peers.once(program, contest, tmp_path / "run", {})
        assert record["failure"] == "fit: over 0.01 s"
        assert "fit s" not in record


def dense(data: xs.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """X (N, D) float32 and Y (N, K) of zeros and ones."""
    x, y = data.X_rows().block(0, data.n_samples), data.Y_rows().block(0, data.n_samples)
    X, Y = np.zeros((data.n_samples, data.n_features), np.float32), np.zeros((data.n_samples, data.n_labels), np.int64)
    X[np.repeat(np.arange(data.n_samples), np.diff(x.indptr)), x.indices] = x.values
    Y[np.repeat(np.arange(data.n_samples), np.diff(y.indptr)), y.indices] = 1
    return X, Y
