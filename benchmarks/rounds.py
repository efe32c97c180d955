"""Rounds beyond those of all classes, and warm starts: objective, P@k and processor seconds against a cold run of three rounds.

    python benchmarks/rounds.py FOLDER bibtex rcv1_topics ... --scratch FOLDER

FOLDER holds NAME.xmc and NAME-test.xmc, rows of length one. For each set and C = 1, 2: three rounds and no more, and the
defaults. Then warm starts, each beside its cold run: C 1 -> 2, the same C, lam 0.01 -> 0.03, and from a tenth of the
rows less (its classes by `split`). Processor seconds of one thread: other work on the machine disturbs them less.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
from commands import machine

import xmc_stream as xs
from xmc_stream.datasets.split import split


def measure(
    name: str, kind: str, data: Path, test: xs.Dataset, model: Path, start: Path | None = None, **more: Any
) -> None:
    """Train, evaluate, print a line."""
    clf = xs.PPDSparse(threads=1, memory_limit="4GB", **more)
    began = time.process_time()
    clf.fit(xs.open_dataset(data), model=model, overwrite=True, warm_start=start)
    seconds = time.process_time() - began
    report, figures = clf.report_, xs.evaluate(model, test)
    precision = " / ".join(f"{figures[key]:5.2f}" for key in ("P@1", "P@3", "P@5"))
    print(
        f"{name:18} {kind:24} {seconds:7.1f} {report['rounds']:6} {report['passes']:6g} {report['objective']:12.1f} "
        f"{report['duality_gap_mean']:8.4f}  {precision}",
        flush=True,
    )


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.argument("names", nargs=-1, required=True)
@click.option("--scratch", type=click.Path(path_type=Path), help="Folder of the models; FOLDER if not given.")
def main(folder: Path, names: tuple[str, ...], scratch: Path | None) -> None:
    scratch = scratch or folder
    print(machine())
    print(f"{'set':18} {'run':24} {'cpu s':>7} {'rounds':>6} {'passes':>6} {'objective':>12} {'gap':>8}  P@1, P@3, P@5")
    for name in names:
        data, test = folder / f"{name}.xmc", xs.open_dataset(folder / f"{name}-test.xmc")
        models = {key: scratch / f"{name}-{key}.model" for key in ("1", "2", "other", "most", "warm")}
        for C in (1.0, 2.0):
            measure(name, f"C {C:g}, three rounds", data, test, models["other"], C=C, max_rounds=3)
            measure(name, f"C {C:g}", data, test, models[f"{C:g}"], C=C)
        measure(name, "C 2, warm from C 1", data, test, models["warm"], models["1"], C=2.0)
        measure(name, "C 1, warm from C 1", data, test, models["warm"], models["1"])
        measure(name, "lam 0.03", data, test, models["other"], lam=0.03)
        measure(name, "lam 0.03, warm from 0.01", data, test, models["warm"], models["1"], lam=0.03)
        nine, tenth = scratch / f"{name}-9.xmc", scratch / f"{name}-1.xmc"
        if not nine.exists():
            split(data, nine, tenth, fraction=0.1)
        measure(name, "nine tenths of the rows", nine, test, models["most"])
        measure(name, "all, warm from these", data, test, models["warm"], models["most"])


if __name__ == "__main__":
    main()
