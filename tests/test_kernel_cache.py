"""Where compiled kernels are kept, and processes that compile into one empty folder at once."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers.commands import cli_command

import xmc_stream
from xmc_stream.kernels import cache

COMPILE = """
import sys, numpy as np
from xmc_stream.kernels.csr import count_indices
counts = np.zeros(4, np.int64)
count_indices(np.array([1, 1, 2], sys.argv[1]), counts)
assert counts.tolist() == [0, 2, 1, 0]
"""
TYPES = ("int32", "int64", "uint8")


@pytest.mark.slow
def test_each_keeps_its_code_under_a_name_of_its_own(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    running = [subprocess.Popen([sys.executable, "-c", COMPILE, name], env=environment) for name in TYPES]
    assert [process.wait() for process in running] == [0] * len(TYPES)
    assert len(list(tmp_path.rglob("*count_indices*.nbc"))) == len(TYPES)


WARM_UP = """
import numpy as np
from xmc_stream.kernels.csr import count_indices
from xmc_stream.runtime.warmup import WarmUp

class Counting(WarmUp):
    loads = "counting"

    def load(self):
        count_indices(np.array([1, 1, 2], np.int64), np.zeros(4, np.int64))
        with open("misses", "a") as file:
            print(sum(count_indices.numba.stats.cache_misses.values()), file=file)
"""


@pytest.mark.slow
def test_of_several_that_load_the_same_kernels_one_compiles_them(tmp_path: Path) -> None:
    """In a process of its own; the others find the kernels."""
    (tmp_path / "counting.py").write_text(WARM_UP)
    root = str(Path(xmc_stream.__file__).parents[1])
    environment = {
        **os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join([str(tmp_path), root])
    }  # fmt: skip
    command = [sys.executable, "-c", "from counting import Counting; Counting().run()"]
    running = [subprocess.Popen(command, env=environment, cwd=tmp_path) for _ in range(2)]
    assert [process.wait() for process in running] == [0, 0]
    assert sorted((tmp_path / "misses").read_text().split()) == ["0", "0", "1"]
    assert len(list(tmp_path.rglob("*.compiled"))) == 1


FAILED = """
import sys
import numpy as np
from numba.core.errors import TypingError
from xmc_stream.kernels.csr import count_indices

if sys.argv[1] == "fails":
    try:
        count_indices(np.array(["a"]), np.zeros(4, np.int64))
    except TypingError:
        print("failed", flush=True)
    sys.stdin.read()
else:
    counts = np.zeros(4, np.int64)
    count_indices(np.array([1, 1, 2]), counts)
    assert counts.tolist() == [0, 2, 1, 0]
