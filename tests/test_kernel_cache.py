"""Kernels compiled by several processes at once into one empty cache."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import cli_command

import xmc_stream
from xmc_stream.kernels.blocks import Labels
from xmc_stream.kernels.machine import kinds_of

COMPILE = """
import sys, numpy as np
from xmc_stream.kernels.csr import count_indices
counts = np.zeros(4, np.int64)
count_indices(np.array([1, 1, 2], sys.argv[1]), counts)
assert counts.tolist() == [0, 2, 1, 0]
"""
TYPES = ("int32", "int64", "uint8", "uint16")


@pytest.mark.slow
def test_each_keeps_its_code_under_a_name_of_its_own(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    running = [subprocess.Popen([sys.executable, "-c", COMPILE, name], env=environment) for name in TYPES]
    assert [process.wait() for process in running] == [0] * len(TYPES)
    assert len(list(tmp_path.rglob("*count_indices*.nbc"))) == len(TYPES)


AT_ONCE = COMPILE + "print(sum(count_indices.numba.stats.cache_misses.values()))"


@pytest.mark.slow
def test_of_several_that_need_one_kernel_one_compiles_it(tmp_path: Path) -> None:
    environment, command = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}, [sys.executable, "-c", AT_ONCE, "int32"]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) for _ in range(3)]
    assert sorted(process.communicate()[0] for process in running) == [b"0\n", b"0\n", b"1\n"]


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


IMPATIENT = "from xmc_stream.kernels import jit\njit._PATIENCE = 0.5\n" + COMPILE


@pytest.mark.slow
def test_nobody_waits_for_ever_for_one_that_was_stopped_with_the_locks(tmp_path: Path) -> None:
    environment, command = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}, [sys.executable, "-c", IMPATIENT, "int32"]
    subprocess.run(command, env=environment, check=True)
    locks, kept = list(tmp_path.rglob("*.lock")), list(tmp_path.rglob("*.nb[ci]"))
    assert {lock.name for lock in locks} > {"xmc_stream.lock"}
    assert kept
    for file in kept:
        file.unlink()
    with ExitStack() as held:
        for lock in locks:
            fcntl.flock(held.enter_context(lock.open("a")), fcntl.LOCK_EX)
        subprocess.run(command, env=environment, check=True, timeout=300)
        assert not list(tmp_path.rglob("*.nbc"))
    subprocess.run(command, env=environment, check=True)
    assert list(tmp_path.rglob("*.nbc"))


BESIDE = """
from xmc_stream.ppdsparse.kernels import search
from xmc_stream.ppdsparse.warmup import PPDSparseWarmUp

warm_up = PPDSparseWarmUp(guided=True)
warm_up.compile_beside()
before = search._search.numba.signatures
assert len(before) == 2
warm_up.load()
assert search._search.numba.signatures == before
"""


@pytest.mark.slow
def test_what_is_compiled_beside_is_what_a_training_calls() -> None:
    subprocess.run([sys.executable, "-c", BESIDE], check=True)


CALLS = """
import sys
from xmc_stream.kernels.jit import calls_listed
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.ppdsparse.warmup import PPDSparseWarmUp

rounds = None if sys.argv[1] == "none" else int(sys.argv[1])
warm_up = PPDSparseWarmUp(PPDSparseParameters(max_rounds=rounds))
with calls_listed() as calls:
    warm_up.load()
print(warm_up.loads, sorted((kernel.py_func.__name__, str(types)) for (kernel, _), types in calls.items()))
"""


@pytest.mark.slow
def test_one_note_serves_all_numbers_of_rounds() -> None:
    said = {
        subprocess.run([sys.executable, "-c", CALLS, rounds], check=True, capture_output=True).stdout
        for rounds in ("1", "6", "none")
    }
    assert len(said) == 1


DRAW = """
import numpy as np
from xmc_stream.kernels.heldout import held_out
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

    def compiled() -> int:
        return len(list(tmp_path.rglob("*held_out*.nbc")))

    before = drawn()
    assert drawn() == before
    assert compiled() == 1  # the second time from the cache
    domains = package / "xmc_stream" / "kernels" / "domains.py"
    source = domains.read_text()
    domains.write_text(source.replace("HELD_OUT_ROWS = 1 << 41", "HELD_OUT_ROWS = 1 << 43"))
    assert domains.read_text() != source
    assert drawn() != before


