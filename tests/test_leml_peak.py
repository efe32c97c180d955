"""Blocks of X that W steps by rows leave in memory keep to the limit: the peak is the system's, of a command's process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.commands import environment

import xmc_stream as xs
from xmc_stream.factors.rowblocks import LARGE_ROW_BYTES, ROW_BYTES, held_bytes, range_bits
from xmc_stream.lowrank.ridge import row_parts
from xmc_stream.runtime.events import read_events
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.new_dataset import new_dataset

N, D, PER_ROW, K = 80_000, 33_000, 300, 100
STEPS = 3  # of conjugate gradients: each has a product with X
SETTINGS = {"rank": 8, "lam": 1.0, "alternations": 1, "cg": STEPS, "cg_tol": 0.0, "held_out": 0.0}
OPTIONS = ["--solver", "leml", "--threads", "2", *(f"--set={name}={value}" for name, value in SETTINGS.items())]

COMMAND = """
import sys
from xmc_stream.cli import main
from xmc_stream.lowrank import plan
plan.LARGE_ROW_BYTES = int(sys.argv[1])
main(sys.argv[2:], standalone_mode=False)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 million entries, of more features than rows are taken by as they stand: W steps by rows, of four parts."""
    path, rng, step, width = (
        tmp_path_factory.mktemp("peak") / "data.xmc",
        np.random.default_rng(0),
        10_000,
        D // PER_ROW,
    )
    indptr = np.arange(step + 1)
    with new_dataset(path, D, K, {}) as writer:
        for _ in range(0, N, step):
            indices = rng.integers(0, width, (step, PER_ROW), np.int32) + width * np.arange(PER_ROW, dtype=np.int32)
            labels = indices[:, 0] % K
            writer.append(PER_ROW * indptr, indices.ravel(), rng.random(indices.size, np.float32), indptr, labels)
    dataset = Dataset(path)
    assert range_bits(D)
    assert len(row_parts(dataset)) == 4
    return path


def command(row_bytes: int, *words: Any) -> tuple[dict[str, Any], int]:
    """What a command says in a process of its own, and the peak of that. row_bytes: of X in a row block, at most."""
    arguments = [sys.executable, "-c", COMMAND, *map(str, (row_bytes, *words, *OPTIONS, "--json"))]
    done = subprocess.run(arguments, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said, _, peak = done.stdout.strip().rpartition("\n")
    return json.loads(said), int(peak) * 1024


def found_in_memory(model: Path) -> float:
    """The share of X that products of steps did not read."""
    events = (event for event in read_events(model / "events.jsonl") if event["event"] == "job")
    key = re.compile(r"w/1/[1-9]/\d+-\d+")  # alternation, product, part and columns
    of_steps = [event["bytes_read"] for event in events if key.fullmatch(event["job"])]
    assert len(of_steps) == 4 * STEPS
    return 1 - sum(of_steps) / (STEPS * 8 * N * PER_ROW)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
def test_a_training_whose_x_stays_in_memory_keeps_its_limit(data: Path, tmp_path: Path) -> None:
    """With room for some of X, and for all. Row blocks are small: what large ones may take would hide a defect of 100 MB.

    Then with large ones, which need a second place for blocks that do not stay.
    """
    least = command(ROW_BYTES, "plan", "train", data, tmp_path / "m")[0]["least_limit"]
    whole, digests, peaks = held_bytes(Dataset(data)), set(), {}
    for name, row_bytes, more, shares in (
        ("some", ROW_BYTES, 0.5, (0.15, 0.6)),
        ("all", ROW_BYTES, 1.8, (0.999, 1.0)),
        ("large", LARGE_ROW_BYTES, 1.9, (0.3, 0.9)),
    ):
        limit, model = least + int(more * whole), tmp_path / name
        report, peaks[name] = command(row_bytes, "train", data, model, "--memory-limit", limit)
        assert max(report["peak_rss"], peaks[name]) <= limit == report["memory_limit"], name
        assert shares[0] < found_in_memory(model) <= shares[1], name
        digests.add(xs.load_model(model).digest())
    assert len(digests) == 1
    assert peaks["all"] > peaks["some"] + whole / 3
