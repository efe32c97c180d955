"""What several test files use: small sets, real ones where they are at hand, and commands in child processes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import hypothesis
import pytest

pytest.register_assert_rewrite("helpers")

from helpers.commands import cli_command, said_at_last  # noqa: E402
from helpers.compiler import COMPILED, of_every_value, unless_plain  # noqa: E402
from helpers.forked import forked_command, forked_commands  # noqa: E402
from helpers.places import memory_place  # noqa: E402
from helpers.tools import load_tool  # noqa: E402

# other work beside an example makes no defect
hypothesis.settings.register_profile("any machine", deadline=None, max_examples=unless_plain(100, 25))
hypothesis.settings.load_profile("any machine")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts what it puts into the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or the commands that tests interrupt would inherit it


def pytest_configure(config: pytest.Config) -> None:
    """With `-n`, files of tests lie in memory, where the system has a place for them: a third of the time is waiting for disks.

    Without `-n` they are on the disk, and those of tests that ask for `disk_path` always.
    """
    place = memory_place()
    if getattr(config.option, "numprocesses", None) and place and "TMPDIR" not in os.environ:
        os.environ["TMPDIR"], tempfile.tempdir = place, None


def pytest_sessionstart(session: pytest.Session) -> None:
    """With `-n`, kernels are compiled here, once: not by every process at the same time."""
    compiles = os.environ.get("NUMBA_DISABLE_JIT", "0") == "0"
    if compiles and getattr(session.config.option, "numprocesses", None):
        from helpers.all_kernels import compile_all

        compile_all()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where nothing is compiled, fewer cases of a test that has many."""
    if not COMPILED:
        chosen = of_every_value(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


@pytest.fixture
def disk_path() -> Iterator[Path]:
    """As `tmp_path`, on a disk always."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A learnable set of two units: 1,500 x 800, 1,100 labels; `small-test.xmc` lies beside it."""
    path = tmp_path_factory.mktemp("small") / "small.xmc"
    load_tool("make_synthetic").make_synthetic(
        path, n_samples=1500, n_features=800, n_labels=1100, features_per_sample=30, n_test_samples=300, seed=1
    )
    return path


@pytest.fixture(scope="session")
def trained(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the small set."""
    import xmc_stream as xs

    path = tmp_path_factory.mktemp("trained") / "m"
    xs.PPDSparse(memory_limit="2GB").fit(small, model=path)
    return path


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Train and test set of a real data set by name, converted once with rows of length one."""
    folder = os.environ.get("XMC_STREAM_DATA")
    if not folder:
        pytest.skip("XMC_STREAM_DATA is not set: no real data sets at hand")
    made = tmp_path_factory.mktemp("real")

    def convert(name: str) -> tuple[Path, Path]:
        import xmc_stream as xs

        train, test = made / f"{name}.xmc", made / f"{name}-test.xmc"
        if not test.exists():
            xs.convert(Path(folder) / name / "train.txt.gz", train, normalize="l2")
            xs.convert(Path(folder) / name / "test.txt.gz", test, like=train)
        return train, test

    return convert


@pytest.fixture(scope="session")
def cli() -> Callable[..., Any]:
    """Runs the command line in a child process: the JSON object it prints, or with fails=True its one line on stderr."""

    def run(*arguments: Any, fails: bool = False) -> Any:
        command = cli_command(*arguments, *([] if fails else ["--json"]))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return answer(done.returncode, done.stdout, done.stderr, fails)

    return run


@pytest.fixture(scope="session")
def commands() -> Callable[..., Any]:
    """As `cli`, in a process forked from one that has loaded the library: for tests of what a command does, not holds."""

    def run(*arguments: Any, fails: bool = False) -> Any:
        with forked_command(*arguments, *([] if fails else ["--json"])) as command:
            code = command.wait()
            return answer(code, command.stdout, command.stderr, fails)

    return run


@pytest.fixture(scope="session")
def several() -> Callable[..., Any]:
    """As `commands`, of several, each a list of words, one after another in one process: what each of them answers."""

    def run(*words: Any, fails: bool = False) -> list[Any]:
        ends = forked_commands(*([*one, *([] if fails else ["--json"])] for one in words))
        return [answer(*end, fails) for end in ends]

    return run


@pytest.fixture(scope="session")
def here() -> Callable[..., Any]:
    """As `commands`, in this process, which begins at once: for tests of what a command makes and answers."""
    from xmc_stream.cli import main

    def run(*arguments: Any, fails: bool = False) -> Any:
        code, out, said = 0, io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(said):
            try:
                main([*map(str, arguments), *([] if fails else ["--json"])])
            except SystemExit as end:
                code = end.code
        return answer(code, out.getvalue(), said.getvalue(), fails)

    return run


def answer(code: int | None, out: str, said: str, fails: bool) -> Any:
    """What a command printed, or its one line where it is to fail."""
    if fails:
        assert (code, out) == (1, ""), said
        lines = said_at_last(said)
        assert len(lines) == 1, said
        return lines[0]
    assert code == 0, said
    return json.loads(out)
