"""Commands in processes forked from one that has loaded the library: to be killed like any other, and begun at once.

To start Python, load the library and its kernels takes a command seconds; a test that kills it many times waits for what
it tests only. Tests of what a command is from its first instant on start it themselves (helpers.commands).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import IO, Any

_context = multiprocessing.get_context("forkserver")


class Forked:
    """A function in a process of its own, its stdout and stderr in files. A context manager: the process ends with it."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        with _path_of_children():
            _context.set_forkserver_preload(["helpers.loaded"])
            forkserver.ensure_running()
        self._folder = tempfile.TemporaryDirectory(prefix="forked-")
        self._files = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        for file in self._files:
            file.touch()
        place = os.getcwd(), dict(os.environ)
        self._process = _context.Process(target=_call, args=(self._files, place, function, arguments))
        self._process.start()

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.close()
        self._folder.cleanup()

    def poll(self) -> int | None:
        """The exit code, or minus the signal's number; None while it runs."""
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait until it ends, at most so long."""
        self._process.join(seconds)
        return self.poll()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.join()

    @property
    def stdout(self) -> str:
        return self._files[0].read_text()

    @property
    def stderr(self) -> str:
        return self._files[1].read_text()

    def wait_until(self, ready: Callable[[], bool]) -> bool:
        """Look every few milliseconds; False if the process ended first."""
        while not ready():
            if self.poll() is not None:
                return False
            time.sleep(0.002)
        return True


def forked_command(*words: Any) -> Forked:
    """A command of xmc-stream."""
    return Forked(_command, *map(str, words))


def run_forked(*words: Any) -> str:
    """What a command prints, which must not fail."""
    with forked_command(*words) as run:
        assert run.wait() == 0, run.stderr
        return run.stdout


def forked_commands(*several: Sequence[Any], seconds: float | None = None) -> list[tuple[int, str, str]]:
    """Commands one after another in one process: the exit code of each, and its stdout and stderr.

    seconds: that all of them may take.
    """
    with Forked(_commands, [[str(word) for word in words] for words in several]) as run:
        assert run.wait(seconds) == 0, (run.poll(), several, run.stderr)
        return [tuple(ended) for ended in json.loads(run.stdout)]


def _commands(several: Sequence[Sequence[str]]) -> None:
    kept, ends = [os.dup(number) for number in (1, 2)], []
    for words in several:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as said:
            for number, file in enumerate((out, said), 1):
                os.dup2(file.fileno(), number)
            code = 0
            try:
                _command(*words)
            except SystemExit as end:
                code = end.code
            finally:
                sys.stdout.flush()
                for number, file in enumerate(kept, 1):
                    os.dup2(file, number)
            ends.append((code or 0, *(_content(file) for file in (out, said))))
    print(json.dumps(ends))


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def _command(*words: str) -> None:
    from xmc_stream.cli import main

    sys.argv = ["xmc-stream", *words]
    main(list(words))


def _call(
    files: list[Path], place: tuple[str, dict[str, str]], function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    folder, environment = place
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate(files, 1):
        with open(file, "wb") as opened:
            os.dup2(opened.fileno(), number)
    function(*arguments)


@contextmanager
def _path_of_children() -> Iterator[None]:
    """The environment in which the process that all are forked from finds these modules."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
