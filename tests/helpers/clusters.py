"""Schedulers and workers of dask as processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from helpers.commands import wait_until


@dataclass(frozen=True)
class Worker:
    """How a worker is started: words before and after its command, and what its environment has beside this one's."""

    before: Sequence[str] = ()
    options: Sequence[str] = ("--no-nanny", "--memory-limit", "0")
    environment: dict[str, str] = field(default_factory=dict)


@contextmanager
def cluster(
    folder: Path, port: int = 0, workers: Sequence[Worker] = (Worker(),), host: str = "127.0.0.1"
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
                host,
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


@dataclass(frozen=True)
class Link:
    """A cable to a network namespace. here: this machine's address on it. inside: what runs a command there."""

    here: str
    inside: tuple[str, ...]
    _name: str

    def set(self, state: str) -> None:
        """up or down. The end inside: this one keeps its route, so nothing for the namespace goes anywhere else."""
        _ip("-n", self._name, "link", "set", self._name, state)


@contextmanager
def link() -> Iterator[Link]:
    """Skips the test where the system allows none."""
    name, here, there = f"xmc{os.getpid()}", "198.18.71.1", "198.18.71.2"  # of a range that is for tests, on no network
    try:
        _ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this machine lets no process have a network of its own")
    try:
        try:
            _ip("link", "add", f"{name}h", "type", "veth", "peer", "name", name, "netns", name)
        except subprocess.CalledProcessError:
            pytest.skip("this machine has no virtual cables")
        _ip("addr", "add", f"{here}/30", "dev", f"{name}h")
        _ip("link", "set", f"{name}h", "up")
        _ip("-n", name, "addr", "add", f"{there}/30", "dev", name)
        for one in ("lo", name):
            _ip("-n", name, "link", "set", one, "up")
        yield Link(here, ("ip", "netns", "exec", name), name)
    finally:
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", f"{name}h")
        _ip("netns", "del", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
