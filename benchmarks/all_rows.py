"""Classes that begin with all rows against those that begin with few: time, gap and accuracy of trainings by the defaults.

    XMC_STREAM_DATA=... python benchmarks/all_rows.py FOLDER [SET ...] --repeats 3

Both ways take turns. Seconds are of the whole `train` command by the clock, medians. The share is that of the first active
sets in all pairs of a row and a label.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from commands import converted, machine, run

from xmc_stream.ppdsparse.solver import start_sizes
from xmc_stream.store.dataset import Dataset

SETS = ("rcv1_topics", "delicious", "stackex_cooking", "bibtex", "corel5k", "20news_bydate", "mnist", "udhr_langid")


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.argument("sets", nargs=-1)
@click.option("--repeats", default=3, show_default=True)
@click.option("--memory-limit", default="1GB", show_default=True)
@click.option("--threads", default=1, show_default=True)
def main(folder: Path, sets: tuple[str, ...], repeats: int, memory_limit: str, threads: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{machine()}; {threads} threads, {memory_limit}; medians of {repeats}")
    head = ("set", "labels", "share", "all_rows", "s", "rounds", "mean gap", "P@1", "P@3", "P@5")
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for name in sets or SETS:
        train, test = converted(folder, name)
        data = Dataset(train)
        seconds: dict[str, list[float]] = {"false": [], "true": []}
        reports: dict[str, dict[str, Any]] = {}
        counts = data.label_counts()
        share = np.count_nonzero(counts) * data.n_samples / (counts + start_sizes(counts, data.n_samples)).sum()
        options = ("--memory-limit", memory_limit, "--threads", threads, "--quiet")
        for _ in range(repeats + 1):  # the first loads kernels and data
            for said, took in seconds.items():
                began = time.perf_counter()
                reports[said] = run(
                    "train", train, folder / f"{said}.model", *options, "--set", f"all_rows={said}", "--overwrite"
                )  # fmt: skip
                took.append(time.perf_counter() - began)
        for said, report in reports.items():
            figures = run("evaluate", folder / f"{said}.model", test, "--memory-limit", memory_limit, "--quiet")
            of_k = " | ".join(f"{figures[f'P@{k}']:.2f}" for k in (1, 3, 5))
            print(
                f"| {name} | {data.n_labels} | 1/{share:.0f} | {said} | {statistics.median(seconds[said][1:]):.2f} | "
                f"{report['rounds']} | {report['duality_gap_mean']:.1e} | {of_k} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