@pytest.mark.slow
def test_a_first_training_compiles_elsewhere(small: Path, tmp_path: Path) -> None:
    """By LEML, whose kernels are compiled soonest: a process that does so comes to 60 MB more."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def peak(name: str) -> int:
        command = cli_command("train", small, tmp_path / name, "--solver=leml", "--set", "rank=2", "--json")
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return int(json.loads(done.stdout)["peak_rss"])

    first = peak("first")
    assert len(list(tmp_path.rglob("*.compiled"))) == 1
    assert first < peak("again") + 20e6


WARM_UP = """
import os
import numpy as np
from xmc_stream.runtime.warmup import WarmUp
from xmc_stream.kernels.csr import count_indices

class Counting(WarmUp):
    loads = "counting"

    def load(self) -> None:
        assert "NOTED" not in os.environ
        count("int32")

def count(kind):
    counts = np.zeros(4, np.int64)
    count_indices(np.array([1, 1, 2], kind), counts)
    assert counts.tolist() == [0, 2, 1, 0]
"""
RUN = """
import sys
from counting import Counting, count
Counting().run()
count("int32")
assert "numba" not in sys.modules
count("int64")  # which compiles
assert "numba" in sys.modules
count("int32")
"""


def importing(folder: Path, **modules: str) -> dict[str, str]:
    """The environment of processes that import some modules, by name with their text, and have a cache of their own."""
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    root = str(Path(xmc_stream.__file__).parents[1])
    return {
        **os.environ, "NUMBA_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": os.pathsep.join([str(folder), root])
    }  # fmt: skip


@pytest.mark.slow
def test_what_was_called_is_loaded_without_numba(tmp_path: Path) -> None:
    environment = importing(tmp_path, counting=WARM_UP)

    def run(**more: str) -> None:
        subprocess.run([sys.executable, "-c", RUN], env={**environment, **more}, check=True)

    run()
    assert len(list(tmp_path.rglob("*.compiled"))) == 1
    run(NOTED="yes")


LOADED = """
import sys
from counting import Counting, count
Counting().run()
count("int32")
print("numba" in sys.modules)
"""


@pytest.mark.slow
def test_a_damaged_note_is_not_trusted_and_made_anew(tmp_path: Path) -> None:
    environment = importing(tmp_path, counting=WARM_UP)

    def said() -> str:
        return subprocess.run(
            [sys.executable, "-c", LOADED], env=environment, check=True, capture_output=True
        ).stdout.decode()

    assert said() == "False\n"
    (note,) = tmp_path.rglob("*.compiled")
    whole = note.read_bytes()
    for at in (0, len(whole) // 2, len(whole) - 1):
        note.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert said() == "True\n"  # numba loads the kernel
        assert said() == "False\n"  # and this process wrote another note
    note.write_bytes(whole[: len(whole) // 2])
    assert [said(), said()] == ["True\n", "False\n"]


def test_machine_code_is_of_one_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    from xmc_stream.kernels import machine

    mine = machine.stamp()
    monkeypatch.setattr(np, "__version__", "1.0")
    assert machine.stamp.__wrapped__() != mine


CALLING = """
import numpy as np
from xmc_stream.kernels.jit import kernel

@kernel
def halves(n):
    if n < 0:
        raise ValueError("less than none", n)
    return np.full(n, 0.5)

@kernel
def wholes(n):
    return halves(2 * n).sum()
"""
CALL = """
import sys
from calling import halves, wholes

def refused(function):
    try:
        function(-1)
    except ValueError as error:
        return error.args
    return None

def needs_compiler():
    return "numba.np.arrayobj" in sys.modules

def parsed():
    (of,) = halves.numba.overloads.values()
    return of.library._shared_module is not None

step = sys.argv[1]
if step != "caller again":
    assert halves(2).tolist() == [0.5, 0.5]
    assert refused(halves) == ("less than none", -1)
    assert needs_compiler() == (step == "first")
if step == "caller":
    assert not parsed()
    assert wholes(3) == 3.0
    assert parsed()
if step == "caller again":
    assert wholes(3) == 3.0
    assert refused(wholes) == ("less than none", -2)
    assert not needs_compiler()
    assert halves(2).tolist() == [0.5, 0.5]
