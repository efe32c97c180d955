"""The commands, as a user gives them: JSON keys, one-line errors, memory."""

from __future__ import annotations

import gzip
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xmc_stream.store.predictions import Predictions

TRAIN_KEYS = (
    "model solver params seed seconds peak_rss memory_limit passes bytes_read nnz model_bytes objective duality_gap "
    "resumed"
)
CONVERT_KEYS = "dataset n_samples n_features n_labels nnz_features nnz_labels bytes_in bytes_on_disk seconds peak_rss"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small learnable set as text: train.txt.gz and train-test.txt.gz."""
    from helpers.tools import load_tool

    path = tmp_path_factory.mktemp("texts") / "train.txt.gz"
    load_tool("make_synthetic").make_synthetic(
        path, n_samples=3000, n_features=300, n_labels=40, features_per_sample=30, n_test_samples=300, seed=2
    )
    return path, path.with_name("train-test.txt.gz")


@pytest.mark.slow
def test_the_main_job(
    texts: tuple[Path, Path], tmp_path: Path, cli: Callable[..., Any], commands: Callable[..., Any]
) -> None:
    train, test, model, pred = (tmp_path / name for name in ("train.xmc", "test.xmc", "m.model", "pred.zarr"))
    converted = commands("convert", texts[0], train, "--normalize", "l2", "--memory-limit", "512MB")
    assert set(CONVERT_KEYS.split()) <= set(converted)
    commands("convert", texts[1], test, "--like", train)
    trained = cli("train", train, model, "--memory-limit", "512MB", "--set", "lam=0.02")
    assert set(TRAIN_KEYS.split()) <= set(trained)
    assert trained["params"]["lam"] == 0.02
    assert trained["peak_rss"] <= trained["memory_limit"] == 512_000_000
    assert trained["passes"] == 3
    predicted = commands("predict", model, test, pred, "-k", 7, "--memory-limit", "512MB")
    assert set("predictions n_samples k seconds ms_per_sample peak_rss".split()) <= set(predicted)
    figures = commands("evaluate", pred, test, "--train", train, "-k", 1, "-k", 3)
    assert {"n_samples", "P@1", "nDCG@3", "R@1", "PSP@3", "PSnDCG@3"} <= set(figures)
    assert figures["P@1"] > 30
    of_model = commands("evaluate", model, test, "--train", train, "-k", 1, "-k", 3)
    every_score = {"macro_F1", "macro_F1_present", "hamming_loss", "average_auc"}
    assert {name: value for name, value in of_model.items() if name not in every_score} == figures
    assert set(of_model) - set(figures) == every_score
    for path, kind in ((train, "dataset"), (model, "model")):
        told = commands("info", path, "--digest")
        assert told["kind"] == kind
        assert len(told["digest"]) == 64


@pytest.mark.slow
def test_predictions_as_npz_and_text_are_those_of_the_store(
    small: Path, trained: Path, tmp_path: Path, commands: Callable[..., Any]
) -> None:
    test = small.with_name("small-test.xmc")
    for name in ("p.zarr", "p.npz", "p.txt"):
        commands("predict", trained, test, tmp_path / name, "-k", 3)
    stored = Predictions(tmp_path / "p.zarr")
    labels, scores = stored.rows(0, stored.n_samples)
    with np.load(tmp_path / "p.npz") as file:
        assert np.array_equal(file["labels"], labels)
        assert np.array_equal(file["scores"], scores)
    lines = (tmp_path / "p.txt").read_text().splitlines()
    assert [[int(pair.split(":")[0]) for pair in line.split()] for line in lines] == labels.tolist()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.npz", "p.txt", "p.zarr"]


@pytest.mark.slow
def test_errors_are_one_line_and_say_what_to_do(
    small: Path, trained: Path, texts: tuple[Path, Path], tmp_path: Path, commands: Callable[..., Any]
) -> None:
    commands("convert", texts[1], tmp_path / "other.xmc")
    assert "--like" in commands("predict", trained, tmp_path / "other.xmc", tmp_path / "p", fails=True)
    assert "convert" in commands("train", tmp_path / "none.xmc", tmp_path / "n", fails=True)
    assert "lambda" in commands("train", small, tmp_path / "n", "--set", "lambda=1", fails=True)
    assert "name=value" in commands("train", small, tmp_path / "n", "--set", "lam", fails=True)
    assert "--memory-limit" in commands("train", small, tmp_path / "n", "--memory-limit", "100MB", fails=True)
    assert "--memory-limit" in commands("predict", trained, small, tmp_path / "n", "--memory-limit", "50MB", fails=True)
    assert "100MBB" in commands("train", small, tmp_path / "n", "--memory-limit", "100MBB", fails=True)
    assert "--overwrite" in commands("convert", texts[0], tmp_path / "other.xmc", fails=True)
    assert "train it first" in commands("predict", tmp_path / "none", small, tmp_path / "n", fails=True)
    assert "--help" in commands("predict", "--nonsense", fails=True)
    bad = tmp_path / "bad.txt"
    bad.write_text("2 3 2\n0 1:0.5\n1 7:1\n")
    assert f"{bad}:3" in commands("convert", bad, tmp_path / "bad.xmc", fails=True)
    assert not (tmp_path / "bad.xmc").exists()


@pytest.mark.slow
def test_a_truncated_gzip_is_reported(texts: tuple[Path, Path], tmp_path: Path, commands: Callable[..., Any]) -> None:
    broken = tmp_path / "broken.txt.gz"
    broken.write_bytes(gzip.compress(gzip.decompress(texts[0].read_bytes()))[:-200])
    assert str(broken) in commands("convert", broken, tmp_path / "x.xmc", fails=True)


@pytest.mark.slow
def test_info_answers_fast(small: Path, cli: Callable[..., Any]) -> None:
    cli("info", small)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    cli("info", small)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # of the processor, which other work does not take away; under one on a quiet machine: see benchmarks/README.md
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3


INTERRUPTED = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), getattr(signal, sys.argv[2]))
sys.meta_path.insert(0, Finder())
from xmc_stream.__main__ import program
program()
"""


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize("module", ["xmc_stream.cli", "click", "xmc_stream.cli.signals"])
def test_a_signal_while_the_command_line_is_loaded_ends_in_one_line(module: str, number: str, code: int) -> None:
    command = [sys.executable, "-c", INTERRUPTED, module, number]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (code, "", 1)
    assert done.stderr.startswith("xmc-stream: ")
