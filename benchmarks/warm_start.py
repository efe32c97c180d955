"""Warm starts beside cold runs: objective, gap, P@k and seconds of the whole command, one thread.

    python benchmarks/warm_start.py FOLDER wordnet_hypernyms rcv1_topics ... --scratch FOLDER

FOLDER holds NAME.xmc and NAME-test.xmc, rows of length one. Warm starts: to another C and lam; from ten elevenths of the
rows (drawn by seed); from data without a tenth of the labels; from both; and to data without a tenth of the labels. Models
that others begin from keep more weights than the default's (prune=0.02). Each command is given twice, and the faster one
counts. A run that stands in the scratch folder's results is not done again; --again NAME, a part of its name, drops those.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import scipy.sparse as sp
from commands import machine

import xmc_stream as xs
from xmc_stream.store.matrix import SparseMatrix


@dataclass(frozen=True)
class Run:
    """One training. data: of `_make`; start: name of the run whose model it begins from; against: of the cold run."""

    name: str
    data: str
    settings: tuple[str, ...] = ()
    start: str = ""
    against: str = ""
    shown: bool = True


TIMES = 2  # that a run is done: the faster one counts
KEPT = ("prune=0.02",)  # by models that others begin from
RUNS = (
    Run("C 1", "all"),
    Run("C 2", "all", ("C=2",)),
    Run("lam 0.03", "all", ("lam=0.03",)),
    Run("few labels", "few-labels"),
    Run("C 1 to begin from", "all", KEPT, shown=False),
    Run("C 2 to begin from", "all", ("C=2", *KEPT), shown=False),
    Run("lam 0.03 to begin from", "all", ("lam=0.03", *KEPT), shown=False),
    Run("few rows to begin from", "few-rows", KEPT, shown=False),
    Run("few labels to begin from", "few-labels", KEPT, shown=False),
    Run("few of both to begin from", "few", KEPT, shown=False),
    Run("C 1 from C 1", "all", (), "C 1 to begin from", "C 1"),
    Run("C 2 from C 1", "all", ("C=2",), "C 1 to begin from", "C 2"),
    Run("C 1 from C 2", "all", (), "C 2 to begin from", "C 1"),
    Run("lam 0.03 from 0.01", "all", ("lam=0.03",), "C 1 to begin from", "lam 0.03"),
    Run("lam 0.01 from 0.03", "all", (), "lam 0.03 to begin from", "C 1"),
    Run("a tenth more rows", "all", (), "few rows to begin from", "C 1"),
    Run("a ninth more labels", "all", (), "few labels to begin from", "C 1"),
    Run("more of both", "all", (), "few of both to begin from", "C 1"),
    Run("a tenth fewer labels", "few-labels", (), "C 1 to begin from", "few labels"),
    Run("C 2 from the default's C 1", "all", ("C=2",), "C 1", "C 2"),
)


def _matrix(matrix: SparseMatrix) -> sp.csr_matrix:
    block = matrix.block(0, matrix.n_lines)
    values = np.ones(len(block.indices), np.float32) if block.data is None else block.data
    return sp.csr_matrix((values, block.indices, block.indptr), shape=matrix.shape)


def _make(folder: Path, name: str, scratch: Path) -> dict[str, Path]:
    """The sets of a name, with names of labels: all, without an eleventh of the rows, a tenth of the labels, and both."""
    sets = {key: scratch / f"{name}-{key}.xmc" for key in ("all", "few-rows", "few-labels", "few", "test", "few-test")}
    train, test = (xs.open_dataset(folder / f"{name}{part}.xmc") for part in ("", "-test"))
    rng = np.random.default_rng(0)
    n, k = train.n_samples, train.n_labels
    rows = np.sort(rng.permutation(n)[: n - n // 11])
    labels = np.sort(rng.permutation(k)[: k - k // 10])
    few, every = {"labels": labels, "rows": rows}, {"labels": np.arange(k), "rows": np.arange(n)}
    for key, path in sets.items():
        if path.exists():
            continue
        data = test if "test" in key else train
        mine = few["labels"] if key in ("few-labels", "few", "few-test") else every["labels"]
        names = scratch / "labels.txt"
        names.write_text("".join(f"label {label}\n" for label in mine))
        X, Y = _matrix(data.X_rows()), _matrix(data.Y_rows())[:, mine]
        if key in ("few-rows", "few"):
            X, Y = X[rows], Y[rows]
        xs.convert(X, path, labels=Y, label_names=names)
    return sets


def _train(data: Path, model: Path, settings: tuple[str, ...], start: Path | None) -> dict[str, Any]:
    """`xmc-stream train`, its figures, and the seconds of the command: by the clock, and of the processor."""
    shutil.rmtree(model, ignore_errors=True)
    more = [word for setting in settings for word in ("--set", setting)]
    more += ["--warm-start", str(start)] if start is not None else []
    command = [sys.executable, "-m", "xmc_stream.cli", "train", str(data), str(model), "--threads", "1"]
    began = time.perf_counter()
    with subprocess.Popen([*command, "--memory-limit", "4GB", "--json", *more], stdout=subprocess.PIPE) as run:
        out = run.stdout.read() if run.stdout else b""
        _, status, usage = os.wait4(run.pid, 0)
        run.returncode = os.waitstatus_to_exitcode(status)
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {run.returncode}")
    wall = time.perf_counter() - began
    return {**json.loads(out), "wall": wall, "processor": usage.ru_utime + usage.ru_stime}


def _results(folder: Path, name: str, scratch: Path, again: tuple[str, ...]) -> Iterator[tuple[Run, dict[str, Any]]]:
    kept = scratch / f"{name}-results.json"
    known = json.loads(kept.read_text()) if kept.exists() else {}
    known = {run: figures for run, figures in known.items() if not any(part in run for part in again)}
    sets = _make(folder, name, scratch)
    for run in RUNS:
        model = _place(scratch, name, run.name)
        if run.name not in known:
            start = _place(scratch, name, run.start) if run.start else None
            times = [_train(sets[run.data], model, run.settings, start) for _ in range(TIMES)]  # the first may compile
            figures = min(times, key=lambda one: one["processor"])
            test = sets["few-test" if run.data in ("few-labels", "few") else "test"]
            kinds = ("P@1", "P@3", "P@5")
            found = xs.evaluate(model, xs.open_dataset(test), threads=1)
            known[run.name] = {**figures, **{kind: found[kind] for kind in kinds}}
            kept.write_text(json.dumps(known))
        yield run, known[run.name]


def _place(scratch: Path, name: str, run: str) -> Path:
    return scratch / f"{name}-{run.replace(' ', '-')}.model"


def _line(name: str, run: Run, figures: dict[str, Any], cold: dict[str, Any] | None) -> str:
    times = f"{figures['wall']:.1f} | {figures['processor']:.1f}"
    shares = "| | " if cold is None else ""
    if cold is not None:
        shares = f"| {figures['processor'] / cold['processor']:.2f} | {figures['objective'] / cold['objective']:.4f} "
    precision = " / ".join(f"{figures[kind]:.2f}" for kind in ("P@1", "P@3", "P@5"))
    return (
        f"| {name} | {run.name} | {times} {shares}| {figures['rounds']} | {figures['objective']:,.0f} | "
        f"{figures['duality_gap_mean']:.4f} | {precision} |"
    )


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.argument("names", nargs=-1, required=True)
@click.option("--scratch", type=click.Path(path_type=Path), help="Folder of sets and models; FOLDER if not given.")
@click.option("--again", multiple=True, help="Do runs again that have this in their name.")
def main(folder: Path, names: tuple[str, ...], scratch: Path | None, again: tuple[str, ...]) -> None:
    scratch = scratch or folder
    scratch.mkdir(parents=True, exist_ok=True)
    print(machine())
    print("| set | run | s | cpu s | share of cold | objective / cold | rounds | objective | mean gap | P@1 / 3 / 5 |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in names:
        done: dict[str, dict[str, Any]] = {}
        for run, figures in _results(folder, name, scratch, again):
            done[run.name] = figures
            if run.shown:
                print(_line(name, run, figures, done.get(run.against)), flush=True)


if __name__ == "__main__":
    main()
