"""Conversions killed at random moments: nothing that opens and is wrong, and the same command completes it.

XMC_STREAM_KILLS says how many; `XMC_STREAM_KILLS=50 python -m pytest tests/test_kill_conversion.py` is what is run by hand.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.compiler import needs_compiler
from helpers.damage import damage
from helpers.forked import Forked

from xmc_stream.convert import conversion, convert_report
from xmc_stream.convert.lines import files as text
from xmc_stream.store.dataset import open_dataset

N_KILLS = int(os.environ.get("XMC_STREAM_KILLS", "3"))
N_ROWS = 4000
FORMATS = ("xmlrepo", "libsvm", "jsonl", "csv")
WORK = {"xmlrepo": 20_000, "libsvm": 20_000, "jsonl": 20_000, "csv": 20_000}  # bytes of a part


def converts(source: str, target: str, part: int, small: int) -> None:
    """What a child does. Parts are small so that there are many, and jobs run on threads as those of a large file do."""
    text._PART, conversion._SMALL = part, small
    convert_report(source + ".few", target + ".few", memory_limit="2GB", overwrite=True)  # loads all code
    print("begun", flush=True)
    dataset, figures = convert_report(source, target, threads=2, memory_limit="2GB")
    print(dataset.fingerprint, figures["resumed"], flush=True)


def write_input(path: Path, format: str, n_rows: int) -> None:
    rng = random.Random(7)
    with open(path, "w") as file:
        if format == "xmlrepo":
            file.write(f"{n_rows} 500 60\n")
        if format == "csv":
            file.write("label,text\n")
        for i in range(n_rows):
            labels = sorted(rng.sample(range(60), rng.randint(1, 3)))
            features = sorted(rng.sample(range(500), 12))
            if format == "jsonl":
                words = " ".join(f"word{j}" for j in features)
                file.write(json.dumps({"text": words, "labels": [f"label {k}" for k in labels]}) + "\n")
            elif format == "csv":
                words = "\n".join(f"word{j}" for j in features)
                file.write(f'label {labels[0]},"{words}"\n')
            else:
                pairs = " ".join(f"{j}:{i % 97}.{j}" for j in features)
                file.write(",".join(map(str, labels)) + f" {pairs}\n")


@contextmanager
def started(source: Path, target: Path, small: int) -> Iterator[Forked]:
    """A child that converts, when it has loaded what it needs."""
    with Forked(converts, str(source), str(target), WORK[source.name], small) as child:
        assert child.wait_until(lambda: child.stdout.startswith("begun\n")), child.stderr
        yield child


def finished(child: Forked) -> tuple[str, bool]:
    """The fingerprint that a child prints, and whether it went on from where another one was."""
    assert child.wait() == 0, child.stderr
    _, fingerprint, resumed = child.stdout.split()
    return fingerprint, resumed == "True"


@pytest.mark.slow
@needs_compiler
def test_killed_at_random_moments(tmp_path: Path) -> None:
    rng = random.Random(5)
    undisturbed, seconds = {}, {}
    for format in FORMATS:
        write_input(tmp_path / format, format, N_ROWS)
        write_input(tmp_path / f"{format}.few", format, 5)
        with started(tmp_path / format, tmp_path / f"{format}.xmc", 0) as child:
            began = time.perf_counter()
            undisturbed[format], resumed = finished(child)
            seconds[format] = time.perf_counter() - began
        assert not resumed
        assert open_dataset(tmp_path / f"{format}.xmc").n_samples == N_ROWS
    n_killed = n_resumed = 0
    for kill in range(N_KILLS):
        format, small = FORMATS[kill % len(FORMATS)], rng.choice([0, 2**25])
        target = tmp_path / f"{kill}.xmc"
        for _ in range(rng.choice([1, 1, 2])):
            with started(tmp_path / format, target, small) as child:
                child.wait(rng.uniform(0, seconds[format]))
                child.kill()
                n_killed += child.poll() != 0
            if target.exists():
                assert open_dataset(target).fingerprint == undisturbed[format], kill
                assert damage(target) == [], kill
                break
        if target.exists() and not target.with_name(target.name + ".partial").exists():
            continue  # it was done before it could be killed
        with started(tmp_path / format, target, small) as child:
            fingerprint, resumed = finished(child)
        assert fingerprint == undisturbed[format], kill
        assert damage(target) == [], kill
        assert not target.with_name(target.name + ".partial").exists()
        n_resumed += resumed
    assert n_killed >= N_KILLS // 2
    assert n_resumed >= N_KILLS // 5 or N_KILLS < 5
