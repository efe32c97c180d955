"""A cluster that cannot start says so in a line, at once, and leaves logs; commands of dask are as the docs say."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from distributed.cli import dask_scheduler, dask_ssh, dask_worker
from distributed.deploy import old_ssh
from helpers.commands import environment

TOOL = Path(__file__).parents[1] / "tools" / "start_cluster.py"
DOCS = (Path(__file__).parents[1] / "docs" / "cluster.md").read_text()


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
    hurried = "import start_cluster as of; of._SECONDS = 0.1; of.main()"
    line = refused("-c", hurried, "--workers=1", "--port=0", "--logs", tmp_path, PYTHONPATH=str(TOOL.parent))
    assert line == f"Error: the workers did not come within 0.1 seconds: see their logs in {tmp_path}"


def test_the_docs_name_what_the_commands_of_dask_take() -> None:
    """Parsed only: nothing is started."""
    commands = {"ssh": dask_ssh.main, "scheduler": dask_scheduler.main, "worker": dask_worker.main}
    lines = [shlex.split(line, comments=True) for line in re.findall(r"^    dask (.*)$", DOCS, re.MULTILINE)]
    assert {name for name, *_ in lines} == set(commands)
    for name, *words in lines:
        commands[name].make_context(name, words)
    [needed] = re.findall(r"pip install (\w+)", DOCS.partition("**Over SSH.**")[2].partition("**Slurm**")[0])
    assert f"import {needed}\n" in Path(old_ssh.__file__).read_text()
