"""Spoilt stores end no command by a signal, a traceback or all memory: those that once did, and some by chance."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers import spoilt_stores
from helpers.forked import forked_command, run_forked
from helpers.spoiling import note_crcs, seal_again, values_of, write_chunk

import xmc_stream as xs

CASES = 8


@pytest.mark.soak
@pytest.mark.slow
def test_stores_spoilt_by_chance(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "helpers.spoilt_stores", str(tmp_path / "stores"), "0", str(CASES)]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"{CASES} cases, 0 failures\n"


def refused(*arguments: Any) -> str:
    """The one line of ours that a command ends with, beside notes and plans."""
    with forked_command(*arguments, "--memory-limit", "1GB") as done:
        assert done.wait() == 1, done.stderr
        assert "Traceback" not in done.stderr
        (line,) = (line for line in done.stderr.splitlines() if line.startswith("xmc-stream: "))
        return line


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "d.xmc"
    X = sp.random(300, 50, 0.3, "csr", np.float32, random_state=0)
    xs.convert(X, path, labels=sp.csr_matrix(np.eye(20)[np.arange(300) % 20]), normalize="l2", memory_limit="3GB")
    return path


def flipped(file: Path, at: int, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1 << bit
    file.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--no-check",), ("--solver=pdsparse",), ("--solver=leml", "--set", "rank=2")])
def test_a_bit_of_indptr(data: Path, options: tuple[str, ...]) -> None:
    """The probe of the plan once read whatever it pointed to. That of LEML reads no rows."""
    flipped(data / "X/rows/indptr/c/0", 8 * 150 + 3, 6)
    for before in ((), ("plan",))[: 1 + ("--solver=leml" not in options)]:
        line = refused(*before, "train", data, data.with_name("m"), *options)
        assert str(data / "X/rows") in line
        assert "damaged" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("X/rows/indptr/zarr.json", '"chunk_shape"', '"ahunk_shape"'), ("X/rows/zarr.json", '"fingerprint"', '"fingerprinu"'),
        ("Y/rows/zarr.json", '"node_type"', '"nodg_type"'), ("zarr.json", '"n_labels": 20', '"n_labels": "x"'),
        ("X/rows/zarr.json", '"shape": [300', '"shape": [-300'),
        ("statistics/label_counts/zarr.json", "[20]", "[9999999999999]"),
    ],
)  # fmt: skip
def test_a_description(data: Path, file: str, old: str, new: str) -> None:
    text = (data / file).read_text()
    assert old in text
    (data / file).write_text(text.replace(old, new))
    line = refused("train", data, data.with_name("m"))
    assert str(data / Path(file).parent) in line


@pytest.mark.slow
def test_values_that_no_text_has(data: Path) -> None:
    file = data / "X/rows/data/c/0"
    values = values_of(file)
    values[7] = np.nan
    write_chunk(file, values)
    seal_again(data)
    line = refused("export", data, data.with_name("d.txt"))
    assert "not finite" in line


@pytest.mark.slow
def test_a_weight_of_a_feature_that_is_not(data: Path, commands: Callable[..., Any]) -> None:
    model = data.with_name("m")
    commands("train", data, model, "--memory-limit", "1GB")
    file = model / "units/00000/weights/indices/c/0"
    values = values_of(file)
    values[3] = 50
    write_chunk(file, values)
    note_crcs(file.parent.parent)
    seal_again(model)
    for command in (("predict", model, data, data.with_name("p")), ("evaluate", model, data)):
        for check in ("--check", "--no-check"):
            line = refused(*command, check)
            assert "units/00000/weights" in line


@pytest.mark.slow
def test_a_model_of_low_rank_is_no_warm_start(data: Path, commands: Callable[..., Any]) -> None:
    model = data.with_name("m")
    commands("train", data, model, "--solver=leml", "--set", "rank=2", "--memory-limit", "1GB")
    assert "alternation 1, objective" in run_forked("info", model)
    assert "low-rank" in refused("train", data, data.with_name("n"), "--warm-start", model)


@pytest.mark.slow
def test_a_receipt_that_no_job_gives(data: Path) -> None:
    """With a checksum of its own: what cannot be gone on from is said in one line."""
    import zlib

    work = data.with_name("m.partial")
    assert spoilt_stores.run(["train", str(data), str(data.with_name("m")), "--memory-limit", "4GB"])[0] == 0
    data.with_name("m").rename(work)
    (work / "zarr.json").unlink()
    ledger = work / "ledger.jsonl"
    lines = [json.loads(line.rpartition(b"\t")[0]) for line in ledger.read_bytes().splitlines()]
    for line in lines:
        if line["key"].startswith("finalise/"):
            line["receipt"]["objective"] = "x"
    texts = [json.dumps(line, separators=(",", ":")).encode() for line in lines]
    ledger.write_bytes(b"".join(text + b"\t%08x\n" % zlib.crc32(text) for text in texts))
    line = refused("train", data, data.with_name("m"))
    assert str(work) in line
