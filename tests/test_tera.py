"""benchmarks/tera.py, in its form of seconds: every step runs, and what was foreseen is near what came."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_form_of_seconds_runs(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "tera.py", tmp_path, "--form", "seconds", "--threads", "1"]
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300).stdout
    lines = {line.split()[0]: line for line in told.splitlines()}
    assert {"generate", "convert", "plan", "train", "predict", "evaluate"} <= set(lines)
    share = re.search(r"read \((\d\.\d+)\)", lines["train"])
    assert share is not None
    assert 0.5 < float(share[1]) < 2.0
    found = re.findall(r"P@\d (\S+) of (\d+\.\d+)", lines["evaluate"])
    assert len(found) == 3
    assert all(0.5 * float(best) < float(ours) <= float(best) for ours, best in found)
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".txt", ".model", ".predictions", ".partial")]
