"""Schedulers and workers of dask as processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from helpers.commands import wait_until


@dataclass(frozen=True)
class Worker:
    """How a worker is started: words before and after its command, and what its environment has beside this one's."""

    before: Sequence[str] = ()
    options: Sequence[str] = ("--no-nanny", "--memory-limit", "0")
    environment: dict[str, str] = field(default_factory=dict)


@contextmanager
def cluster(
    folder: Path, port: int = 0, workers: Sequence[Worker] = (Worker(),)
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A scheduler's process and its address, with workers of one thread, "worker-0" and so on, each in a folder of its own.

    For their processes see `pid_of`.
    """
    folder.mkdir(exist_ok=True)
    file = folder / "scheduler.json"
    file.unlink(missing_ok=True)
    common = ["--scheduler-file", str(file), "--no-dashboard"]
    with ExitStack() as processes:
        log = processes.enter_context((folder / "log").open("ab"))

        def start(words: Sequence[str], where: Path, **more: str) -> subprocess.Popen[bytes]:
            where.mkdir(exist_ok=True)
            run = subprocess.Popen(words, stdout=log, stderr=log, cwd=where, env={**os.environ, **more})
            processes.enter_context(run)
            processes.callback(run.kill)  # a nanny's worker ends with it
            return run

        scheduler = start(
            [
                sys.executable,
                "-m",
                "distributed.cli.dask_scheduler",
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
                *common,
            ],
            folder,
        )
        command = [
            sys.executable,
            "-m",
            "distributed.cli.dask_worker",
            "--nthreads",
            "1",
            "--death-timeout",
            "60",
            "--pid-file",
            "pid",
            *common,
        ]
        working = [
            start(
                [*one.before, *command, "--name", f"worker-{number}", *one.options],
                folder / f"worker-{number}", **one.environment,
            )
            for number, one in enumerate(workers)
        ]  # fmt: skip
        for one in working:
            wait_until(one, lambda: (folder / "log").read_bytes().count(b"Registered to") >= len(workers))
        yield scheduler, json.loads(file.read_text())["address"]


def pid_of(folder: Path, worker: int) -> int:
    """The process of a worker (of its nanny, if it has one) of the cluster that lies in a folder."""
    return int((folder / f"worker-{worker}" / "pid").read_text())
