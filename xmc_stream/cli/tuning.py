"""The command that chooses parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from xmc_stream.cli.options import SEED, SOLVER, STORE, TARGET, checked, common, executed, setting_of, show, value_of
from xmc_stream.errors import InputError
from xmc_stream.system.memory import format_size

_SHOWN = ("P@1", "P@3", "P@5", "nDCG@5", "PSP@1", "PSP@5", "macro_F1")


def _grid(words: tuple[str, ...]) -> dict[str, list[Any]] | None:
    """Values by name, of --grid options."""
    grid = {}
    for text in words:
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise InputError(f"--grid {text}: write it as name=value,value,..., for instance --grid lam=0.01,0.1")
        if name in grid:
            raise InputError(f"--grid {name} is given twice: write all its values behind one, separated by commas")
        grid[name] = [value_of(value) for value in values.split(",")]
    return grid or None


@click.command()
@click.argument("data", type=STORE)
@click.argument("out", type=TARGET, required=False)
@SOLVER
@click.option(
    "--grid", "grids", multiple=True, metavar="NAME=VALUE,...",
    help="Values of a parameter to try, e.g. lam=0.001,0.01,0.1; of several parameters all combinations. "
    "[default: the method's own, see docs/tuning.md]",
)  # fmt: skip
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="A parameter that is the same in all settings."
)
@click.option(
    "--metric", default="P@1", show_default=True,
    help="What is compared: P@k, nDCG@k, R@k, PSP@k, PSnDCG@k, average_auc, hamming_loss, macro_F1, macro_F1_present.",
)  # fmt: skip
@click.option(
    "--held-out", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=0.1, show_default=True,
    help="Share of the rows that no setting is trained on.",
)  # fmt: skip
@SEED
@click.option("--model", type=TARGET, metavar="MODEL", help="Train the best setting on all rows in the end.")
@click.option("--overwrite", is_flag=True, help="Replace OUT, MODEL, or an unfinished run of another grid.")
@click.option("--force", is_flag=True, help="Resume on another processor type or package versions.")
@checked("DATA")
@executed
@common
def tune(
    data: Path, out: Path | None, solver: str, grids: tuple[str, ...], settings: tuple[str, ...], metric: str,
    held_out: float, seed: int, model: Path | None, overwrite: bool, force: bool, check: bool, memory_limit: str | None,
    threads: int | None, scheduler: str | None, as_json: bool, debug: bool,
) -> None:  # fmt: skip
    """Compare settings of a method on rows held out of the dataset DATA, and say which is best.

    Every setting is trained without these rows. Where the method can (ppdsparse), settings share work: each begins from
    the weights of a neighbour. Settings of pdsparse and memoir are trained beside each other, on threads or workers. OUT is
    a file for the table, as JSON.

    A run that was killed goes on when the same command is given again; what it needs for that lies in OUT.partial, or
    without OUT in DATA.tune.partial in the current folder.
    """
    from xmc_stream.training.tune import tune as tune_settings

    work = None if out is not None else Path(f"{data.absolute().name}.tune.partial")
    report = tune_settings(
        data, solver, _grid(grids), fixed=dict(map(setting_of, settings)), metric=metric, held_out=held_out, seed=seed,
        out=out, work=work, model=model, memory_limit=memory_limit, threads=threads, scheduler=scheduler, overwrite=overwrite,
        force=force, check=check,
    )  # fmt: skip
    show(report, as_json, _lines(report))


def _lines(report: dict[str, Any]) -> list[str]:
    """The table, and what to do with it."""
    metric, settings = report["metric"], report["settings"]
    names = list(settings[0]["parameters"])
    shown = [metric, *(name for name in _SHOWN if name != metric and name in settings[0]["figures"])]
    rows = [["", *names, *shown, "weights", "size", "seconds"]]
    for i, one in enumerate(settings):
        rows.append([
            "*" if i == report["best"] else "",
            *(str(one["parameters"][name]) for name in names),
            *(f"{one['figures'][name]:.{4 if name in ('average_auc', 'hamming_loss') else 2}f}" for name in shown),
            f"{one['nnz']:,}", format_size(one["model_bytes"]), f"{one['seconds']:.1f}",
        ])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(word.rjust(width) for word, width in zip(row, widths, strict=True)) for row in rows]
    return [
        f"{report['n_train']:,} rows to train on, {report['n_held_out']:,} held out",
        *table,
        f"best by {metric}: {report['set']}",
        *([f"{report['model']}: trained with it on all rows"] if report["model"] else []),
        f"{report['seconds']:.1f} s, peak memory {format_size(report['peak_rss'])} of {format_size(report['memory_limit'])}",
    ]
