"""Passes over the data (searches) until no row violates by more than tol, before a round did more without a cap, and since.

    python benchmarks/passes.py FOLDER bibtex rcv1_topics ... --scratch FOLDER

FOLDER holds NAME.xmc and, for P@k, NAME-test.xmc. For each set: the default of three rounds, then `max_rounds=none` as a
round was before (2 epochs, |A| rows that violate added) and as it is. Passes, seconds of wall clock and of processors,
megabytes gathered, largest violation and P@1, 3 and 5. --epochs, --near, --growth: others in place of the present ones.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any
from unittest import mock

import click
from commands import machine

import xmc_stream as xs
from xmc_stream.ppdsparse import solver as ppdsparse

BEFORE = {"_MORE_EPOCHS": 1, "_NEAR": -0.01, "_GROWTH": 1}


def measure(folder: Path, name: str, model: Path, max_rounds: int | None, rules: dict[str, float]) -> None:
    """Train under some rules of a round, evaluate, print."""
    train, test = folder / f"{name}.xmc", folder / f"{name}-test.xmc"
    with contextlib.ExitStack() as patches:
        for rule, value in rules.items():
            patches.enter_context(mock.patch.object(ppdsparse, rule, value))
        clf = xs.PPDSparse(max_rounds=max_rounds, memory_limit="4GB", progress=False)
        began, worked = time.perf_counter(), time.process_time()
        clf.fit(xs.open_dataset(train), model=model, overwrite=True)
        seconds, worked = time.perf_counter() - began, time.process_time() - worked
    report: dict[str, Any] = clf.report_
    figures = xs.evaluate(model, xs.open_dataset(test)) if test.exists() else {}
    precision = " ".join(f"{figures[key]:5.2f}" for key in ("P@1", "P@3", "P@5") if key in figures)
    kind = f"{max_rounds} rounds" if max_rounds else "before" if rules == BEFORE else "since"
    print(
        f"{name:18} {kind:8} {report['passes']:6g} {seconds:7.1f} {worked:7.1f} {report['bytes_gathered'] / 1e6:11.1f} "
        f"{report['violation']:9.4f}  {precision}",
        flush=True,
    )


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("names", nargs=-1, required=True)
@click.option("--scratch", type=click.Path(path_type=Path), help="Folder of the models; FOLDER if not given.")
@click.option("--epochs", type=int)
@click.option("--near", type=float)
@click.option("--growth", type=int)
def main(
    folder: Path, names: tuple[str, ...], scratch: Path | None, epochs: int | None, near: float | None,
    growth: int | None,
) -> None:  # fmt: skip
    rules = {"_MORE_EPOCHS": epochs, "_NEAR": near, "_GROWTH": growth}
    chosen = {rule: value for rule, value in rules.items() if value is not None}
    print(machine())
    print(
        f"{'set':18} {'':8} {'passes':>6} {'s':>7} {'cpu s':>7} {'MB gathered':>11} {'violation':>9}   P@1   P@3   P@5"
    )
    model = (scratch or folder) / f"passes-{names[0]}.model"
    for name in names:
        measure(folder, name, model, 3, {})
        measure(folder, name, model, None, BEFORE)
        measure(folder, name, model, None, chosen)


if __name__ == "__main__":
    main()
