"""What goes wrong around a run: signals, full disks, unreadable and damaged files, a second run, no memory left.

Real processes and real disks throughout. A run ends in one line, and the same command ends with the identical model.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import distributed
import numpy as np
import pytest
import scipy.sparse
from helpers.clusters import cluster
from helpers.commands import one_line, said_at_last
from helpers.compiler import needs_compiler
from helpers.damage import flip
from helpers.forked import Forked, forked_command, run_forked
from helpers.tools import load_tool
from helpers.trainings import SETTINGS, kill_when, words

import xmc_stream as xs
from xmc_stream.cli import main
from xmc_stream.cli.signals import Signals
from xmc_stream.datasets.info import describe_unfinished
from xmc_stream.datasets.verify import verify
from xmc_stream.errors import ResumeError, StoreError
from xmc_stream.runtime import engine
from xmc_stream.runtime.events import EventLog, read_events, summarise_events
from xmc_stream.runtime.job import under_way
from xmc_stream.runtime.ledger import Ledger, read_ledger, unfinished_run

pytestmark = needs_compiler
# on the noise below a kernel does not end within minutes, in the second round
NOISY = {"loss": "hinge", "C": 1e4, "tol": 1e-5, "max_rounds": 2, "last_epochs": 10**8}
ENDLESS = [word for name, value in NOISY.items() for word in ("--set", f"{name}={value}")]
FAST: dict[str, Any] = {"memory_limit": "3GB", "threads": 2}


def last_line(said: str) -> str:
    [line] = [line for line in said_at_last(said) if not line.startswith("note: ")]
    return line


def fails(*words: Any) -> str:
    """What a command says that must fail."""
    with forked_command(*words) as run:
        assert (run.wait(), run.stdout) == (1, ""), run.stderr
        return last_line(run.stderr)


def interrupt(run: Forked, number: int) -> str:
    """Send the signal: the one line that the command ends with, by the exit code of the signal.

    It has a minute, whatever else this machine does: nothing that tests interrupt ends by itself before.
    """
    run.send_signal(number)
    assert (run.wait(60), run.stdout) == (128 + number, ""), run.stderr
    line = last_line(run.stderr)
    assert f"interrupted by {signal.Signals(number).name}" in line
    return line


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


def in_a_callback() -> None:
    sent = []

    def callback(*_: Any) -> None:
        if not sent:
            sent.append(os.kill(os.getpid(), signal.SIGINT))
            time.sleep(0.01)  # where the handler runs

    with Signals("ended by {}"):
        gc.callbacks.append(callback)
        try:
            gc.collect()
            time.sleep(60)
        finally:
            print("put away", flush=True)


@pytest.mark.slow
def test_a_signal_in_a_callback_that_swallows_it() -> None:
    with Forked(in_a_callback) as run:
        assert (run.wait(60), run.stdout, run.stderr) == (130, "put away\n", "ended by SIGINT\n")


@pytest.mark.slow
def test_a_process_that_was_stopped_for_long_goes_on(small: Path, tmp_path: Path) -> None:
    events = tmp_path / "m.partial" / "events.jsonl"
    with forked_command("train", small, tmp_path / "m", "--memory-limit", "1GB", *SETTINGS) as run:
        assert run.wait_until(lambda: any(event["phase"] == "round 1: solve" for event in read_events(events)))
        run.send_signal(signal.SIGSTOP)
        time.sleep(2)  # many looks of its guard
        run.send_signal(signal.SIGCONT)
        assert run.wait(100) == 0, run.stderr
        assert str(tmp_path / "m") in run.stdout


@pytest.mark.slow
def test_sigterm_in_an_endless_kernel_and_what_then_is_refused(
    noise: Path, small: Path, tmp_path: Path, commands: Callable[..., Any]
) -> None:
    model = tmp_path / "m"
    work = tmp_path / "m.partial"
    with forked_command("train", noise, model, "--memory-limit", "1GB", *ENDLESS) as run:
        log = work / "events.jsonl"
        assert run.wait_until(lambda: any(event["phase"] == "round 2: solve" for event in read_events(log)))
        again = ("train", noise, model, "--memory-limit", "900MB", *ENDLESS)
        assert "m.partial is being written by another run: wait for it" in fails(*again)
        assert "is being written by another run" in fails(*again, "--overwrite")
        told = describe_unfinished(work)
        assert (told["running"], told["phase"], told["jobs_done"], told["jobs_in_phase"]) == (
            True, "round 2: solve", 0, 1,
        )  # fmt: skip
        assert "give the same command again, it goes on where it was" in interrupt(run, signal.SIGTERM)
    assert not model.exists()
    assert [event["event"] for event in read_events(work / "events.jsonl")][-1] == "interrupted"
    assert unfinished_run(model) == work
    told = commands("info", model)
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


@pytest.mark.slow
def test_sigterm_where_the_main_thread_is_in_a_kernel(noise: Path, tmp_path: Path) -> None:
    """The plan's probe solves a class in it, here for ever."""
    with forked_command("train", noise, tmp_path / "m", *ENDLESS, "--set", "epochs=100000000") as run:
        assert run.wait_until(lambda: any(read_events(tmp_path / "m.partial" / "events.jsonl")))
        time.sleep(1.5)
        interrupt(run, signal.SIGTERM)


