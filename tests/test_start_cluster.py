"""A cluster of this machine that cannot start says so in a line, at once, and leaves logs."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import environment

TOOL = Path(__file__).parents[1] / "tools" / "start_cluster.py"


def refused(*words: str | Path, **more: str) -> str:
    """The one line that Python with these words ends with."""
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env={**environment(), **more}, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    return line


@pytest.mark.parametrize("size", ["banana", "-1GB", "nan", "5XB"])
def test_a_memory_limit_that_workers_do_not_take_starts_nothing(tmp_path: Path, size: str) -> None:
    line = refused(TOOL, f"--memory-limit={size}", "--logs", tmp_path / "logs")
    assert line == f"Error: --memory-limit {size} is not understood: write it as 512MB, 4GB or 4GiB"
    assert not (tmp_path / "logs").exists()


@pytest.mark.slow
def test_what_did_not_start_is_named_with_its_log(tmp_path: Path) -> None:
    options = ["--workers", "1", "--dashboard", "none", "--logs", tmp_path]
    line = refused(TOOL, *options, "--port", "0", DASK_DISTRIBUTED__WORKER__PRELOAD="no_such_module")
    assert line == f"Error: worker-1 did not start: see {tmp_path / 'worker-1.log'}"
    assert "no_such_module" in (tmp_path / "worker-1.log").read_text()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        line = refused(TOOL, *options, "--port", str(taken.getsockname()[1]))
    assert line.startswith("Error: scheduler did not start: is its port taken? --port 0 takes a free one, or see ")
    assert "Traceback" in Path(line.rpartition(" ")[2]).read_text()


@pytest.mark.slow
def test_workers_that_do_not_come_in_time_end_it_with_a_line(tmp_path: Path) -> None:
    hurried = f"import sys; sys.path.insert(0, {str(TOOL.parent)!r}); import start_cluster as of; of._SECONDS = 0.1; of.main()"
    line = refused("-c", hurried, "--workers", "1", "--port", "0", "--logs", tmp_path)
    assert line == f"Error: the workers did not come within 0.1 seconds: see their logs in {tmp_path}"
