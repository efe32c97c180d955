"""Mutated texts through the parser, 10^5 of them: the twin's rows, or an error in the line that the twin names.

benchmarks/fuzz_parser.py runs as many as one likes. A child process repeats a share of them with compiled code that
checks every index, which compiled code otherwise does not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.parser_fuzz import fuzz


@pytest.mark.slow
def test_mutated_texts() -> None:
    assert fuzz(20_000, seed=1) > 6_000


@pytest.mark.slow
def test_no_mutated_text_makes_the_parser_leave_its_arrays(tmp_path: Path) -> None:
    """In a process that compiles with checked indices: one out of range raises IndexError there."""
    environment = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    code = "from helpers.parser_fuzz import fuzz; print(fuzz(5_000, seed=2))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 1_500
