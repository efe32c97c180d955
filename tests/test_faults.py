"""What goes wrong around a run: signals, full disks, unreadable and damaged files, a second run, no memory left.

Real processes and real disks throughout. A run ends in one line, and the same command ends with the identical model.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from conftest import load_tool
from test_resume import SETTINGS, command

import xmc_stream as xs
from xmc_stream.engine.events import EventLog, read_events
from xmc_stream.engine.ledger import Ledger, read_ledger
from xmc_stream.engine.summary import describe_unfinished, unfinished_run
from xmc_stream.errors import ResumeError, StoreError

pytestmark = pytest.mark.skipif(
    os.environ.get("NUMBA_DISABLE_JIT", "0") != "0", reason="too slow without compiled kernels"
)
# on the noise below a kernel does not end within minutes, in the second round
NOISY = {"loss": "hinge", "C": 1e4, "tol": 1e-5, "max_rounds": 2, "last_epochs": 10**8}
ENDLESS = [word for name, value in NOISY.items() for word in ("--set", f"{name}={value}")]
SECONDS = 8  # that an interrupted command may take where other tests run beside this one; 3 on a quiet machine
FAST: dict[str, Any] = {"memory_limit": "1GB", "threads": 2}


def cli_command(*arguments: Any) -> list[str]:
    return [sys.executable, "-m", "xmc_stream.cli", *map(str, arguments)]


@contextmanager
def start(*arguments: Any, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A command in a child process, which ends with the block."""
    with subprocess.Popen(
        cli_command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    ) as run:
        try:
            yield run
        finally:
            run.kill()


def wait_until(run: subprocess.Popen[str] | None, ready: Callable[[], bool], seconds: float = 100) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "it took too long"
        assert run is None or run.poll() is None, run.communicate()
        time.sleep(0.01)


def interrupt(run: subprocess.Popen[str], number: int) -> str:
    """Send the signal: the one line that the command ends with, within seconds, by the exit code of the signal."""
    run.send_signal(number)
    began = time.monotonic()
    out, said = run.communicate(timeout=60)
    assert time.monotonic() - began < SECONDS
    assert (run.returncode, out) == (128 + number, ""), said
    [line] = [line for line in said.splitlines() if not line.startswith(("plan: ", "note: "))]
    assert f"interrupted by {signal.Signals(number).name}" in line
    return line


def one_line(*arguments: Any) -> str:
    """What a command that fails says."""
    done = subprocess.run(cli_command(*arguments), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, ""), done
    [line] = [line for line in done.stderr.splitlines() if not line.startswith(("plan: ", "note: "))]
    return line


def flip(path: Path, at: int = 100) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 8
    path.write_bytes(content)