"""


@pytest.mark.slow
def test_nobody_waits_for_one_that_failed_and_lives_on(tmp_path: Path) -> None:
    environment, command = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}, [sys.executable, "-c", FAILED]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([*command, "fails"], env=environment, **pipes) as failed:  # type: ignore[call-overload]
        assert failed.stdout.readline() == b"failed\n"
        subprocess.run([*command, "does not wait"], env=environment, check=True, timeout=50)  # less than the patience
        failed.stdin.close()


IMPATIENT = "from xmc_stream.kernels import cache\ncache._PATIENCE = 0.5\n" + COMPILE


@pytest.mark.slow
def test_nobody_waits_for_ever_for_one_that_was_stopped_with_the_locks(tmp_path: Path) -> None:
    environment, command = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}, [sys.executable, "-c", IMPATIENT, "int32"]
    subprocess.run(command, env=environment, check=True)
    locks, kept = list(tmp_path.rglob("*.lock")), list(tmp_path.rglob("*.nb[ci]"))
    assert locks
    assert kept
    for file in kept:
        file.unlink()
    with ExitStack() as held:
        for lock in locks:
            fcntl.flock(held.enter_context(lock.open("a")), fcntl.LOCK_EX)
        subprocess.run(command, env=environment, check=True, timeout=300)
    assert list(tmp_path.rglob("*.nbc"))


DRAW = """
import numpy as np
from xmc_stream.kernels.permutation import held_out
out = np.zeros(64, np.bool_)
held_out(np.arange(64), 0, 0.5, out)
print(np.packbits(out).tobytes().hex())
"""


@pytest.mark.slow
def test_code_is_compiled_anew_when_the_source_of_another_kernel_has_changed(tmp_path: Path) -> None:
    package = tmp_path / "package"
    shutil.copytree(
        Path(xmc_stream.__file__).parent, package / "xmc_stream", ignore=shutil.ignore_patterns("__pycache__")
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(package)}

    def drawn() -> str:
        ended = subprocess.run(
            [sys.executable, "-c", DRAW], env=environment, cwd=package, capture_output=True, text=True, check=True
        )
        return ended.stdout

    def kept() -> int:
        return len(list(tmp_path.rglob("*held_out*.nbc")))

    before = drawn()
    assert drawn() == before
    assert kept() == 1  # the second time from the cache
    domains = package / "xmc_stream" / "kernels" / "domains.py"
    source = domains.read_text()
    domains.write_text(source.replace("HELD_OUT_ROWS = 1 << 41", "HELD_OUT_ROWS = 1 << 43"))
    assert domains.read_text() != source
    assert drawn() != before


@pytest.mark.slow
def test_a_first_training_compiles_elsewhere(small: Path, tmp_path: Path) -> None:
    """By LEML, of whose kernels some are not compiled: one that does so itself holds far more."""
    kept = cache.folder()
    assert kept is not None
    copy = tmp_path / "cache" / kept.parent.name / kept.name
    shutil.copytree(kept, copy, ignore=shutil.ignore_patterns("*.compiled", "*.lock", "products.*"))
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def peak(name: str) -> int:
        command = cli_command("train", small, tmp_path / name, "--solver=leml", "--set", "rank=2", "--json")
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return int(json.loads(done.stdout)["peak_rss"])

    first = peak("first")
    assert len(list(tmp_path.rglob("*.compiled"))) == 1
    assert list(copy.rglob("products.*.nbc"))
    again = peak("again")
    assert first < again + 20e6


@pytest.fixture(scope="module")
def site() -> Iterator[Path]:
    """A folder that all users can read, with the package, of which its owner alone could change a file."""
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)
        package = folder / "site" / "xmc_stream"
        shutil.copytree(Path(xmc_stream.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
        if os.getuid() or shutil.which("setpriv") is None or as_nobody(folder, "-c", "import numba").returncode:
            pytest.skip("there is no other user who can run this Python")
        yield folder / "site"


@pytest.fixture
def installed(site: Path) -> Iterator[Path]:
    """A folder of root with the package, and a text."""
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "site").symlink_to(site)
        (folder / "t.txt").write_text("3 4 3\n0,1 0:1.0 2:0.5\n2 1:1 3:1\n1 0:2\n")
        yield folder


def as_nobody(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python, as another user than root, who has no home and an environment that is nearly empty."""
    places = [str(folder / "site"), *(path for path in sys.path if path.endswith("site-packages"))]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(places), "PYTHONSAFEPATH": "1", **environment}
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, *arguments]
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )


def converted(folder: Path, out: str, **environment: str) -> str:
    """Convert the text as that user; what is said on stderr."""
    done = as_nobody(folder, "-m", "xmc_stream", "convert", "t.txt", f"{out}/t.xmc", **environment)
    assert done.returncode == 0, done.stderr
    assert (folder / out / "t.xmc" / "zarr.json").exists()
    return done.stderr


def compiled(folder: Path, **environment: str) -> str:
    """Compile one kernel as that user, or load it; what is said on stderr."""
    done = as_nobody(folder, "-c", "import logging\nlogging.basicConfig()" + COMPILE, "int32", **environment)
    assert done.returncode == 0, done.stderr
    return done.stderr


