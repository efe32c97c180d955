"""A million labels: generate, train with defaults, predict, evaluate predictions and model, all under one limit.

    python benchmarks/million_labels.py FOLDER --labels 1000000 --samples 1000000 --features 500000 --limit 4GB
    python benchmarks/million_labels.py FOLDER --solver tree --tree 3
    python benchmarks/million_labels.py FOLDER --solver tree --tree 3 --samples 250000 --labels 250000 --pecos PYTHON

A line a command: seconds, VmHWM, bytes read and on disk, passes, class blocks, figures. A set that is there is used again.
--pecos: also PECOS XR-Linear, by an interpreter that has it. Ends with exit code 1 if a limit did not hold.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
from commands import machine
from growth import pecos

from xmc_stream.system.memory import format_size, parse_size

GENERATOR = Path(__file__).resolve().parent.parent / "tools" / "make_synthetic.py"


def measured(*command: Any) -> tuple[dict[str, Any], float, int]:
    """The object that a command prints, its seconds and its peak resident bytes (that of this small process, at least)."""
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, *map(str, command), "--json"], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        printed = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with exit code {child.returncode}")
    return json.loads(printed), time.perf_counter() - began, usage.ru_maxrss * 1024


def disk(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--labels", default=1_000_000, show_default=True)
@click.option("--samples", default=1_000_000, show_default=True)
@click.option("--features", default=500_000, show_default=True)
@click.option("--features-per-sample", default=20, show_default=True)
@click.option("--labels-per-sample", default=5, show_default=True)
@click.option("--test-samples", default=20_000, show_default=True)
@click.option("--solver", type=click.Choice(["ppdsparse", "tree"]), default="ppdsparse", show_default=True)
@click.option("--tree", type=int, metavar="DEPTH", help="Make the labels leaves of a tree.")
@click.option("--limit", default="4GB", show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--pecos", "peers", metavar="PYTHON", help="The interpreter that has PECOS, if that is to be compared.")
@click.option("--keep", is_flag=True, help="Keep model and predictions.")
@click.option(
    "--go-on", is_flag=True, help="Go on with a training that was killed; its seconds are then of this session."
)
def main(
    folder: Path, labels: int, samples: int, features: int, features_per_sample: int, labels_per_sample: int,
    test_samples: int, solver: str, tree: int | None, limit: str, threads: int, peers: str | None,
    keep: bool, go_on: bool,
) -> None:  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"n{samples}-k{labels}-d{features}{f'-tree{tree}' if tree else ''}.xmc"
    test, model, pred = data.with_name(f"{data.stem}-test.xmc"), folder / "million.model", folder / "million.pred"
    for old in () if go_on else (model, pred, folder / "million.model.partial"):
        shutil.rmtree(old, ignore_errors=True)
    print(f"{machine()}; N = {samples:,}, D = {features:,}, K = {labels:,}; limit {limit}, {threads} threads")
    kept, began = True, time.perf_counter()

    def line(name: str, command: tuple[Any, ...], tells: Any) -> None:
        nonlocal kept
        figures, seconds, peak = measured(*command)
        kept = kept and peak <= parse_size(limit)
        print(f"{name:22} {seconds:7.1f} s, VmHWM {format_size(peak):>7}; {tells(figures)}", flush=True)

    if not test.exists():
        shape = ("--samples", samples, "--test-samples", test_samples, "--features", features, "--labels", labels)
        rows = ("--features-per-sample", features_per_sample, "--labels-per-sample", labels_per_sample, "--overwrite")
        of_tree = ("--tree", tree) if tree else ()
        line("generate", (GENERATOR, data, *shape, *rows, *of_tree), lambda of: f"{format_size(disk(data))} on disk")
    cli, options = ("-m", "xmc_stream.cli"), ("--memory-limit", limit, "--threads", threads)

    def trained(of: dict[str, Any]) -> str:
        told = f"{of['passes']:g} passes, {format_size(of['bytes_read'])} read; {of['nnz']:,} weights, "
        told += f"{format_size(disk(model))} on disk"
        if solver == "ppdsparse":
            told += f"; {of['class_blocks']} class blocks at most, gap mean {of['duality_gap_mean']:.2g}, "
            told += f"{of['n_open']:,} classes open, {of['n_empty']:,} empty"
        return told

    line("train", (*cli, "train", data, model, "--solver", solver, *options), trained)
    line("info", (*cli, "info", model, "--digest"), lambda of: f"digest {of['digest'][:16]}")
    line(
        "predict", (*cli, "predict", model, test, pred, *options),
        lambda of: f"{of['n_samples']:,} samples, {of['ms_per_sample']:.3g} ms each, {format_size(of['bytes_read'])} read",
    )  # fmt: skip

    def shown(figures: dict[str, Any]) -> str:
        return ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if not name.endswith("3"))

    line("evaluate predictions", (*cli, "evaluate", pred, test, "--train", data, *options), shown)
    line("evaluate model", (*cli, "evaluate", model, test, "--train", data, *options), shown)
    print(f"{'all':22} {time.perf_counter() - began:7.1f} s; {format_size(disk(folder))} on disk")
    if peers:
        figures, megabytes, precision = pecos(peers, data, test, folder / "pecos", threads)
        seconds = ", ".join(f"{name} {of['seconds']:.1f} s" for name, of in figures.items())
        print(f"{'PECOS':22} {seconds}; {megabytes:.0f} MB on disk; P@1 {precision:.4g}")
    if not keep:
        for made in (model, pred):
            shutil.rmtree(made)
    if not kept:
        sys.exit("a limit did not hold")


if __name__ == "__main__":
    main()
