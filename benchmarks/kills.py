"""Commands killed (SIGKILL) at instants uniform over a run, and continued: every one ends as the undisturbed run did.

    python benchmarks/kills.py FOLDER --kills 50
    python benchmarks/kills.py FOLDER --kills 10 --solver pdsparse --only train

Makes a set, converts, trains and predicts it undisturbed. Each kill draws an instant of the three together, or of those
named by --only (with --compile also of the compilation of all kernels, into a cache of its own), begins the command that
the instant falls into and kills it there; a third of them are killed once more, under another limit and thread count,
before they may end.
A phase that no instant hit is waited for and killed. Whatever a kill leaves must not open, or be whole; the same command,
again under another limit and thread count, must end with the identical fingerprint (conversion), digest (model) or bytes
(predictions), and leave nothing beside them. Ends with exit code 1 otherwise.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import beacon
import click

import xmc_stream as xs
from xmc_stream.errors import XmcStreamError
from xmc_stream.store.dataset import open_dataset
from xmc_stream.store.predictions import Predictions

TOOLS = Path(__file__).resolve().parent.parent / "tools"
EXECUTIONS = (("600MB", 1), ("1GB", 2), ("4GB", 2))
COMMANDS = ("convert", "train", "predict")
PHASES = {
    "ppdsparse": ("search", "gather", "solve"),
    "pdsparse": ("pass", "objective", "weights"),
    "tree": ("vectors", "split", "root", "beam", "choice", "children"),
}
SIZES = {"samples": 4000, "features": 2000, "labels": 2100}
OF_ROW = {"features-per-sample": 40, "test-samples": 10000}


@dataclass
class Step:
    """A command: its arguments before the target, what comes after; seconds and result of the undisturbed run."""

    name: str
    before: list[Any]
    target: str
    after: list[Any] = field(default_factory=list)
    cold: bool = False  # with a cache of kernels of its own, empty at first
    seconds: float = 0.0
    result: str = ""

    def command(self, folder: Path, execution: tuple[str, int]) -> list[str]:
        """For a child process; beacon.py runs it and tells its phases."""
        arguments = [*self.before, folder / self.target, *self.after]
        options = ["--memory-limit", execution[0], "--threads", execution[1]]
        script = [sys.executable, str(Path(beacon.__file__)), folder / "beacon"]
        return [str(word) for word in [*script, self.name, *arguments, *options]]

    def environment(self, folder: Path) -> dict[str, str]:
        cache = {"NUMBA_CACHE_DIR": str(folder / "kernels")} if self.cold else {}
        return {**os.environ, **cache}

    def phases(self, solver: str) -> tuple[str, ...]:
        """That the command comes through."""
        if self.name == "train" and not self.cold:
            return ("check", *PHASES[solver], "finalise")
        return ("compilation" if self.cold else "conversion" if self.name == "convert" else "prediction",)

    def read(self, folder: Path) -> str:
        """What must be identical. Raises XmcStreamError or OSError where there is nothing whole."""
        path = folder / self.target
        if self.name == "convert":
            return open_dataset(path).fingerprint
        if self.name == "train":
            return xs.load_model(path).digest()
        digest = hashlib.sha256()
        if path.suffix == ".txt":
            digest.update(path.read_bytes())
        else:
            for _, labels, scores in Predictions(path).blocks():
                digest.update(labels.tobytes() + scores.tobytes())
        return digest.hexdigest()


@dataclass
class Kill:
    """What became of one. phases: that it was killed in; kills: how often; same: whether it ended as it should."""

    step: Step
    phases: list[str]
    kills: int
    same: bool
    why: str = ""


def steps(
    folder: Path, shape: Sequence[str], settings: Sequence[str], compiling: bool, solver: str, only: Sequence[str]
) -> list[Step]:
    """The commands up to the last that is wanted, each run undisturbed in `folder`; those that are."""
    text = folder / "set.txt"
    subprocess.run([sys.executable, TOOLS / "make_synthetic.py", text, *shape], check=True, stdout=subprocess.DEVNULL)
    test = folder / "set-test.xmc"
    options = ["--solver", solver, *(word for setting in settings for word in ("--set", setting))]
    train = [folder / "set.xmc"]
    all_steps = [
        Step("convert", [text], "set.xmc"),
        Step("train", train, "set.model", options),
        Step("predict", [folder / "set.model", test], "set.pred"),
        Step("predict", [folder / "set.model", test], "set.txt.pred.txt"),
    ]
    all_steps = [step for step in all_steps if COMMANDS.index(step.name) <= max(map(COMMANDS.index, only))]
    for step in all_steps:
        beacon.make(folder / "beacon")
        began = time.perf_counter()
        subprocess.run(
            step.command(folder, EXECUTIONS[1]), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        step.seconds = time.perf_counter() - began
        step.result = step.read(folder)
        if step.name == "convert":
            words = [
                sys.executable,
                "-m",
                "xmc_stream.cli",
                "convert",
                folder / "set-test.txt",
                test,
                "--like",
                train[0],
            ]
            subprocess.run(list(map(str, words)), check=True, stdout=subprocess.DEVNULL)
    if compiling and "train" in only:
        step = Step("train", train, "set.model", options, cold=True, result=all_steps[1].result)
        cold = folder / "cold"
        cold.mkdir()
        beacon.make(cold / "beacon")
        began = time.perf_counter()
        subprocess.run(step.command(cold, EXECUTIONS[1]), env=step.environment(cold), check=True, capture_output=True)
        step.seconds = time.perf_counter() - began - all_steps[1].seconds
        all_steps.append(step)
    return [step for step in all_steps if step.name in only]


def start(step: Step, folder: Path, execution: tuple[str, int]) -> subprocess.Popen[bytes]:
    beacon.make(folder / "beacon")
    with open(folder / "said", "wb") as said:
        return subprocess.Popen(
            step.command(folder, execution), env=step.environment(folder), stdout=subprocess.DEVNULL, stderr=said
        )


def kill(step: Step, folder: Path, execution: tuple[str, int], after: float, phase: str = "") -> list[str] | None:
    """Start, kill after so many seconds, counted from when it is in a phase if one is named; None if it ended before."""
    child = start(step, folder, execution)
    while phase and child.poll() is None and phase not in beacon.active(folder / "beacon"):
        time.sleep(0.001)
    try:
        child.wait(after)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return beacon.active(folder / "beacon")
    if child.returncode:
        raise RuntimeError((folder / "said").read_text().strip().splitlines()[-1])
    return None


def disturbed(step: Step, folder: Path, rng: random.Random, after: float, phase: str = "") -> Kill:
    """Kill a command, perhaps twice, and let it end."""
    folder.mkdir()
    done = Kill(step, [], 0, False)
    while True:
        execution = rng.choice(EXECUTIONS)
        hit = kill(step, folder, execution, after, phase)
        if hit is not None:
            done.kills += 1
            done.phases += hit or ["other"]
        try:
            if step.read(folder) != step.result:
                done.why = "what the kill left opens and is another"
                return done
            break  # it was killed when all was done
        except (XmcStreamError, OSError):
            if (folder / step.target).exists():
                done.why = "what the kill left has its name and does not open"
                return done
        if hit is None or phase or done.kills > 1 or rng.random() < 2 / 3:
            break
        after = rng.uniform(0, step.seconds)
    child = start(step, folder, rng.choice(EXECUTIONS))
    child.wait()
    # whole predictions are not made again: the command says that they exist
    if child.returncode and not (folder / step.target).exists():
        done.why = (folder / "said").read_text().strip()
        return done
    beside = {path.name for path in folder.iterdir()} - {step.target, "beacon", "said", "kernels"}
    done.same = step.read(folder) == step.result and not beside
    done.why = "" if done.same else f"it ends otherwise, beside it {sorted(beside)}"
    return done


def campaign(
    folder: Path, kills: int, seed: int, shape: Sequence[str], settings: Sequence[str] = (), compiling: bool = False,
    solver: str = "ppdsparse", only: Sequence[str] = COMMANDS,
) -> list[Kill]:  # fmt: skip
    """So many kills of some of the commands, and one in each phase that they did not hit."""
    rng = random.Random(seed)
    whole = folder / "whole"
    whole.mkdir(parents=True)
    all_steps = steps(whole, shape, settings, compiling, solver, only)
    done: list[Kill] = []

    def one(step: Step, after: float, phase: str = "") -> None:
        place = folder / f"kill-{len(done)}"
        killed = disturbed(step, place, rng, after, phase)
        if killed.same:
            shutil.rmtree(place)
        if killed.kills or not killed.same:
            done.append(killed)
            said = "identical" if killed.same else killed.why
            print(f"{len(done)}: {step.name} killed in {', '.join(killed.phases)}: {said}", file=sys.stderr, flush=True)
        else:  # it ended before: the machine is quicker now
            step.seconds *= 0.9

    while len(done) < kills:
        instant = rng.uniform(0, sum(step.seconds for step in all_steps))
        at = 0
        while instant > all_steps[at].seconds:
            instant -= all_steps[at].seconds
            at += 1
        one(all_steps[at], instant)
    phases = [(step, phase) for step in all_steps for phase in step.phases(solver)]
    if kills >= len(phases):
        for step, phase in phases:
            if phase not in {hit for kill in done for hit in kill.phases}:
                one(step, rng.uniform(0, 0.01), phase)
    return done


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=False))
@click.option("--kills", default=50, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--times", default=1, show_default=True, help="Rows, features and labels of the set, so many times.")
@click.option("--compile/--no-compile", "compiling", default=True, show_default=True)
@click.option("--solver", type=click.Choice(list(PHASES)), default="ppdsparse", show_default=True)
@click.option("--only", type=click.Choice(COMMANDS), multiple=True, default=COMMANDS, show_default=True)
def main(folder: Path, kills: int, seed: int, times: int, compiling: bool, solver: str, only: tuple[str, ...]) -> None:
    sizes = {**OF_ROW, **{name: n * times for name, n in SIZES.items()}}
    shape = [word for name, n in sizes.items() for word in (f"--{name}", str(n))]
    done = campaign(folder, kills, seed, shape, compiling=compiling, solver=solver, only=only)
    phases = Counter(phase for kill in done for phase in set(kill.phases))
    others = {phase for name, names in PHASES.items() if name != solver for phase in names}
    for phase in (*(phase for phase in beacon.PHASES if phase not in others), "other"):
        print(f"{phase:12} {phases[phase]:3} commands killed")
    bad = [kill for kill in done if not kill.same]
    print(
        f"{len(done)} commands, {sum(kill.kills for kill in done)} kills, {sum(kill.kills > 1 for kill in done)} killed "
        f"twice; {len(done) - len(bad)} ended identical"
    )
    for one in bad:
        print(json.dumps({"command": one.step.name, "phases": one.phases, "why": one.why}))
    shutil.rmtree(folder / "whole")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
