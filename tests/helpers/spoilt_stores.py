"""Stores spoilt by chance, and commands on them: what test_spoilt_stores.py runs a little of and benchmarks/ much.

In tests/, `python -m helpers.spoilt_stores FOLDER SEED SEED+1` does some of them, with SHOW=1 each command and what it says.

What is done to a store: bits flip, files are cut, lost or exchanged; and, as someone would who means harm, values, arrays
and descriptions are replaced, with checksums and seal made anew, so that these do not tell. Whatever it is, a command
ends with exit code 0, or with 1 and one line of ours; never by a signal or with a traceback, in little memory and time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import random
import re
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from helpers.row_sparse import weights, written
from helpers.spoiling import D, K, N, spoil

LIMIT, MOST = "600MB", 700_000_000  # given to commands, and what a process may come to hold
SECONDS = 90  # of the processor
_log: list[int] = []  # of a case's process: where it says what it does
Trial = Callable[[Path, int, str | None, int | None], Iterator[str]]
# a job that ended in an error that is not ours; numbers that are finite and absurd may have no eigenvalues
_TORN = re.compile(r"failed: (?!LinAlgError)(\w+Error)")


@dataclass(frozen=True)
class Case:
    """What was done to which store, and a command."""

    seed: int
    target: str
    done: str
    command: tuple[str, ...]

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.target}: {self.done}: {' '.join(self.command)}"


def prepare(folder: Path) -> None:
    """Whole stores of every kind, and runs that were left off half way."""
    import xmc_stream as xs

    rng = np.random.default_rng(0)
    for name, n in (("data", N), ("test", 70)):
        Y = sp.csr_matrix((rng.random((n, K)) < 0.06) | (rng.integers(0, K, (n, 1)) == np.arange(K)), dtype=np.float32)
        X = sp.csr_matrix(
            Y.toarray() @ np.eye(K, D, dtype=np.float32) + (rng.random((n, D)) < 0.1) * rng.random((n, D))
        )
        dataset = xs.convert(X.astype(np.float32), folder / f"{name}.xmc", labels=Y, normalize="l2", memory_limit=LIMIT)
    texts = "".join(json.dumps({"text": f"w{i % 9} w{i % 7} v{i}", "label": [f"l{i % 5}"]}) + "\n" for i in range(60))
    (folder / "texts.jsonl").write_text(texts)
    run(["convert", str(folder / "texts.jsonl"), str(folder / "words.xmc"), "--text-field=text", "--label-field=label"])
    run(["train", str(folder / "words.xmc"), str(folder / "words.model"), "--memory-limit", LIMIT])
    dataset = xs.open_dataset(folder / "data.xmc")
    dataset.X_columns()
    dataset.with_observed(sp.csr_matrix(rng.random((N, K)) < 0.5))
    for solver, options in TRAININGS.items():
        model = folder / f"{solver}.model"
        train = ["train", str(folder / "data.xmc"), str(model), f"--solver={solver}", *options, "--memory-limit", LIMIT]
        run(train)
        left_off(train, solver)
    rows = written(folder / "rows.model", dataset, weights(D, K, 20))
    rows.compact(folder / "compact.model", memory_limit=LIMIT)
    xs.select_features(folder / "test.xmc", folder / "some.xmc", rows, memory_limit=LIMIT)
    model, test, predictions = (str(folder / name) for name in ("ppdsparse.model", "test.xmc", "p.zarr"))
    run(["predict", model, test, predictions, "--memory-limit", LIMIT])


TRAININGS: dict[str, list[str]] = {
    "ppdsparse": ["--set", "added=3"],
    "pdsparse": ["--set", "max_passes=4", "--set", "lam=[0.1,0.01]"],
    "leml": ["--set", "rank=4", "--set", "alternations=3", "--set", "observed=given", "--set", "loss=logistic"],
    "cplst": ["--set", "rank=3", "--set", "iterations=2"],
    "group-lasso": ["--set", "loss=multitask", "--set", "lam=[0.05,0.02]"],
    "memoir": ["--set", "variant=l1", "--set", "steps=8", "--set", "batch=50"],
    "tree": ["--set", "max_leaf=3", "--set", "root=2", "--set", "branching=2", "--set", "n_trees=2"],
}
# jobs that a run is left off before
_LAST = {
    "ppdsparse": "search/3",
    "pdsparse": "pass/1/2",
    "leml": "h/2",
    "cplst": "h/2",
    "group-lasso": "finalise",
    "memoir": "steps/3",
    "tree": "finalise/1-1-",
}


def left_off(train: list[str], solver: str) -> None:
    """Train again, into `SOLVER.left.partial`, and break off before one of the last jobs."""
    from xmc_stream.runtime import job as work

    target, whole = train[2].replace(".model", ".left"), work.do

    def broken(job: Any) -> Any:
        if job.key.startswith(_LAST[solver]):
            raise InterruptedError("left off")
        return whole(job)

    work.do = broken
    try:
        assert run([*train[:2], target, *train[3:]])[0] == 1
    finally:
        work.do = whole
    assert Path(target + ".partial").exists()


def run(arguments: list[str]) -> tuple[int, str]:
    """A command in this process: exit code and what it wrote to stderr."""
    return run_heard(arguments)[:2]


def run_heard(arguments: list[str]) -> tuple[int, str, str]:
    """The same, and what it wrote to stdout."""
    from xmc_stream.cli import main

    said, out = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(out):
            main(arguments)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    return code, said.getvalue(), out.getvalue()


# --- commands


def commands(folder: Path, target: str, r: random.Random) -> list[list[str]]:
    """Some commands on the store of that name, the others being whole."""
    data, test, out = str(folder / "data.xmc"), str(folder / "test.xmc"), str(folder / "out")
    limit = ["--memory-limit", LIMIT, "--threads", "2"]
    check = r.choice(["--check", "--no-check"])
    kind = target.rpartition(".")[2]
    if target == "words.xmc":
        return [["info", str(folder / target)], ["verify", str(folder / target), *limit],
                ["convert", str(folder / "texts.jsonl"), out, "--like", str(folder / target), "--memory-limit", LIMIT],
                ["train", str(folder / target), out + ".m", check, *limit]]  # fmt: skip
    if target == "words.model":
        model = str(folder / target)
        return [["info", model, "--digest"], ["verify", model, *limit],
                ["predict", model, str(folder / "texts.jsonl"), out + ".jsonl", check, *limit]]  # fmt: skip
    if target in ("rows.model", "compact.model", "some.xmc"):
        return _of_rows(folder, target, r, check, out, limit)
    if kind == "xmc":
        solver = r.choice(list(TRAININGS))
        model = str(folder / f"{r.choice(['ppdsparse', 'leml'])}.model")
        warm = ["--warm-start", str(folder / "pdsparse.model")]
        train = ["train", data, out + ".model", f"--solver={solver}", *TRAININGS[solver], check, *limit]
        return [
            r.choice([["info", data], ["info", data, "--digest", "--json"], ["verify", data, *limit]]),
            r.choice([train, train, ["plan", *train], [*train, *(warm if solver == "ppdsparse" else [])]]),
            r.choice([
                ["predict", model, data, out + r.choice([".zarr", ".npz", ".txt", ".jsonl"]), check, *limit],
                ["evaluate", model, data, check, *limit], ["plan", "predict", model, data, out, *limit],
                ["evaluate", model, test, "--train", data, *limit],
            ]),
            r.choice([
                ["split", data, out + ".a.xmc", out + ".b.xmc", "--memory-limit", LIMIT],
                ["export", data, out + r.choice([".txt", ".npz"]), "--memory-limit", LIMIT],
                ["convert", str(folder / "texts.txt"), out + ".c.xmc", "--like", data, "--memory-limit", LIMIT],
            ]),
        ]  # fmt: skip
    if kind == "model":
        model = str(folder / target)
        solver = target.removesuffix(".model")
        return [
            r.choice([["info", model], ["info", model, "--digest", "--json"], ["verify", model, *limit]]),
            r.choice([
                ["predict", model, test, out + r.choice([".zarr", ".npz", ".txt", ".jsonl"]), check, *limit],
                ["evaluate", model, test, check, *limit], ["plan", "evaluate", model, test, *limit],
            ]),
            r.choice([
                ["export", model, out + ".npz", "--memory-limit", LIMIT],
                ["train", data, out + ".model", "--warm-start", model, check, *limit],
                ["train", data, model, f"--solver={solver}", *TRAININGS[solver], *limit],
            ]),
        ]  # fmt: skip
    if kind == "zarr":
        return [["info", str(folder / target), "--digest"],
                ["verify", str(folder / target), *limit], ["evaluate", str(folder / target), test, "--train", data, *limit],
                ["plan", "evaluate", str(folder / target), test, *limit]]  # fmt: skip
    solver = target.removesuffix(".left.partial")
    model = str(folder / f"{solver}.left")
    return [["info", model], ["train", data, model, f"--solver={solver}", *TRAININGS[solver], check, *limit]]


def _of_rows(folder: Path, target: str, r: random.Random, check: str, out: str, limit: list[str]) -> list[list[str]]:
    """Commands on a row-sparse model, its compact one, or a dataset of the features that these select."""
    store = str(folder / target)
    model = str(folder / ("rows.model" if target == "rows.model" else "compact.model"))
    data = str(folder / ("test.xmc" if target == "rows.model" else "some.xmc"))
    told = r.choice([["info", store], ["info", store, "--digest", "--json"], ["verify", store, *limit]])
    predicted = r.choice([
        ["predict", model, data, out + r.choice([".zarr", ".npz", ".txt", ".jsonl"]), check, *limit],
        ["evaluate", model, data, check, *limit], ["plan", "evaluate", model, data, *limit],
    ])  # fmt: skip
    if target == "some.xmc":
        of = ["select-features", store, out + ".xmc", "--model", model, "--memory-limit", LIMIT]
        return [told, predicted, of, ["train", store, out + ".model", check, *limit]]
    return [
        told, predicted,
        [*r.choice([["export", model, out + ".npz"], ["compact", model, out + ".model"]]), "--memory-limit", LIMIT],
        ["select-features", str(folder / "test.xmc"), out + ".xmc", "--model", model, "--memory-limit", LIMIT],
    ]  # fmt: skip


TARGETS = {
    "data.xmc": 8, "words.xmc": 2, "words.model": 1, "p.zarr": 2, "ppdsparse.model": 3, "pdsparse.model": 1, "leml.model": 2,
    "cplst.model": 1, "group-lasso.model": 1, "rows.model": 2, "compact.model": 1, "some.xmc": 1, "memoir.model": 1,
    "tree.model": 2,
    **{f"{solver}.left.partial": 3 for solver in TRAININGS},
}  # fmt: skip


def attempt(source: Path, seed: int, target: str | None = None, only: int | None = None) -> Iterator[str]:
    """Spoil one store and run commands on it, in this process; a line for each that does not end as it must."""
    r = random.Random(seed)
    target = target or r.choices(list(TARGETS), list(TARGETS.values()))[0]
    with tempfile.TemporaryDirectory(prefix="spoilt-") as name:
        folder = Path(name)
        for path in source.iterdir():  # what is whole is only read
            if path.name == target:
                shutil.copytree(path, folder / path.name)
            else:
                (folder / path.name).symlink_to(path)
        done = spoil(folder / target, r)
        for number, command in enumerate(commands(folder, target, r)):
            if only not in (None, number):
                continue
            shown = tuple(part.replace(str(folder) + "/", "") for part in command)
            case = Case(seed, target, done, shown)
            note(case)
            try:
                code, said = run(command)
            except BaseException:  # noqa: BLE001 (whatever comes out is what is looked for)
                yield f"{case}\n{traceback.format_exc()}"
                continue
            finally:
                for path in folder.iterdir():
                    if path.name.startswith("out"):
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
            if os.environ.get("SHOW"):
                print(case, "->", code, said[-300:], file=sys.stderr)
            lines = [line for line in said.splitlines() if line.startswith("xmc-stream: ")]
            torn = _TORN.search(said)
            if code not in (0, 1) or "Traceback" in said or len(lines) != code or torn:
                yield f"{case}\nexit code {code}: {said}"


def note(case: object) -> None:
    """Tell the parent what is under way, in case it ends the process."""
    for fd in _log:
        os.write(fd, f"{case}\n".encode())


def peak() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def child(source: Path, seed: int, target: str | None, only: int | None, out: int, trial: Trial) -> None:
    faulthandler.enable(all_threads=True)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    began = peak()
    try:
        failures = list(trial(source, seed, target, only))
    except Exception:  # noqa: BLE001 (of this script itself)
        failures = [f"seed {seed}: {traceback.format_exc()}"]
    if peak() - began > MOST or peak() > MOST:
        failures.append(f"seed {seed}: {peak():,} bytes resident, {began:,} at the start")
    os.write(out, "\n".join(failures).encode()[:60_000])


def load() -> None:
    """What commands load, once: a process for each case is a fork of this one."""
    import xmc_stream.cli
    import xmc_stream.datasets.export
    import xmc_stream.datasets.select
    import xmc_stream.datasets.split
    import xmc_stream.datasets.verify
    import xmc_stream.evaluation.evaluate
    import xmc_stream.training.train  # noqa: F401
    from xmc_stream.factors.predict import ScoreWarmUp
    from xmc_stream.grouplasso.predict import RowsWarmUp
    from xmc_stream.linear.predict import LinearWarmUp
    from xmc_stream.lowrank.method import LEMLWarmUp
    from xmc_stream.memoir.method import MEMOIRWarmUp
    from xmc_stream.pdsparse.method import PDSparseWarmUp
    from xmc_stream.ppdsparse.method import PPDSparseWarmUp
    from xmc_stream.tree.method import TreeWarmUp
    from xmc_stream.tree.predict import TreesWarmUp

    for job in (
        PPDSparseWarmUp(), PPDSparseWarmUp(again=True), PDSparseWarmUp(), LEMLWarmUp(), LinearWarmUp(True),
        LinearWarmUp(False), ScoreWarmUp(), RowsWarmUp(), MEMOIRWarmUp("l1", "exact"), TreeWarmUp(), TreesWarmUp(),
    ):  # fmt: skip
        job.run()


def fuzz(
    source: Path, seeds: range, target: str | None = None, only: int | None = None, verbose: bool = False,
    trial: Trial = attempt,
) -> list[str]:  # fmt: skip
    """Cases by seeds, each in a process of its own; what did not end as it must."""
    failures = []
    for seed in seeds:
        read, write = os.pipe()
        log_read, log_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(read)
                if not verbose:
                    null = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(null, 2)
                _log[:] = [log_write]
                child(source, seed, target, only, write, trial)
                code = 0
            finally:
                os._exit(code)
        os.close(write)
        os.close(log_write)
        began = time.monotonic()
        text = b""
        while part := os.read(read, 1 << 16):
            text += part
        log = b""
        while part := os.read(log_read, 1 << 16):
            log += part
        os.close(read)
        os.close(log_read)
        _, status = os.waitpid(pid, 0)
        if text:
            failures.append(text.decode(errors="replace"))
        if status:
            last = log.decode(errors="replace").splitlines()[-1:]
            failures.append(f"ended with status {status} after {time.monotonic() - began:.0f} s: {last}")
        if verbose and (text or status):
            print(failures[-1], flush=True)
    return failures


def fuzz_in(
    folder: Path, seeds: range, target: str | None = None, only: int | None = None, verbose: bool = False,
    trial: Trial = attempt, made: Callable[[Path], None] = prepare,
) -> list[str]:  # fmt: skip
    """`fuzz`, with whole stores that are made in a folder if they are not there."""
    load()
    if not folder.exists():
        folder.mkdir(parents=True)
        pid = os.fork()  # no thread of a cluster may live in the process that forks
        if pid == 0:
            code = 1
            try:
                made(folder)
                code = 0
            finally:
                os._exit(code)
        if os.waitpid(pid, 0)[1]:
            shutil.rmtree(folder)
            raise SystemExit("stores could not be made")
    return fuzz(folder, seeds, target, only, verbose, trial)


def main() -> None:
    """FOLDER, FIRST and LAST seed, and if one likes TARGET and the number of the command."""
    folder, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    target = sys.argv[4] if len(sys.argv) > 4 and sys.argv[4] else None
    only = int(sys.argv[5]) if len(sys.argv) > 5 else None
    failures = fuzz_in(folder, range(first, last), target, only, True)
    print(f"{last - first} cases, {len(failures)} failures")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