@pytest.mark.slow
def test_the_lock_goes_with_a_killed_process(noise: Path, tmp_path: Path) -> None:
    ledger = tmp_path / "m.partial" / "ledger.jsonl"
    with forked_command("train", noise, tmp_path / "m", *ENDLESS) as run:
        assert run.wait_until(lambda: ledger.exists() and read_ledger(ledger)[1] and bool(read_ledger(ledger)[0]))
        identity = read_ledger(ledger)[0]["identity"]
        with pytest.raises(ResumeError, match="being written by another run"):
            Ledger(ledger, identity)
        run.kill()
    with Ledger(ledger, identity):
        pass


@pytest.mark.slow
def test_sigint_keeps_what_is_done_and_the_same_command_goes_on(
    small: Path, tmp_path: Path, whole: str, commands: Callable[..., Any]
) -> None:
    model, ledger = tmp_path / "m", tmp_path / "m.partial" / "ledger.jsonl"
    with forked_command(*words(small, model, "1GB", 1)) as run:
        assert run.wait_until(lambda: ledger.exists() and b"solve/1/" in ledger.read_bytes())
        interrupt(run, signal.SIGINT)
    done = set(read_ledger(ledger)[0])
    assert any(key.startswith("solve/1/") for key in done)
    fitted = slow_fit(small, model)
    assert fitted.model_.digest() == whole
    events = list(read_events(model / "events.jsonl"))
    second = [event["event"] for event in events].index("start", 1)
    assert not {event["job"] for event in events[second:] if event["job"].startswith(("solve", "search"))} & done
    told = commands("info", model)["run"]
    assert (told["sessions"], told["resumed"], told["limits"]) == (2, True, [10**9, 3 * 10**9])


def fits_again(data: Path, folder: Path) -> None:
    """What a child does: fit, be interrupted in it, and fit again; it says how many jobs are under way between and then."""
    engine._GRACE = 0.1
    log = folder / "m.partial" / "events.jsonl"

    def fit(name: str) -> str:
        clf = xs.PPDSparse(max_rounds=2, last_epochs=1500, tol=1e-5, C=1e4, loss="hinge", **FAST)
        return clf.fit(data, model=folder / name).model_.digest()

    def press() -> None:
        while not any(e["phase"] == "round 2: solve" for e in read_events(log)) or not under_way(str(log)):
            time.sleep(0.01)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    whole = fit("whole")
    threading.Thread(target=press, daemon=True).start()
    try:
        fit("m")
        print("not interrupted")
    except KeyboardInterrupt:
        print("interrupted")
    left = under_way(str(log))
    print(left, fit("m") == whole, under_way(str(log)))


@pytest.mark.slow
def test_an_interrupted_fit_leaves_its_kernels_and_the_next_one_waits_for_them(noise: Path, tmp_path: Path) -> None:
    with Forked(fits_again, noise, tmp_path) as run:
        assert run.wait(300) == 0, run.stderr
        assert run.stdout.splitlines() == ["interrupted", "1 True 0"], run.stderr


