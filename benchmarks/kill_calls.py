"""Every command that writes, killed (SIGKILL) at a system call that changes a name or waits for the disk, and given again.

    python benchmarks/kill_calls.py FOLDER --trials 300

A trial takes a command, with or without --overwrite, alone or beside a copy of itself, and kills it as it is about to make
the n-th rename, unlink, rmdir, mkdir, fsync, write or open of a thread (strace injects the signal). Then the same command is
given again. It must end with the result of the undisturbed command, or in one line where that result stands already; what
the kill left under the target's name is nothing, the old or the new; the user's own files, such as NAME.old, are as they
were; nothing else is left. Ends with exit code 1 otherwise. Without strace, the kill comes at a random instant.
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
from dataclasses import dataclass
from pathlib import Path

import click

import xmc_stream as xs
from xmc_stream.errors import XmcStreamError
from xmc_stream.store.inventory import files_of_store

TOOLS = Path(__file__).resolve().parent.parent / "tools"
SHAPE = "--samples 600 --features 300 --labels 40 --features-per-sample 12 --test-samples 100".split()
CALLS = ("rename", "unlink,unlinkat", "rmdir", "mkdir", "fsync", "write", "openat", "ftruncate,truncate")
STRACE = shutil.which("strace")
XMC = [sys.executable, "-m", "xmc_stream"]


@dataclass(frozen=True)
class Command:
    """arguments: those of the shell; {} is the place of what is written. targets: names of that."""

    arguments: str
    targets: tuple[str, ...]
    overwrite: bool = True  # whether it takes that option

    def words(self, overwrite: bool) -> list[str]:
        return [*XMC, *self.arguments.split(), *(["--overwrite"] if overwrite and self.overwrite else []), "--json"]


LIMITS = "--memory-limit 1GB"
TRAINING = f"--set max_rounds=2 --threads 1 {LIMITS}"
COMMANDS = (
    Command(f"convert set.txt new.xmc {LIMITS}", ("new.xmc",)),
    Command(f"append set.xmc test.xmc new.xmc {LIMITS}", ("new.xmc",)),
    Command(f"split set.xmc new-a.xmc new-b.xmc {LIMITS}", ("new-a.xmc", "new-b.xmc")),
    Command(f"select-features set.xmc new.xmc --features ids.txt {LIMITS}", ("new.xmc",)),
    Command("copy set.xmc new.xmc", ("new.xmc",)),
    Command(f"export set.xmc new.npz {LIMITS}", ("new.npz", "new-labels.npz")),
    Command(f"export set.xmc new.txt.gz {LIMITS}", ("new.txt.gz",)),
    Command(f"train set.xmc new.model {TRAINING}", ("new.model",)),
    Command(f"train set.xmc new.model --calibrate 0.3 {TRAINING}", ("new.model",)),
    Command(
        f"train set.xmc new.model --solver group-lasso --set loss=multitask --set max_passes=3 {LIMITS}", ("new.model",)
    ),
    Command(f"compact rows.model new.model {LIMITS}", ("new.model",)),
    Command(f"predict some.model test.xmc new.pred {LIMITS}", ("new.pred",)),
    Command(f"predict some.model test.xmc new.txt {LIMITS}", ("new.txt",)),
    Command(f"predict some.model test.xmc new.npz {LIMITS}", ("new.npz",)),
    Command(f"tune set.xmc new.json --grid lam=0.01,1 --held-out 0.3 {TRAINING}", ("new.json",)),
    Command(f"calibrate some.model test.xmc {LIMITS}", ("some.model",), overwrite=False),
)


def content(path: Path) -> str:
    """What a target is: "" for nothing, else a hash of it that times do not enter. Raises XmcStreamError for half a store."""
    if not path.exists():
        return ""
    if path.is_file():
        if path.suffix == ".json":
            kept = json.loads(path.read_bytes())
            return json.dumps([(one["parameters"], one["figures"], one["nnz"]) for one in kept["settings"]])
        return hashlib.sha256(path.read_bytes()).hexdigest()
    xs.verify(path)
    if path.suffix == ".model":
        model = xs.load_model(path)
        return f"{model.digest()} {json.dumps(model.attributes.get('calibration'), sort_keys=True)}"
    chunks = sorted(name for name in files_of_store(path) if "/c/" in name and not name.startswith("X/columns"))
    return hashlib.sha256(b"".join(name.encode() + (path / name).read_bytes() for name in chunks)).hexdigest()


def prepare(folder: Path) -> None:
    """What commands read, and old stores to be replaced."""
    folder.mkdir(parents=True)
    make = [sys.executable, str(TOOLS / "make_synthetic.py"), str(folder / "set.txt"), *SHAPE]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    (folder / "ids.txt").write_text("".join(f"{i}\n" for i in range(0, 300, 3)))
    for command in (
        "convert set.txt set.xmc",
        "convert set-test.txt test.xmc --like set.xmc",
        f"train set.xmc some.model {TRAINING}",
        f"train set.xmc rows.model --solver group-lasso --set loss=multitask --set max_passes=3 {LIMITS}",
        "convert set-test.txt old.xmc --like set.xmc",
        f"train set.xmc old.model --set lam=1 {TRAINING}",
        "predict some.model set.xmc old.pred -k 2",
        "predict some.model set.xmc old.txt -k 2",
        "predict some.model set.xmc old.npz -k 2",
        "tune set.xmc old.json --grid lam=0.5,2 --held-out 0.3 --threads 1 --set max_rounds=1",
        "export test.xmc old.txt.gz",
    ):
        subprocess.run([*XMC, *command.split()], cwd=folder, check=True, capture_output=True)
    shutil.rmtree(folder / "set.xmc" / "X" / "columns")


def place(whole: Path, folder: Path, command: Command, overwrite: bool) -> dict[str, str]:
    """A folder of its own for a trial, with files of the user's; what is at the targets."""
    shutil.copytree(whole, folder)
    for target in command.targets:
        if overwrite and command.overwrite:
            old = (
                folder
                / f"old{target.removeprefix('new').removeprefix('-labels').removeprefix('-a').removeprefix('-b')}"
            )
            (shutil.copytree if old.is_dir() else shutil.copy)(old, folder / target)
        for name in (f"{target}.old", f"{target}.tmp"):
            (folder / name).mkdir()
            (folder / name / "thesis").write_text("mine")
    return {target: content(folder / target) for target in command.targets}


