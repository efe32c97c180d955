"""A grid by `tune`, where settings begin from each other, beside as many trainings of their own: cost and figures.

    python benchmarks/tune.py FOLDER NAME ... --scratch FOLDER [--grid lam=0.01,0.1 --grid C=0.5,1,2]

FOLDER holds NAME.train.xmc, rows of length one. Every line is a setting, on nine tenths of the training rows (the split of
`tune`): figures of the tenth held out, passes over the data, bytes streamed and gathered. `cpu s`: processor seconds of
the whole commands, start and evaluation included, one thread: of `tune` all settings together, of the others `train` and
`evaluate` of each.
"""

from __future__ import annotations

import itertools
import resource
import shutil
from pathlib import Path
from typing import Any

import click
from commands import machine, run

FIGURES = ("P@1", "P@3", "P@5", "PSP@1", "PSP@5", "macro_F1")
COSTS = ("passes", "bytes_streamed", "bytes_gathered")


def timed(*arguments: Any) -> tuple[dict[str, Any], float]:
    """What a command prints, and its processor seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = run(*arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return report, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def alone(
    data: Path, held: Path, model: Path, words: list[str], limited: tuple[Any, ...]
) -> tuple[dict[str, Any], float]:
    """A training of its own, and its figures."""
    settings = [word for setting in words for word in ("--set", setting)]
    report, trained = timed("train", data, model, *settings, *limited, "--overwrite")
    figures, compared = timed("evaluate", model, held, "--train", data, *limited)
    shutil.rmtree(model)
    return {**report, "figures": figures}, trained + compared


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.argument("names", nargs=-1, required=True)
@click.option("--scratch", type=click.Path(path_type=Path), required=True)
@click.option("--grid", "grids", multiple=True, default=("lam=0.01,0.1", "C=0.5,1,2"), show_default=True)
@click.option("--limit", default="2GB", show_default=True)
def main(folder: Path, names: tuple[str, ...], scratch: Path, grids: tuple[str, ...], limit: str) -> None:
    print(machine())
    scratch.mkdir(parents=True, exist_ok=True)
    limited = ("--threads", 1, "--memory-limit", limit)
    options = [[f"{grid.partition('=')[0]}={value}" for value in grid.partition("=")[2].split(",")] for grid in grids]
    for name in names:
        data, parts = folder / f"{name}.train.xmc", [scratch / f"{name}.{part}.xmc" for part in ("part", "held")]
        if not parts[0].exists():
            run("split", data, *parts)
        together, seconds = timed(
            "tune",
            data,
            scratch / f"{name}.json",
            *(w for grid in grids for w in ("--grid", grid)),
            *limited,
            "--overwrite",
        )
        apart = 0.0
        sums = {which: dict.fromkeys(COSTS, 0.0) for which in ("tune", "alone")}
        rows = f"{together['n_train']:,} + {together['n_held_out']:,} rows"
        print(f"{name}: {rows}; {', '.join(FIGURES)}; passes, MB streamed, gathered")
        for words, mine in zip(itertools.product(*options), together["settings"], strict=True):
            own, took = alone(parts[0], parts[1], scratch / "m", list(words), limited)
            apart += took
            for which, report in (("tune", mine), ("alone", own)):
                figures = " / ".join(f"{report['figures'][key]:6.2f}" for key in FIGURES)
                costs = [report[key] for key in COSTS]
                sums[which] = {key: sums[which][key] + cost for key, cost in zip(COSTS, costs, strict=True)}
                print(
                    f"  {' '.join(words):16} {which:6} {figures}  {costs[0]:4.0f} {costs[1] / 1e6:7.1f} {costs[2] / 1e6:7.1f}"
                    f"  {report['nnz']:,} weights",
                    flush=True,
                )
        for which, took in (("tune", seconds), ("alone", apart)):
            total = [sums[which][key] for key in COSTS]
            print(
                f"  all {which:19} cpu s {took:7.1f}   passes {total[0]:4.0f}, MB {total[1] / 1e6:.1f} and {total[2] / 1e6:.1f}"
            )
        print(f"  share of the processor time {seconds / apart:.2f}", flush=True)


if __name__ == "__main__":
    main()