@pytest.fixture(scope="module")
def whole(small: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of a run with the settings of test_resume that nothing disturbed."""
    path = tmp_path_factory.mktemp("whole") / "m"
    return slow_fit(small, path).model_.digest()


def slow_fit(data: Path, model: Path, **options: Any) -> xs.PPDSparse:
    return xs.PPDSparse(epochs=20, last_epochs=40, **FAST).fit(data, model=model, **options)


def test_settings_are_those_of_slow_fit() -> None:
    assert SETTINGS == ["--set", "epochs=20", "--set", "last_epochs=40"]


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set on which coordinate descent does not converge for long: nothing is to be learned from it."""
    rng = np.random.default_rng(0)
    X = scipy.sparse.csr_matrix(rng.normal(size=(4000, 20)).astype(np.float32))
    Y = scipy.sparse.csr_matrix(rng.random((4000, 2)) < 0.5)
    return xs.convert(X, tmp_path_factory.mktemp("noise") / "noise.xmc", labels=Y).path


# signals and locks


def test_sigterm_in_an_endless_kernel_and_what_then_is_refused(noise: Path, small: Path, tmp_path: Path) -> None:
    model = tmp_path / "m"
    work = tmp_path / "m.partial"
    with start("train", noise, model, "--memory-limit", "1GB", *ENDLESS) as run:
        wait_until(run, lambda: any(event["phase"] == "round 2: solve" for event in read_events(work / "events.jsonl")))
        again = ("train", noise, model, "--memory-limit", "900MB", *ENDLESS)
        assert "m.partial is being written by another run: wait for it" in one_line(*again)
        assert "is being written by another run" in one_line(*again, "--overwrite")
        told = describe_unfinished(work)
        assert (told["running"], told["phase"], told["jobs_done"], told["jobs_in_phase"]) == (
            True, "round 2: solve", 0, 1,
        )  # fmt: skip
        assert "give the same command again, it goes on where it was" in interrupt(run, signal.SIGTERM)
    assert not model.exists()
    assert [event["event"] for event in read_events(work / "events.jsonl")][-1] == "interrupted"
    assert unfinished_run(model) == work
    told = json.loads(subprocess.check_output(cli_command("info", model, "--json")))
    assert (told["kind"], told["running"], told["round"], told["run"]["sessions"]) == ("unfinished model", False, 2, 1)
    assert "goes on" in told["next"]
    options = {**NOISY, **FAST}
    for other, said in ((("seed", 5), "seed 0, not 5"), (("lam", 0.5), r"params lam 0.01, not 0.5")):
        with pytest.raises(ResumeError, match=f"m.partial holds a run with {said}: give the same"):
            xs.PPDSparse(**{**options, other[0]: other[1]}).fit(noise, model=model)
    test_set = small.with_name("small-test.xmc")
    before, now = xs.open_dataset(noise).fingerprint, xs.open_dataset(test_set).fingerprint
    with pytest.raises(ResumeError, match=f"data {before}, not {now}"):
        xs.PPDSparse(**options).fit(test_set, model=model)


def test_sigterm_where_the_main_thread_is_in_a_kernel(noise: Path, tmp_path: Path) -> None:
    """The plan's probe solves a class in it, here for ever."""
    with start("train", noise, tmp_path / "m", *ENDLESS, "--set", "epochs=100000000") as run:
        wait_until(run, lambda: any(read_events(tmp_path / "m.partial" / "events.jsonl")))
        time.sleep(1.5)
        interrupt(run, signal.SIGTERM)


def test_the_lock_goes_with_a_killed_process(noise: Path, tmp_path: Path) -> None:
    ledger = tmp_path / "m.partial" / "ledger.jsonl"
    with start("train", noise, tmp_path / "m", *ENDLESS) as run:
        wait_until(run, lambda: ledger.exists() and read_ledger(ledger)[1] and bool(read_ledger(ledger)[0]))
        identity = read_ledger(ledger)[0]["identity"]
        with pytest.raises(ResumeError, match="being written by another run"):
            Ledger(ledger, identity)
        run.kill()
        run.communicate()
    with Ledger(ledger, identity):
        pass


def test_sigint_keeps_what_is_done_and_the_same_command_goes_on(small: Path, tmp_path: Path, whole: str) -> None:
    model, ledger = tmp_path / "m", tmp_path / "m.partial" / "ledger.jsonl"
    with start(*command(small, model, "1GB", 1)[3:]) as run:
        wait_until(run, lambda: ledger.exists() and b"solve/1/" in ledger.read_bytes())
        interrupt(run, signal.SIGINT)
    done = set(read_ledger(ledger)[0])
    assert any(key.startswith("solve/1/") for key in done)
    fitted = slow_fit(small, model)
    assert fitted.model_.digest() == whole
    events = list(read_events(model / "events.jsonl"))
    second = [event["event"] for event in events].index("start", 1)
    assert not {event["job"] for event in events[second:] if event["job"].startswith(("solve", "search"))} & done
    told = json.loads(subprocess.check_output(cli_command("info", model, "--json")))["run"]
    assert (told["sessions"], told["resumed"], told["limits"]) == (2, True, [10**9])


FIT = """
import os, signal, sys, threading, time
import xmc_stream as xs
from xmc_stream.engine import runner
from xmc_stream.engine.events import read_events
from pathlib import Path
data, folder = sys.argv[1], Path(sys.argv[2])
runner._GRACE = 0.1
def fit(name):
    clf = xs.PPDSparse(max_rounds=2, last_epochs=2500, tol=1e-5, C=1e4, loss="hinge", memory_limit="1GB", threads=2)
    return clf.fit(data, model=folder / name).model_.digest()
def press():
    while not any(e["phase"] == "round 2: solve" for e in read_events(folder / "m.partial/events.jsonl")):
        time.sleep(0.01)
    time.sleep(0.3)
    global pressed
    pressed = time.monotonic()
    os.kill(os.getpid(), signal.SIGINT)
whole = fit("whole")
threading.Thread(target=press, daemon=True).start()
try:
    fit("m")
    print("not interrupted")
except KeyboardInterrupt:
    print(time.monotonic() - pressed < 1.5)
under_way = runner._jobs_under_way(str(folder / "m.partial/events.jsonl"))
print(under_way, fit("m") == whole, runner._jobs_under_way(str(folder / "m.partial/events.jsonl")))
"""


def test_an_interrupted_fit_leaves_its_kernels_and_the_next_one_waits_for_them(noise: Path, tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", FIT, str(noise), str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.splitlines() == ["True", "1 True 0"], done


def test_interrupted_conversion_from_a_pipe(tmp_path: Path) -> None:
    with start("convert", "-", tmp_path / "d.xmc", stdin=subprocess.PIPE) as run:
        assert run.stdin is not None
        run.stdin.write("1000000 50 20\n" + "1 2:1 3:1\n" * 1000)
        run.stdin.flush()
        wait_until(run, (tmp_path / "d.xmc.partial").exists)
        assert "goes on where it was" in interrupt_with_open_pipe(run)
    assert not (tmp_path / "d.xmc").exists()


def interrupt_with_open_pipe(run: subprocess.Popen[str]) -> str:
    run.send_signal(signal.SIGTERM)
    began = time.monotonic()
    run.wait(60)
    assert time.monotonic() - began < SECONDS
    assert run.returncode == 143
    assert run.stderr is not None
    [line] = run.stderr.read().splitlines()
    return line


@pytest.fixture(scope="module")
def many(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows that take the small model a while."""
    path = tmp_path_factory.mktemp("many") / "many.xmc"
    load_tool("make_synthetic").make_synthetic(
        path, n_samples=60_000, n_features=800, n_labels=1100, features_per_sample=30, seed=3
    )
    return path


@pytest.mark.parametrize("what", ["predict", "evaluate"])
def test_interrupted_prediction_leaves_nothing(trained: Path, many: Path, tmp_path: Path, what: str) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    out = [tmp_path / "p.npz"] if what == "predict" else []
    with start(what, trained, many, *out, "-k", 100, env={**os.environ, "TMPDIR": str(temporary)}) as run:
        wait_until(run, lambda: any(tmp_path.glob("*.partial")) or any(temporary.glob("xmc_stream-*/*")))
        assert "begins anew" in interrupt(run, signal.SIGINT)
    assert [path for path in tmp_path.iterdir() if path != temporary] == []


# full disks


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[[str], None]]]:
    """A small disk of its own, and what changes its size."""
    path = tmp_path / "disk"
    path.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", path], check=False).returncode
    ):
        pytest.skip("mounting a small disk takes root")
    try:
        yield path, lambda size: subprocess.run(["mount", "-o", f"remount,size={size}", path], check=True)
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def test_training_on_a_full_disk(small: Path, disk: tuple[Path, Callable[[str], None]], whole: str) -> None:
    path, resize = disk
    model = path / "m"
    for size in ("16k", "400k", "5m", "8m"):
        resize(size)
        line = one_line(*command(small, model, "1GB", 2)[3:-1])
        assert "No space left on device" in line
        assert str(path) in line
        assert "make room there and give the same command again" in line
        with pytest.raises(StoreError):
            xs.load_model(model)
    resize("64m")
    fitted = slow_fit(small, model)
    assert fitted.report_["resumed"]
    assert fitted.model_.digest() == whole


def fill(path: Path) -> Path:
    """Take all room that there is."""
    filler = path / "filler"
    with open(filler, "wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                continue
    return filler


def test_a_ledger_line_that_does_not_fit(disk: tuple[Path, Callable[[str], None]]) -> None:
    path, _ = disk
    with Ledger(path / "ledger.jsonl", {"seed": 0}) as ledger:
        filler = fill(path)
        added = 0
        with pytest.raises(OSError, match="No space left"):  # noqa: PT012
            for added in range(1000):
                ledger.add(f"job/{added}", {"n": "x" * 100})
        filler.unlink()
        assert len(dict(ledger.items())) == added
        ledger.add("behind", {})
    kept = read_ledger(path / "ledger.jsonl")[0]
    assert list(kept) == ["identity", *(f"job/{i}" for i in range(added)), "behind"]


def test_an_event_log_that_does_not_fit_ends_nothing(disk: tuple[Path, Callable[[str], None]]) -> None:
    path, _ = disk
    log = EventLog(path / "events.jsonl", 10**9)
    filler = fill(path)
    for i in range(100):
        log.add("job", job=f"job/{i}")
    filler.unlink()
    log.add("job", job="behind")
    log.close()
    jobs = [event["job"] for event in read_events(path / "events.jsonl")]
    assert len(jobs) < 100
    assert jobs == [*(f"job/{i}" for i in range(len(jobs) - 1)), "behind"]


def test_conversion_to_a_full_disk(tmp_path: Path, disk: tuple[Path, Callable[[str], None]]) -> None:
    path, resize = disk
    source = tmp_path / "train.txt"
    load_tool("make_synthetic").make_synthetic(
        source, n_samples=4000, n_features=300, n_labels=40, features_per_sample=30, seed=2
    )
    for size in ("16k", "500k", "1500k"):
        resize(size)
        line = one_line("convert", source, path / "d.xmc")
        assert f"{path / 'd.xmc'} cannot be written (No space left on device): make room there" in line
        assert not (path / "d.xmc").exists()
    resize("64m")
    converted = xs.convert(source, path / "d.xmc")
    assert converted.fingerprint == xs.convert(source, tmp_path / "whole.xmc").fingerprint


@pytest.mark.parametrize("name", ["p", "p.txt"])
def test_predictions_to_a_full_disk(
    trained: Path, small: Path, disk: tuple[Path, Callable[[str], None]], name: str
) -> None:
    path, resize = disk
    for size in ("16k", "40k"):
        resize(size)
        line = one_line("predict", trained, small, path / name)
        assert "No space left on device: make room there and give the same command again" in line.replace(
            f": '{path / (name + '.partial')}'", ""
        ).replace(f": '{path / (name + '.store.partial')}'", "")
        assert list(path.iterdir()) == []
    resize("64m")
    xs.predict(xs.load_model(trained), xs.open_dataset(small), path / name)
    assert [file.name for file in path.iterdir()] == [name]
