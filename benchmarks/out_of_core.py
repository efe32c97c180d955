"""Data larger than memory: trained, predicted and evaluated under a limit, and with all the memory there is.

    python benchmarks/out_of_core.py 20GB 1GB FOLDER
    python benchmarks/out_of_core.py 25GB 512MB FOLDER --rounds 1 --predict-train --no-unlimited
    python benchmarks/out_of_core.py 10GB 2GB FOLDER --logical 100GB --rounds 1 --no-unlimited
    python benchmarks/out_of_core.py 2GB 512MB FOLDER --hard       # the cgroup's limit is the memory limit itself
    python benchmarks/out_of_core.py 5GB 1GB FOLDER --solver pdsparse --features 50000 --labels 500 --set max_passes=2
    python benchmarks/out_of_core.py 5GB 899MB FOLDER --page-cache 101MB \
        --solver tree --tree 3 --labels 65536 --features-per-sample 100

Makes the data in FOLDER (again only when asked for others), then runs the commands one by one, with a probe of the disk
before each: chunk files read cold by pread of 4 MiB. (lam=1: with 10,000 positives a class, as 20 GB give, as accurate
here as the library's 0.01, P@1 81.3 and 81.2, and not needlessly dense: a value meets 15 % of the classes' weights, not
96 %, which would only make the searches six times as long.) Under the limit they run in a memory cgroup (v1 or v2) of the limit
and --page-cache more, so that the page cache cannot hold the data instead. Prints for each command VmHWM, seconds,
passes, bytes asked for and bytes that came from the disk; for each phase of training also processors and the share of
the disk's own rate; digests. Ends with exit code 1 if VmHWM passed the limit, a process was killed for memory, a command
failed, or digests differ.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil
from commands import drop_cache, machine, run
from watch import Cgroup, Watched, cgroup_or_none, sequential_rate, watch

from xmc_stream.store.dataset import Dataset
from xmc_stream.store.predictions import Predictions
from xmc_stream.system.memory import available_threads, format_size, parse_size

GENERATOR = Path(__file__).resolve().parent.parent / "tools" / "make_synthetic.py"
_BUSY = 0.7  # share of the processors, or of the disk's rate, from which a phase is bound by them
_PROBES = 5
CUTS = {
    "ppdsparse": "{passes:g} passes, {class_blocks} class blocks, {row_blocks} row blocks, ",
    "pdsparse": "{passes:g} passes, ",
    "tree": "{passes:g} passes, ",
}


@dataclass
class Data:
    """What is learned from and predicted, and the chunk files that probes read."""

    train: Path
    test: Path

    def probe_files(self) -> list[Path]:
        X = Dataset(self.train).X_rows()
        return [array.chunk_file(k) for array in X.arrays()[1:] for k in range(array.n_chunks)]


def generate(folder: Path, size: str, logical: str | None, shape: dict[str, Any]) -> Data:
    """The data of these parameters, made if they are not there."""
    name = "-".join(["data", size, *([f"x{logical}"] if logical else []), *(f"{v:g}" for v in shape.values())])
    train = folder / f"{name}.xmc"
    test = train.with_name(f"{name}-test.xmc")
    if not test.exists():
        options = [word for key, value in shape.items() for word in (f"--{key}", f"{value:g}")]
        options += ["--size", size, *(["--logical", logical] if logical else [])]
        subprocess.run([sys.executable, GENERATOR, train, *options, "--overwrite"], check=True, stdout=sys.stderr)
    return Data(train, test)


def phases(model: Path, job: Watched, threads: int, rate: float) -> list[str]:
    """A line a phase of training: wall seconds, bytes asked for and from the disk, processors, what it is bound by."""
    spans: dict[str, list[float]] = {}  # phase: begin, end, bytes
    for line in (model / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if "seconds" in event:
            span = spans.setdefault(event["phase"].partition("/")[0].rstrip("0123456789 "), [float("inf"), 0.0, 0.0])
            span[0] = min(span[0], event["time"] - event["seconds"])
            span[1] = max(span[1], event["time"])
            span[2] += event.get("bytes_read", 0)
    lines = []
    for name, (begin, end, n_bytes) in spans.items():
        seconds = max(end - begin, 1e-3)
        cpu, from_disk = job.between(begin, end)
        busy, share = cpu / seconds / threads, from_disk / seconds / rate
        bound = "I/O-bound" if share >= _BUSY else "compute-bound" if busy >= _BUSY else "neither"
        lines.append(
            f"    {name:22} {seconds:8.1f} s  asked {format_size(n_bytes):>8}  from disk {format_size(from_disk):>8}  "
            f"processors {busy:4.0%}  disk {share:4.0%}  {bound if seconds > 1 else 'too short to say'}"
        )
    return lines


def predictions_digest(path: Path) -> str:
    """A hash of all labels and scores."""
    digest = hashlib.sha256()
    for _, labels, scores in Predictions(path).blocks():
        digest.update(labels.tobytes())
        digest.update(scores.tobytes())
    return digest.hexdigest()


@click.command()
@click.argument("size")
@click.argument("limit")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--labels", default=1000, show_default=True)
@click.option("--features", default=200_000, show_default=True)
@click.option("--features-per-sample", default=250.0, show_default=True)
@click.option("--labels-per-sample", default=1.0, show_default=True)
@click.option("--test-samples", default=20_000, show_default=True)
@click.option("--logical", help="Repeat the rows of SIZE up to such a size by hard links.")
@click.option("--solver", type=click.Choice(list(CUTS)), default="ppdsparse", show_default=True)
@click.option("--tree", type=int, metavar="DEPTH", help="Make the labels leaves of a tree.")
@click.option(
    "--rounds", default=3, show_default=True,
    help="Of ppdsparse: max_rounds; a single one has as few epochs as the first of many.",
)  # fmt: skip
@click.option("--lam", default=1.0, show_default=True, help="Of ppdsparse.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="More parameters of the solver.")
@click.option("--threads", type=int, default=available_threads, show_default="all processors")
@click.option(
    "--only", default="train,predict,evaluate", show_default=True, help="Commands to run; models stay in FOLDER."
)
@click.option("--predict-train", is_flag=True, help="Predict and evaluate the large set, not the test set.")
@click.option("--page-cache", default="512MB", show_default=True, help="That the cgroup allows; `any`: no cgroup.")
@click.option("--hard", is_flag=True, help="The cgroup allows the limit and nothing beyond.")
@click.option(
    "--warm", is_flag=True, help="Read all files before a command, outside the cgroup, in place of dropping them."
)
@click.option("--unlimited/--no-unlimited", default=True, show_default=True, help="Compare with 0.8 of the machine.")
def main(
    size: str, limit: str, folder: Path, labels: int, features: int, features_per_sample: float, labels_per_sample: float,
    test_samples: int, logical: str | None, solver: str, tree: int | None, rounds: int, lam: float,
    settings: tuple[str, ...], threads: int, only: str, predict_train: bool, page_cache: str, hard: bool, warm: bool,
    unlimited: bool,
) -> None:  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    shape = {
        "features": features, "labels": labels, "features-per-sample": features_per_sample,
        "labels-per-sample": labels_per_sample, "test-samples": test_samples, **({"tree": tree} if tree else {}),
    }  # fmt: skip
    data = generate(folder, size, logical, shape)
    about = run("info", data.train)
    target = data.train if predict_train else data.test
    wanted = only.split(",")
    usual = [f"lam={lam:g}", f"max_rounds={rounds}", *(["last_epochs=2"] if rounds == 1 else [])]
    chosen = [*(usual if solver == "ppdsparse" else []), *settings]
    options = ["--solver", solver, *(word for setting in chosen for word in ("--set", setting))]
    print(
        f"{machine()}, {format_size(psutil.virtual_memory().total)} of memory; {threads} threads, "
        f"{'warm' if warm else 'cold'} page cache\n"
        f"{about['n_samples']:,} x {about['n_features']:,}, {about['n_labels']:,} labels, {about['nnz_features']:,} values, "
        f"{format_size(about['bytes_on_disk'])} on disk; {solver} {' '.join(chosen)}",
        flush=True,
    )
    n_bytes, rates, failures = parse_size(limit), [], []
    limits = {"limited": n_bytes, **({"unlimited": int(0.8 * psutil.virtual_memory().total)} if unlimited else {})}
    digests: dict[str, dict[str, str]] = {"model": {}, "predictions": {}}
    seconds: dict[str, dict[str, float]] = {}
    for name, bound in limits.items():
        model, out = folder / f"{name}.model", folder / f"{name}.pred"
        commands: dict[str, Sequence[Any]] = {
            "train": (data.train, model, *options),
            "predict": (model, target, out),
            "evaluate": (out, target),
        }
        for command in [command for command in commands if command in wanted]:
            for old in {"train": (model, model.with_name(f"{model.name}.partial")), "predict": (out,)}.get(command, ()):
                shutil.rmtree(old, ignore_errors=True)
            rates.append(sequential_rate(data.probe_files()))
            if warm:
                warm_up([data.train, data.test])
            else:
                drop_cache(folder)
            cgroup = None
            if name == "limited" and (hard or page_cache != "any"):
                cgroup = cgroup_or_none("xmc_stream_out_of_core", bound if hard else bound + parse_size(page_cache))
            job = None
            try:
                job = watch(command, *commands[command], "--memory-limit", bound, "--threads", threads, cgroup=cgroup)
            except RuntimeError as error:
                failures.append(str(error))
            finally:
                held = end_cgroup(cgroup)
            failures += [f"{command}: killed for memory"] * (held.get("oom_kills", 0) > 0)
            if job is None:
                break
            peak = max(job.peak, job.figures.get("peak_rss", 0))
            seconds.setdefault(command, {})[name] = job.seconds
            if peak > bound:
                failures.append(f"{command} came to {format_size(peak)} under {format_size(bound)}")
            print(
                f"{command:8} under {format_size(bound):>7}: VmHWM {format_size(peak):>7}, {job.seconds:.1f} s, "
                + (CUTS[solver].format(**job.figures) if command == "train" else "")
                + (f"asked {format_size(job.figures['bytes_read'])}, " if "bytes_read" in job.figures else "")
                + f"{format_size(job.from_disk)} from disk at {job.from_disk / job.seconds / rates[-1]:.0%} of its rate",
                flush=True,
            )
            if cgroup is not None:
                print(
                    f"    cgroup of {format_size(cgroup.limit)}: at its limit {held['at_limit']:,} times, "
                    f"peak {format_size(held['peak'])} with page cache, {held['oom_kills']} out-of-memory kills"
                )
            if command == "train":
                print("\n".join(phases(model, job, threads, rates[-1])), flush=True)
                digests["model"][name] = run("info", model, "--digest")["digest"]
            elif command == "predict":
                digests["predictions"][name] = predictions_digest(out)
            else:
                print(f"    P@1 {job.figures['P@1']:.2f}")
    while len(rates) < _PROBES:
        rates.append(sequential_rate(data.probe_files()))
    print(f"the disk reads {format_size(statistics.median(rates))}/s: median of {len(rates)} probes")
    for command, by_run in seconds.items():
        if len(by_run) == 2:
            print(f"{command}: {by_run['limited'] / by_run['unlimited']:.2f} times the unlimited run's seconds")
    for what, found in digests.items():
        if found:
            same = len(set(found.values())) == 1
            shown = ", ".join(f"{name} {digest[:16]}" for name, digest in found.items())
            print(f"{what}: {shown}{'' if len(found) < 2 else ', identical' if same else ', DIFFERENT'}")
            failures += [] if same else [f"{what} differ"]
    if failures:
        sys.exit("failed: " + "; ".join(failures))


def end_cgroup(cgroup: Cgroup | None) -> dict[str, int]:
    """Figures of a cgroup, which is removed."""
    if cgroup is None:
        return {}
    held = cgroup.figures()
    cgroup.remove()
    return held


def warm_up(folders: Sequence[Path]) -> None:
    """Read all chunk files, so that they stand in the page cache as far as they fit."""
    for folder in folders:
        for file in folder.rglob("c/*"):
            with open(file, "rb", buffering=0) as raw:
                while raw.read(4 << 20):
                    pass


if __name__ == "__main__":
    main()