def tree(folder: Path, but: tuple[str, ...]) -> dict[str, str]:
    """Names and contents of a folder, of stores but for what is made in them (X by columns)."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        top = name.split("/")[0]  # strace kills the shell too that removes temporary folders
        if top not in but and not top.startswith(".xmc_stream-") and "X/columns" not in name:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
    return found


def counts(whole: Path, folder: Path, command: Command) -> Counter[str]:
    """How often the undisturbed command makes each kind of call."""
    place(whole, folder, command, True)
    strace = [STRACE, "-f", "-qq", "-o", folder.parent / "calls", "-e", f"trace={','.join(CALLS)}"]
    subprocess.run([*map(str, strace), *command.words(True)], cwd=folder, check=True, capture_output=True)
    made: Counter[str] = Counter()
    for line in (folder.parent / "calls").read_text(errors="replace").splitlines():
        call = line.split(maxsplit=1)[1].split("(")[0]
        made.update(kind for kind in CALLS if call in kind.split(","))
    shutil.rmtree(folder)
    return made


def killed(
    command: Command, overwrite: bool, folder: Path, calls: Counter[str], rng: random.Random
) -> subprocess.Popen[bytes]:
    """Start a command that will be killed."""
    words = command.words(overwrite)
    if STRACE:
        kind = rng.choice(sorted(calls))
        at = f"inject={kind}:signal=SIGKILL:when={rng.randint(1, calls[kind])}"
        words = [STRACE, "-f", "-qq", "-o", "/dev/null", "-e", f"trace={kind}", "-e", at, *words]
    child = subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if not STRACE:
        time.sleep(rng.uniform(0.2, 2))
        child.kill()
    return child


def fault(
    command: Command, overwrite: bool, beside: bool, whole: Path, folder: Path, wanted: dict[str, str],
    calls: Counter[str], rng: random.Random,
) -> tuple[str, bool]:  # fmt: skip
    """What went wrong in a trial, "" if nothing; whether the command was killed."""
    old = place(whole, folder, command, overwrite)
    mine = tree(folder, command.targets)
    child = killed(command, overwrite, folder, calls, rng)
    said = []
    if beside:
        other = subprocess.Popen(
            command.words(overwrite), cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        said.append(other.communicate()[1].decode())
    said.append(child.communicate()[1].decode())
    if any("Traceback" in one for one in said):
        return f"a traceback: {said}", True
    for target in command.targets:
        try:
            found = content(folder / target)
        except (XmcStreamError, ValueError) as error:
            return f"{target} is half: {error}", True
        if (
            found not in ("", old[target], wanted[target]) and "--calibrate" not in command.arguments
        ):  # it is trained first
            return f"{target} is neither old nor new", True
    again = subprocess.run(command.words(overwrite), cwd=folder, capture_output=True, text=True, check=False)
    ended = {target: content(folder / target) for target in command.targets}
    if ended != wanted:
        return f"it ends otherwise: {again.stderr.strip()[-300:]}", True
    lines = [line for line in again.stderr.splitlines() if line.startswith("xmc-stream: ")]
    if again.returncode not in (0, 1) or "Traceback" in again.stderr or (again.returncode == 1) != (len(lines) == 1):
        return f"exit code {again.returncode}: {again.stderr.strip()[-300:]}", True
    if tree(folder, command.targets) != mine:
        now = tree(folder, command.targets)
        return f"left or touched: {sorted(name for name in {*now, *mine} if now.get(name) != mine.get(name))[:5]}", True
    return "", child.returncode not in (0, 1)


def campaign(folder: Path, trials: int, seed: int) -> list[str]:
    """A line for each trial with a fault."""
    rng, faults, hit = random.Random(seed), list[str](), Counter[bool]()
    whole = folder / "whole"
    prepare(whole)
    wanted, calls = {}, {}
    for number in range(trials):
        command, overwrite, beside = COMMANDS[number % len(COMMANDS)], rng.random() < 0.5, rng.random() < 0.25
        if command not in wanted:
            place(whole, folder / "undisturbed", command, False)
            subprocess.run(command.words(False), cwd=folder / "undisturbed", check=True, capture_output=True)
            wanted[command] = {target: content(folder / "undisturbed" / target) for target in command.targets}
            shutil.rmtree(folder / "undisturbed")
            calls[command] = counts(whole, folder / "counted", command) if STRACE else Counter()
        at = folder / f"trial-{number}"
        why, was_killed = fault(command, overwrite, beside, whole, at, wanted[command], calls[command], rng)
        hit[was_killed] += 1
        if why:
            faults.append(
                f"trial {number}, {command.arguments}{' --overwrite' * overwrite}{', beside a copy' * beside}: {why}"
            )
            print(faults[-1], file=sys.stderr, flush=True)
        else:
            shutil.rmtree(at)
    print(f"{trials} trials, {hit[True]} killed, {len(faults)} with a fault", file=sys.stderr, flush=True)
    return faults


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=False))
@click.option("--trials", default=300, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(folder: Path, trials: int, seed: int) -> None:
    os.environ.setdefault("XMC_STREAM_DATA", "")
    sys.exit(1 if campaign(folder, trials, seed) else 0)


if __name__ == "__main__":
    main()