@pytest.mark.slow
def test_sigterm_of_a_cluster_s_client(noise: Path, tmp_path: Path) -> None:
    """Its jobs end with their kernel, at the latest; the next session does not write beside them."""
    options = {"loss": "hinge", "C": 1e4, "tol": 1e-5, "max_rounds": 2, "last_epochs": 1500}
    settings = [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
    events = tmp_path / "m.partial" / "events.jsonl"
    with (
        cluster(tmp_path / "cluster") as (_, address),
        distributed.Client(address, set_as_default=False) as client,
    ):
        with forked_command(
            "train", noise, tmp_path / "m", "--memory-limit", "1GB", "--scheduler", address, *settings
        ) as run:
            assert run.wait_until(lambda: any(event["phase"] == "round 2: solve" for event in read_events(events)))
            assert run.wait_until(lambda: any(client.processing().values()))
            interrupt(run, signal.SIGTERM)
        there = xs.PPDSparse(memory_limit="3GB", scheduler=client, **options).fit(noise, model=tmp_path / "m")
    assert there.report_["resumed"]
    here = xs.PPDSparse(**FAST, **options).fit(noise, model=tmp_path / "here")
    assert there.model_.digest() == here.model_.digest()
    jobs = [event for event in read_events(tmp_path / "m" / "events.jsonl") if event["event"] == "job"]
    clients = {event["process"] for event in read_events(tmp_path / "m" / "events.jsonl") if event["event"] == "start"}
    assert len(clients) == 2
    assert not {event["process"] for event in jobs} & clients  # a worker's memory is its own


def convert_from(pipe: Path, out: Path) -> None:
    """A command that has this pipe for its standard input."""
    sys.stdin = os.fdopen(os.open(pipe, os.O_RDONLY))
    main(["convert", "-", str(out)])


@pytest.mark.slow
def test_interrupted_conversion_from_a_pipe(tmp_path: Path) -> None:
    pipe, out = tmp_path / "pipe", tmp_path / "d.xmc"
    os.mkfifo(pipe)
    with Forked(convert_from, pipe, out) as run, pipe.open("w") as text:
        text.write("400000 4 3\n" + "0 1:1\n" * 200000)
        text.flush()
        assert run.wait_until(out.with_name("d.xmc.partial").exists)
        assert "goes on where it was" in interrupt(run, signal.SIGTERM)  # the pipe is open
    assert not out.exists()


@pytest.fixture(scope="module")
def many(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows that take the small model a while."""
    path = tmp_path_factory.mktemp("many") / "many.xmc"
    load_tool("make_synthetic").make_synthetic(
        path, n_samples=60_000, n_features=800, n_labels=1100, features_per_sample=30, seed=3
    )
    return path


def open_files(pid: int) -> list[str]:
    """What a process has open, as long as it is there."""
    names = []
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):
            names.append(os.readlink(link))
    return names


def in_a_temporary_folder(folder: Path, *words: Any) -> None:
    """A command whose temporary files lie there."""
    tempfile.tempdir = str(folder)
    main(list(map(str, words)))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["predict", "evaluate"])
def test_interrupted_prediction_leaves_nothing(trained: Path, many: Path, tmp_path: Path, what: str) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    out = [tmp_path / "p.npz"] if what == "predict" else []
    with Forked(in_a_temporary_folder, temporary, what, trained, many, *out, "-k", 100) as run:
        assert run.wait_until(lambda: any(f"{many.name}/X/" in name for name in open_files(run.pid)))
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


MANY_WEIGHTS = ("--set", "prune=0", "--set", "lam=0", "--set", "n_trees=2")  # of a tree


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["ppdsparse", "tree"])
def test_training_on_a_full_disk(
    small: Path, tmp_path: Path, disk: tuple[Path, Callable[[str], None]], solver: str
) -> None:
    path, resize = disk
    how = (
        "--solver",
        solver,
        "--memory-limit",
        "1GB",
        "--threads",
        2,
        *(SETTINGS if solver == "ppdsparse" else MANY_WEIGHTS),
    )
    for size in ("400k", "5m" if solver == "ppdsparse" else "3m"):
        resize(size)
        line = fails("train", small, path / "m", *how)
        assert "No space left on device" in line
        assert str(path) in line
        assert "make room there and give the same command again" in line
        with pytest.raises(StoreError):
            xs.load_model(path / "m")
    resize("64m")
    assert json.loads(run_forked("train", small, path / "m", *how, "--json"))["resumed"]
    run_forked("train", small, tmp_path / "whole", *how)
    assert xs.load_model(path / "m").digest() == xs.load_model(tmp_path / "whole").digest()


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_conversion_to_a_full_disk(tmp_path: Path, disk: tuple[Path, Callable[[str], None]]) -> None:
    path, resize = disk
    source = tmp_path / "train.txt"
    load_tool("make_synthetic").make_synthetic(
        source, n_samples=4000, n_features=300, n_labels=40, features_per_sample=30, seed=2
    )
    for size in ("16k", "1500k"):
        resize(size)
        line = fails("convert", source, path / "d.xmc")
        assert f"{path / 'd.xmc'} cannot be written (No space left on device): make room there" in line
        assert not (path / "d.xmc").exists()
    resize("64m")
    converted = xs.convert(source, path / "d.xmc")
    assert converted.fingerprint == xs.convert(source, tmp_path / "whole.xmc").fingerprint


@pytest.mark.slow
@pytest.mark.parametrize("name", ["p", "p.txt"])
def test_predictions_to_a_full_disk(
    trained: Path, small: Path, disk: tuple[Path, Callable[[str], None]], name: str
) -> None:
    path, resize = disk
    resize("40k")
    line = fails("predict", trained, small, path / name)
    assert "No space left on device" in line
    assert str(path / name) in line
    assert "make room there and give the same command again" in line
    assert list(path.iterdir()) == []
    resize("64m")
    xs.predict(xs.load_model(trained), xs.open_dataset(small), path / name)
    assert [file.name for file in path.iterdir()] == [name]


# damage


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


@pytest.mark.slow
def test_damage_between_sessions_is_found_and_made_again(small: Path, tmp_path: Path, whole: str) -> None:
    model, data = tmp_path / "m", tmp_path / "copy.xmc"
    assert kill_when(small, model, "solve/1/", 0.0, threads=1)
    shutil.copytree(small, data)
    chunk = data / "X" / "rows" / "data" / "c" / "0"
    flip(chunk)
    with pytest.raises(StoreError, match=f"{chunk} fails its checksum"):
        slow_fit(data, model)
    truncate(chunk)
    with pytest.raises(StoreError, match=f"{chunk} has [0-9]+ bytes instead of"):
        slow_fit(data, model)
    state = tmp_path / "m.partial" / "state"
    flip(state / "solve-1" / "0")
    found = sorted((state / "search-1").iterdir())[0]
    truncate(found)
    before = sum(1 for _ in read_events(tmp_path / "m.partial" / "events.jsonl"))
    assert slow_fit(small, model).model_.digest() == whole
    events = list(read_events(model / "events.jsonl"))[before:]
    assert [event["job"] for event in events if event["event"] == "again"] == [
        f"search/1/{found.name.replace('.', '/')}", "solve/1/0",
    ]  # fmt: skip
    jobs = [event["job"] for event in events if event["event"] == "job"]
    assert "solve/1/0" in jobs
    assert any(job.startswith("search/1/") for job in jobs)
    assert "solve/0/0" not in jobs


@pytest.mark.slow
def test_damage_of_what_cannot_be_made_again(small: Path, tmp_path: Path) -> None:
    model, work = tmp_path / "m", tmp_path / "m.partial"
    assert kill_when(small, model, "search/2/", 0.0)
    state = work / "state" / "solve-1" / "0"
    flip(state)
    with pytest.raises(StoreError, match=f"{state} fails its checksum: the run cannot go on from it: remove {work}"):
        slow_fit(small, model)
    flip(state)
    ledger = work / "ledger.jsonl"
    flip(ledger)
    with pytest.raises(StoreError, match=f"{ledger}:1: the line fails its checksum: remove {work}"):
        slow_fit(small, model)
    flip(ledger)
    flip(work / "events.jsonl")  # which no run needs
    slow_fit(small, model)


def test_a_damaged_model_is_found_before_it_predicts(trained: Path, small: Path, tmp_path: Path) -> None:
    path = tmp_path / "m"
    shutil.copytree(trained, path)
    chunk, data = path / "units" / "00001" / "weights" / "data" / "c" / "0", xs.open_dataset(small)
    flip(chunk)
    model = xs.load_model(path)
    for out in ("p", "p.txt"):
        with pytest.raises(StoreError, match=f"{chunk} fails its checksum"):
            xs.predict(model, data, tmp_path / out)
    with pytest.raises(StoreError, match=f"{chunk} fails its checksum"):
        xs.evaluate(path, data)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m"]
    xs.predict(model, data, tmp_path / "unchecked", check=False)
    truncate(chunk)
    with pytest.raises(StoreError, match=f"{chunk} has [0-9]+ bytes instead of"):
        xs.predict(model, data, tmp_path / "p")


def test_verify_finds_damage_of_logs(trained: Path, tmp_path: Path) -> None:
    for name in ("events.jsonl", "ledger.jsonl"):
        path = tmp_path / name
        shutil.copytree(trained, path)
        assert verify(path)["sound"]
        flip(path / name)
        assert verify(path)["damage"] == [f"{path / name} was changed"]
        (path / name).unlink()
        assert verify(path)["damage"] == [f"{path / name} is missing"]


SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>
static int bad(int fd) {
    char link[64], path[4096];
    const char *wanted = getenv("UNREADABLE");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (!wanted || n < 0) return 0;
    path[n] = 0;
    if (strcmp(path, wanted)) return 0;
    errno = EIO;
    return 1;
}
#define SHIM(name, parameters, ...) \\
    ssize_t name parameters { \\
        static ssize_t (*real) parameters; \\
        if (!real) real = dlsym(RTLD_NEXT, #name); \\
        return bad(fd) ? -1 : real(__VA_ARGS__); \\
    }
SHIM(read, (int fd, void *to, size_t n), fd, to, n)
SHIM(pread, (int fd, void *to, size_t n, off_t at), fd, to, n, at)
SHIM(pread64, (int fd, void *to, size_t n, off64_t at), fd, to, n, at)
SHIM(preadv, (int fd, const struct iovec *to, int n, off_t at), fd, to, n, at)
SHIM(preadv64, (int fd, const struct iovec *to, int n, off64_t at), fd, to, n, at)
SHIM(preadv2, (int fd, const struct iovec *to, int n, off_t at, int flags), fd, to, n, at, flags)
SHIM(preadv64v2, (int fd, const struct iovec *to, int n, off64_t at, int flags), fd, to, n, at, flags)
"""


@pytest.mark.slow
@pytest.mark.parametrize("check", ["--check", "--no-check"])
def test_a_read_error_names_the_file_and_the_run_goes_on(
    small: Path, tmp_path: Path, whole: str, monkeypatch: pytest.MonkeyPatch, check: str
) -> None:
    """A disk that fails: the system's calls for reading one file give EIO."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("the failing calls are compiled by cc, for Linux")
    (tmp_path / "shim.c").write_text(SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "shim.so", tmp_path / "shim.c", "-ldl"], check=True)
    chunk, model = small / "X" / "rows" / "indices" / "c" / "0", tmp_path / "m"
    with monkeypatch.context() as environment:
        environment.setenv("LD_PRELOAD", str(tmp_path / "shim.so"))
        environment.setenv("UNREADABLE", str(chunk))
        line = one_line(*words(small, model, "1GB", 2), check)
    assert f"{chunk} " in line
    assert "cannot be read" in line
    assert slow_fit(small, model).model_.digest() == whole


# memory


CROWDED = """
import sys, threading, time
from pathlib import Path
import xmc_stream as xs
from xmc_stream.errors import MemoryLimitError
data, model, held = sys.argv[1], Path(sys.argv[2]), []
def fit():
    return xs.PPDSparse(epochs=20, last_epochs=40, memory_limit="600MB", threads=1).fit(data, model=model)
def press():
    ledger = model.with_name("m.partial") / "ledger.jsonl"
    while not ledger.exists() or b"solve/0/" not in ledger.read_bytes():
        time.sleep(0.005)
    held.append(bytearray(b"x") * (500 << 20))
threading.Thread(target=press, daemon=True).start()
try:
    fit()
except MemoryLimitError as error:
    print(error)
held.clear()
clf = fit()
print(clf.report_["resumed"], clf.model_.digest())
"""


@pytest.mark.slow
def test_a_run_that_comes_near_its_limit_ends_and_goes_on(small: Path, tmp_path: Path, whole: str) -> None:
    arguments = [sys.executable, "-c", CROWDED, str(small), str(tmp_path / "m")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=300)
    said, then = done.stdout.splitlines()
    for part in ("resident memory is", "at the limit of 600 MB", "can be resumed", "memory_limit"):
        assert part in said
    assert then == f"True {whole}"


def test_the_event_log_tells_a_run(trained: Path) -> None:
    events = list(read_events(trained / "events.jsonl"))
    names = "time event phase job jobs done unit number seconds bytes_read resident private mapped peak limit process"
    assert all(set(event) == set(names.split()) for event in events)
    assert (events[0]["event"], events[-1]["event"]) == ("start", "end")
    assert all(0 < event["private"] < event["resident"] <= event["limit"] for event in events)
    assert all(abs(event["private"] + event["mapped"] - event["resident"]) < 2**26 for event in events)
    run = summarise_events(trained / "events.jsonl")
    phases = {phase["phase"]: phase for phase in run["phases"]}
    assert list(phases)[:3] == ["check the data", "round 1: solve", "round 2: search"]
    for phase in phases.values():
        assert phase["jobs"] == phase["jobs_in_all"] > 0
        assert phase["peak_resident"] <= run["peak_resident"]
    ledger = read_ledger(trained / "ledger.jsonl")[0]
    assert sum(phase["bytes_read"] for name, phase in phases.items() if name != "check the data") == sum(
        receipt.get("bytes_read", 0) for receipt in ledger.values()
    )
    assert sum(phase["seconds"] for phase in phases.values()) <= run["seconds"]
