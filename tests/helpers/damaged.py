"""Damaged stores, and every command that reads them: what ends well has made what it makes of the whole store.

benchmarks/damage.py runs as many trials as one likes, test_damage.py a few. A bit flips, a file is cut short, gone, or
another one: by chance, and nothing is made anew, neither checksums nor seals.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from helpers.spoilt_stores import TRAININGS, D, note, prepare, run_heard

LIMIT = "1GB"
# of a report or of a store, from run to run: what it took, and which hash that gives
_VOLATILE = {
    "seconds", "ms_per_sample", "peak_rss", "memory_limit", "run", "metadata_sha256", "logs_sha256", "resumed", "phases",
    "bytes_on_disk", "bytes_by_part",
    "size", "peak_parts", "peak_phase", "least_limit", "limit_for_fewest_passes", "bytes_read",
    "conversion", "appended", "identity", "model_bytes",
}  # fmt: skip


def prepare_all(folder: Path) -> None:
    """Whole stores, files beside them, and what every command makes of them: `sound.json`."""
    prepare(folder)
    for left in folder.glob("*.left.partial"):
        shutil.rmtree(left)
    (folder / "rows.txt").write_text("".join(f"{i}\n" for i in range(0, 100, 7)))
    (folder / "features.txt").write_text("".join(f"{i}\n" for i in range(0, D, 3)))
    for command in (
        ["convert", "texts.jsonl", "more.xmc", "--like", "words.xmc"], ["export", "data.xmc", "rows-of-data.txt"],
        ["split", "data.xmc", "part.xmc", "held.xmc", "--fraction", "0.5"],
    ):  # fmt: skip
        with contextlib.chdir(folder):
            code, said, _ = run_heard([*command, "--memory-limit", LIMIT])
        assert code == 0, (command, said)
    sound = {}
    for target in TARGETS:
        for number, command in enumerate(commands(target)):
            with linked(folder, target, command) as here:
                code, said, made = product(command, here)
                assert code == 0, (command, said)
                sound[f"{target} {number}"] = made
    (folder / "sound.json").write_text(json.dumps(sound))


TARGETS = [
    "data.xmc", "held.xmc", "words.xmc", "more.xmc", "some.xmc", "p.zarr", "words.model", "rows.model", "compact.model",
    *(f"{solver}.model" for solver in TRAININGS),
]  # fmt: skip


def commands(target: str) -> list[list[str]]:
    """Every command that reads such a store, in the forms that read it by other code; `out` is what it makes."""
    limit = ["--memory-limit", LIMIT]
    both = [["info", target, "--json"], ["verify", target, *limit], ["copy", target, "out"]]
    if target == "p.zarr":
        return [*both, ["evaluate", target, "test.xmc", "--train", "data.xmc", "--json", *limit]]
    if target in ("words.xmc", "more.xmc"):
        sets = ["words.xmc", "more.xmc"]
        return [
            *both, ["append", *sets, "out", *limit], ["train", target, "out", *limit], ["split", target, "out", "out2", *limit],
            ["convert", "texts.jsonl", "out", "--like", target, *limit], ["export", target, "out.txt", *limit],
            ["predict", "words.model", target, "out.jsonl", *limit],
        ]  # fmt: skip
    if target == "words.model":
        return [
            *both, ["predict", target, "texts.jsonl", "out.jsonl", *limit], ["predict", target, "words.xmc", "out", *limit],
            ["convert", "texts.jsonl", "out", "--like", target, *limit],
        ]  # fmt: skip
    if target == "some.xmc":
        of = ["select-features", target, "out", "--model", "compact.model", *limit]
        return [*both, of, ["predict", "compact.model", target, "out.npz", *limit], ["train", target, "out", *limit]]
    if target.endswith(".xmc"):
        grown = target if target == "data.xmc" else "test.xmc"  # which has no mask of known pairs either
        halves = [
            ["tune", target, "out.json", "--grid", "lam=0.1,0.01", "--model", "out", "--held-out", "0.5", *limit],
            ["train", target, "out", "--calibrate", "0.5", *limit],
        ]
        return [
            *both, *(halves if target == "data.xmc" else []), ["plan", "train", target, "out", "--json", *limit],
            *(["train", target, "out", f"--solver={s}", *o, *limit] for s, o in TRAININGS.items()
              if target == "data.xmc" or "observed=given" not in o),
            ["split", target, "out", "out2", *limit], ["split", target, "out", "out2", "--rows", "rows.txt", *limit],
            ["select-features", target, "out", "--features", "features.txt", *limit],
            ["select-features", target, "out", "--model", "rows.model", *limit],
            ["export", target, "out.txt", *limit], ["export", target, "out.npz", *limit],
            ["append", target, grown, "out", "--columns", *limit], ["append", grown, target, "out", *limit],
            ["convert", "rows-of-data.txt", "out", "--like", target, *limit],
            *([["calibrate", "ppdsparse.model", target, "--json", *limit]] if target == "held.xmc" else []),
            *(["predict", model, target, out, *limit] for model, out in (
                ("ppdsparse.model", "out"), ("leml.model", "out.npz"),
                ("rows.model", "out.jsonl"), ("memoir.model", "out.txt"), ("tree.model", "out"))),
            *(["evaluate", model, target, "--train", "data.xmc", "--json", *limit]
              for model in ("ppdsparse.model", "leml.model", "rows.model", "tree.model")),
        ]  # fmt: skip
    mine = [
        *both, ["info", target, "--digest", "--json"], ["predict", target, "test.xmc", "out", *limit],
        ["evaluate", target, "test.xmc", "--json", *limit], ["plan", "predict", target, "test.xmc", "out", "--json", *limit],
    ]  # fmt: skip
    if target == "compact.model":
        return [
            *both,
            ["predict", target, "some.xmc", "out", *limit],
            ["evaluate", target, "some.xmc", "--json", *limit],
        ]
    if target == "rows.model":
        mine += [["compact", target, "out", *limit], ["select-features", "test.xmc", "out", "--model", target, *limit]]
    if target not in ("leml.model", "cplst.model", "tree.model"):
        mine.append(["export", target, "out.npz", *limit])
    if target == "ppdsparse.model":
        mine += [
            ["train", "data.xmc", "out", "--warm-start", target, *limit],
            ["calibrate", target, "held.xmc", "--json", *limit],
        ]
    return mine


# --- damage


def damage(store: Path, others: list[Path], r: random.Random) -> str:
    """Do one thing to one file of a store."""
    files = sorted(file for file in store.rglob("*") if file.is_file())
    file = r.choice(files)
    name, content = file.relative_to(store), file.read_bytes()
    how = r.choice(["bit", "bit", "bit", "cut", "lost", "other", "other"])
    if how == "other":  # of the same name in another store, or of the same size in this one
        same = [o / name for o in others if (o / name).is_file()]
        same += [f for f in files if f.stat().st_size == len(content)]
        same = [f for f in same if f.read_bytes() != content]
        if same:
            other = r.choice(same)
            theirs = other.read_bytes()
            if other in files:
                other.write_bytes(content)
            file.write_bytes(theirs)
            return f"{name} is {other}"
        how = "bit"
    if how == "lost":
        file.unlink()
    elif how == "cut":
        file.write_bytes(content[: r.randrange(max(len(content), 1))])
    else:
        changed = bytearray(content)
        at = r.randrange(min(len(content), r.choice([200, 4000, len(content)])))
        changed[at] ^= 1 << r.randrange(8)
        file.write_bytes(changed)
        how = f"bit {at}"
    return f"{how} of {name}"


# --- what a command makes


def product(command: list[str], folder: Path) -> tuple[int, str, str]:
    """Exit code, what was said, and a hash of what was made, of a command in a folder."""
    before = set(folder.iterdir())
    with contextlib.chdir(folder):
        code, said, out = run_heard(command)
    digest = hashlib.sha256()
    if code or command[0] == "plan":  # whose figures go by what the process holds
        return code, said, ""
    if "--json" in command:
        digest.update(json.dumps(steady(json.loads(out))).replace(str(folder), "").encode())
    for path in sorted(set(folder.iterdir()) - before):
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_dir() or (file.suffix == ".jsonl" and path.is_dir()):
                continue
            content = file.read_bytes()
            if file.name.endswith(".json"):
                content = json.dumps(steady(json.loads(content))).replace(str(folder), "").encode()
            digest.update(f"{file.relative_to(folder)} {len(content)}\n".encode() + content)
    return code, said, digest.hexdigest()


def steady(about: Any) -> Any:
    """A report or description without what changes from run to run."""
    if isinstance(about, dict):
        return {name: steady(value) for name, value in about.items() if name not in _VOLATILE}
    return [steady(value) for value in about] if isinstance(about, list) else about


@contextlib.contextmanager
def linked(source: Path, target: str, command: list[str]) -> Iterator[Path]:
    """A folder with all of another one: links, and as a copy the target, and what the command changes."""
    copied = {target, command[1]} if command[0] == "calibrate" else {target}
    with tempfile.TemporaryDirectory(prefix="damaged-") as name:
        for path in source.iterdir():
            if path.name in copied:
                shutil.copytree(path, Path(name) / path.name)
            else:
                (Path(name) / path.name).symlink_to(path)
        yield Path(name)


def attempt(source: Path, seed: int, target: str | None = None, only: int | None = None) -> Iterator[str]:
    """Damage one store and run some commands on it, in this process; a line for each that does not end as it must."""
    r = random.Random(seed)
    target = target or r.choice(["data.xmc"] * 6 + ["held.xmc"] * 2 + TARGETS)  # which most commands read
    sound = json.loads((source / "sound.json").read_bytes())
    every = commands(target)
    for number in r.sample(range(len(every)), min(3, len(every))) if only is None else [only]:
        note(f"seed {seed}: {target}: {number}")
        with linked(source, target, every[number]) as folder:
            others = [path for path in source.iterdir() if path.suffix == Path(target).suffix and path.name != target]
            done = damage(folder / target, sorted(others), random.Random(seed))
            code, said, made = product(every[number], folder)
        case = f"seed {seed}: {target}: {done}: {number}: {' '.join(every[number])}"
        lines = [line for line in said.splitlines() if line.startswith("xmc-stream: ")]
        if code == 0 and made != sound[f"{target} {number}"]:
            yield f"{case}\nexit code 0, and the product is another"
        elif code == 0 and every[number][0] in ("verify",):
            yield f"{case}\nis called sound"
        elif code not in (0, 1) or "Traceback" in said or len(lines) != code or (code and target not in lines[0]):
            yield f"{case}\nexit code {code}: {said}"
