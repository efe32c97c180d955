"""Kernels compiled by several processes at once into one empty cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILE = """
import sys, numpy as np
from xmc_stream.kernels.csr import count_indices
counts = np.zeros(4, np.int64)
count_indices(np.array([1, 1, 2], sys.argv[1]), counts)
assert counts.tolist() == [0, 2, 1, 0]
"""
TYPES = ("int32", "int64", "uint8", "uint16")


@pytest.mark.slow
def test_each_keeps_its_code_under_a_name_of_its_own(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    running = [subprocess.Popen([sys.executable, "-c", COMPILE, name], env=environment) for name in TYPES]
    assert [process.wait() for process in running] == [0] * len(TYPES)
    assert len(list(tmp_path.rglob("*count_indices*.nbc"))) == len(TYPES)


@pytest.mark.slow
def test_a_first_training_compiles_elsewhere(small: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    command = [
        sys.executable,
        "-m",
        "xmc_stream.cli",
        "train",
        small,
        tmp_path / "model",
        "--memory-limit",
        "512MB",
        "--json",
    ]
    first = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(first.stdout)["peak_rss"] < 350e6  # a process that compiles comes to 390 MB
    assert len(list(tmp_path.rglob("*.compiled"))) == 1