assert sum(halves.numba.stats.cache_misses.values()) == (step == "first")
assert sum(wholes.numba.stats.cache_misses.values()) == (step == "caller")
"""


@pytest.mark.slow
def test_a_loaded_kernel_can_be_called_by_one_that_is_compiled_later(tmp_path: Path) -> None:
    """And the caller, which holds its code, is loaded like any other: without the compiler, errors as they were."""
    environment = importing(tmp_path, calling=CALLING)
    for step in ("first", "again", "caller", "caller again"):
        subprocess.run([sys.executable, "-c", CALL, step], env=environment, check=True)


OTHER_NUMBA = """
import sys
from xmc_stream.kernels import kept

kept.runtime = object()  # a part of numba that is elsewhere
assert not kept.usable()
from calling import halves

assert halves(2).tolist() == [0.5, 0.5]
assert "numba.np.arrayobj" in sys.modules
print(sum(halves.numba.stats.cache_misses.values()))
"""


@pytest.mark.slow
def test_with_another_numba_kernels_load_its_own_way(tmp_path: Path) -> None:
    environment = importing(tmp_path, calling=CALLING)
    command = [sys.executable, "-c", OTHER_NUMBA]
    misses = [subprocess.run(command, env=environment, check=True, capture_output=True).stdout for _ in range(2)]
    assert misses == [b"1\n", b"0\n"]


NOTED = """
import os
import sys

if "NUMBA_FIRST" in os.environ:
    import numba
from calling import halves, wholes
from xmc_stream.runtime.warmup import WarmUp
from xmc_stream.kernels import machine
from xmc_stream.kernels.jit import kernel

if "NO_PARTS" in os.environ:
    machine._part = None  # as of a numba that has none of them

class Calling(WarmUp):
    loads = "calling"

    def load(self):
        assert halves(2).tolist() == [0.5, 0.5]
        assert wholes(3) == 3.0

@kernel
def more(n):
    return halves(n).sum() + 1.0
"""
CALL_NOTED = """
import sys
import numpy as np
from noted import Calling, halves, more, wholes

def refused(function):
    try:
        function(-1)
    except ValueError as error:
        return error.args
    return None

Calling().run()
print("numba" in sys.modules, len(halves.machine_code))
assert halves(3).tolist() == [0.5, 0.5, 0.5]
assert wholes(2) == 2.0
print("numba" in sys.modules)
assert refused(halves) == ("less than none", -1)
assert refused(wholes) == ("less than none", -2)
assert halves(np.int32(1)).tolist() == [0.5]  # other types, other code
assert more(4) == 3.0
assert halves(3).tolist() == [0.5, 0.5, 0.5]
assert wholes(2) == 2.0
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, ["False 1", "False"]),
        ({"NUMBA_FIRST": "1"}, ["True 1", "True"]),
        ({"NO_PARTS": "1"}, ["True 0", "True"]),
    ],
)
def test_machine_code_does_what_numba_would(told: dict[str, str], said: list[str], tmp_path: Path) -> None:
    """Arrays that it makes, errors, beside numba; where another process cannot load it, numba does."""
    environment = {**importing(tmp_path, calling=CALLING, noted=NOTED), **told}
    for _ in range(2):
        command = [sys.executable, "-c", CALL_NOTED]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == said


def test_kinds_differ_where_types_do() -> None:
    from numba import typeof

    matrix = np.zeros((3, 4))
    fixed = np.zeros(3)
    fixed.flags.writeable = False
    values = [
        1, 1.0, True, np.int64(1), np.int32(1), np.float32(1), (1, 2), (1, 2.0), Labels(fixed, fixed), (fixed, fixed),
        np.zeros(3), np.zeros(3, ">f8"), np.zeros(3, np.float32), np.zeros(6)[::2], fixed, matrix, matrix.T, matrix[:, 1:],
        matrix[:1], np.zeros(25, np.uint8)[1:].view(np.float64),
    ]  # fmt: skip
    for one, other in itertools.combinations(values, 2):
        if kinds_of([one]) == kinds_of([other]):
            assert typeof(one) == typeof(other)
    assert kinds_of([matrix[:1]]) == kinds_of([matrix])
    for unknown in (1 << 63, "text", None, [1], np.ma.zeros(3)):
        assert kinds_of([unknown]) != kinds_of([unknown])


PROGRAM = """
import atexit
from xmc_stream.cli import main, program

@main.command()
def late():
    atexit.register(lambda: print("put away"))
    print("done")

@main.command()
def failing():
    late.callback()
    raise OSError("no")

program()
"""


@pytest.mark.parametrize(("command", "code"), [("late", 0), ("failing", 1)])
def test_a_program_calls_what_a_command_registered_for_the_end(command: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split("\n")) == (code, ["done", "put away", ""]), done.stderr
