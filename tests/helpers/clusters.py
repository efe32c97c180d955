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
from helpers.forked import Forked

Process = Forked | subprocess.Popen[bytes]


OPTIONS = ("--no-nanny", "--memory-limit", "0")


@dataclass(frozen=True)
class Worker:
    """How a worker is started: words before and after its command, and what its environment has beside this one's.

    One that has no nanny, nothing before its command and this environment is forked from a process that has loaded what it
    needs: half of what a small training on workers takes is their start.
    """

    before: Sequence[str] = ()
    options: Sequence[str] = OPTIONS
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, words: Sequence[str], folder: Path, log: Path) -> Process:
        """Its process, in a folder of its own, and in a log that others write to."""
        if "--no-nanny" in self.options and not self.before and not self.environment:
            return Forked(_dask, "worker", words, folder, log)
        command = [*self.before, sys.executable, "-m", "distributed.cli.dask_worker", *words]
        with log.open("ab") as said:
            return subprocess.Popen(
                command, stdout=said, stderr=said, cwd=folder, env={**os.environ, **self.environment}
            )


@contextmanager
def cluster(
    folder: Path, port: int = 0, workers: Sequence[Worker] = (Worker(),), host: str = "127.0.0.1"
) -> Iterator[tuple[Forked, str]]:
    """A scheduler's process and its address, with workers of one thread, "worker-0" and so on, each in a folder of its own.

    For their processes see `pid_of`.
    """
    folder.mkdir(exist_ok=True)
    file, log = folder / "scheduler.json", folder / "log"
    file.unlink(missing_ok=True)
    log.touch()
    common = ["--scheduler-file", str(file), "--no-dashboard"]
    own = ["--nthreads", "1", "--death-timeout", "60", "--pid-file", "pid", *common]
    with ExitStack() as processes:

        def ending(run: Process) -> Process:
            processes.enter_context(run)
            processes.callback(run.kill)  # a nanny's worker ends with it
            return run

        scheduler = Forked(_dask, "scheduler", ["--host", host, "--port", str(port), *common], folder, log)
        running = [ending(scheduler)]
        for number, worker in enumerate(workers):
            where = folder / f"worker-{number}"
            where.mkdir(exist_ok=True)
            running.append(ending(worker.start([*own, "--name", where.name, *worker.options], where, log)))

        def registered() -> bool:
            assert all(run.poll() is None for run in running), log.read_text()
            return log.read_bytes().count(b"Registered to") >= len(workers)

        wait_until(None, registered)
        yield scheduler, json.loads(file.read_text())["address"]


def _dask(what: str, words: Sequence[str], folder: Path, log: Path) -> None:
    """Be what dask's commands start: a scheduler or a worker. The environment counts as at the start of a process."""
    import dask
    from distributed.cli import dask_scheduler, dask_worker

    os.chdir(folder)
    with log.open("ab") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    dask.config.refresh()
    main = dask_worker.main if what == "worker" else dask_scheduler.main
    main(list(words))


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