def writable(folder: Path, name: str) -> Path:
    """A folder that all can write to."""
    made = folder / name
    made.mkdir()
    made.chmod(0o777)
    return made


UNKEPT = "compiled kernels cannot be kept"


@pytest.mark.slow
def test_a_user_without_a_home_converts(installed: Path) -> None:
    """The installation is root's. Two processes begin at once; a third one compiles nothing."""
    tmp = writable(installed, "tmp")
    for name in "ab":
        writable(installed, name)
    with ThreadPoolExecutor(2) as pool:
        ways = (lambda: converted(installed, "a", TMPDIR=str(tmp))), (lambda: compiled(installed, TMPDIR=str(tmp)))
        said = [done.result() for done in [pool.submit(way) for way in ways]]
    assert not any(UNKEPT in errors for errors in said)
    code = {file: file.stat().st_mtime_ns for file in tmp.rglob("*.nbc")}
    assert code
    converted(installed, "b", TMPDIR=str(tmp))
    assert {file: file.stat().st_mtime_ns for file in tmp.rglob("*.nbc")} == code


@pytest.mark.slow
@pytest.mark.parametrize("home", [{}, {"HOME": "/nonexistent"}, {"XDG_CACHE_HOME": "~/cache", "HOME": ""}])
def test_a_user_without_a_home_has_a_folder_of_his_own_for_compiled_kernels(
    installed: Path, home: dict[str, str]
) -> None:
    tmp = writable(installed, "tmp")
    assert UNKEPT not in compiled(installed, TMPDIR=str(tmp), **home)
    (kept,) = tmp.glob("xmc_stream-kernels-*")
    found = kept.stat()
    assert (found.st_uid, found.st_mode & 0o777) == (65534, 0o700)
    assert list(kept.rglob("*.nbc"))
    assert {path.name for path in installed.iterdir()} == {"site", "t.txt", "tmp"}
    assert not list(installed.rglob("~"))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["root's", "a link", "open to all"])
def test_a_folder_of_somebody_else_is_not_used(installed: Path, way: str) -> None:
    """Code that another user can change would run as this one. Without any folder, kernels are in memory alone."""
    tmp, other = (writable(installed, name) for name in ("tmp", "other"))
    kept = tmp / "xmc_stream-kernels-65534"
    if way == "a link":
        os.chown(other, 65534, 65534)
        other.chmod(0o700)
        kept.symlink_to(other)
    else:
        writable(tmp, kept.name)
        if way == "open to all":
            os.chown(kept, 65534, 65534)
    errors = compiled(installed, TMPDIR=str(tmp))
    assert sum(UNKEPT in line for line in errors.splitlines()) == 1
    assert not list(kept.iterdir())


def test_where_compiled_kernels_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NUMBA_CACHE_DIR, the installation, the user's cache."""
    package = tmp_path / "xmc_stream"
    monkeypatch.setattr(cache, "__file__", str(package / "kernels" / "cache.py"))
    told, xdg, home = (tmp_path / name for name in ("told", "xdg", "home"))
    for name, path in (("NUMBA_CACHE_DIR", told), ("XDG_CACHE_HOME", xdg), ("HOME", home)):
        monkeypatch.setenv(name, str(path))
    expected = [told, package / "kernels" / "__pycache__", xdg, home / ".cache"]
    for place in expected:
        kept = cache.folder.__wrapped__()
        assert kept is not None
        assert kept.is_relative_to(place)
        shutil.rmtree(place)
        place.parent.mkdir(exist_ok=True, parents=True)
        place.write_text("a file is in the way")


def test_the_folder_of_older_sources_goes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    kept = cache.folder.__wrapped__()
    assert kept is not None
    older = kept.with_name("older")
    kept.rename(older)
    other = tmp_path / "somebody else's"
    other.mkdir()
    assert cache.folder.__wrapped__() == kept
    assert list(kept.parent.iterdir()) == [kept]
    assert other.exists()
