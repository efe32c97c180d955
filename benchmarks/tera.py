"""Large jobs with the label tree: make rows, convert, plan, train, predict and evaluate, each as a command, under one limit.

    python benchmarks/tera.py FOLDER --form seconds|million|tenth|whole|labels [--limit 4GB] [--threads 2]

FOLDER is for scratch, and a set that is there is used again. Rows are text in XMLRepo's format: words by Zipf's law, labels
that are the leaves of a tree (`make_synthetic.py --tree`). A line a command: seconds, peak resident memory, and what it says.
Of training: bytes read and the most that its work folder took on disk, each beside what `plan` foresaw. P@k stands beside the
best that the generator allows. Rows are also predicted one by one, for a minute at most. Ends with exit code 1 if a limit did
not hold.

seconds: to see that it runs. million: a million rows and labels. tenth: 6 million rows, 3 million features, a million labels.
whole: ten times as many rows, whose chunks are hard links to those of the tenth; it is planned, not run. labels: ten million.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import scipy.sparse as sp
from commands import machine, run
from watch import Watched, watch

import xmc_stream as xs
from xmc_stream.system.memory import format_size, parse_size

_ALONE, _SECONDS = 3_000, 60.0  # rows that are predicted one by one, at most, and the time for them
GENERATOR = Path(__file__).resolve().parent.parent / "tools" / "make_synthetic.py"


@dataclass(frozen=True)
class Form:
    """Sizes of a set; of_row: values and labels; times: how often the rows are repeated, if they are."""

    rows: int
    features: int
    labels: int
    limit: str
    of_row: tuple[int, int] = (60, 5)
    tested: int = 100_000
    times: int = 1


FORMS = {
    "seconds": Form(4_000, 20_000, 1_000, "1GB", tested=1_000),
    "million": Form(1_000_000, 500_000, 1_000_000, "4GB", (20, 5)),
    "tenth": Form(6_000_000, 3_000_000, 1_000_000, "4GB"),
    "whole": Form(6_000_000, 3_000_000, 1_000_000, "16GB", times=10),
    "labels": Form(12_000_000, 1_000_000, 10_000_000, "8GB", (20, 1)),
}


def generate(data: Path, form: Form) -> dict[str, Any]:
    """What the generator says."""
    shape = {"samples": form.rows, "features": form.features, "labels": form.labels, "test-samples": form.tested}
    if form.times > 1:
        del shape["samples"]
        shape |= {"size": 8 * form.rows * form.of_row[0], "logical": form.times}
    shape |= {"features-per-sample": form.of_row[0], "labels-per-sample": form.of_row[1], "tree": 3}
    options = [part for name, value in shape.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, str(GENERATOR), str(data), *options, "--json"]
    found: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return found


def disk(folder: Path) -> int:
    """Bytes that a folder takes."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # it has just gone
                total += os.stat(os.path.join(parent, name)).st_blocks * 512
    return total


class DiskPeak:
    """The most that a folder takes on disk, as long as the block lasts."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._ended, self.most = folder, threading.Event(), 0
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._ended.wait(1.0):
            self.most = max(self.most, disk(self._folder))

    def __enter__(self) -> DiskPeak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def one_by_one(model: Path, test: Path, limit: str) -> str:
    """What `predict_topk` takes for a row, from the first call on."""
    X, loaded = xs.open_dataset(test).X_rows(), xs.load_model(model)
    x, taken = X.block(0, min(_ALONE, X.n_lines)), list[float]()
    rows = sp.csr_matrix((x.values, x.indices, x.indptr), (x.n, X.shape[1]))
    ends = time.perf_counter() + _SECONDS
    while len(taken) < x.n and time.perf_counter() < ends:
        began = time.perf_counter()
        loaded.predict_topk(rows[len(taken)], 5, memory_limit=limit, threads=1)
        taken.append(1e3 * (time.perf_counter() - began))
    soon, later = taken[1:11] or taken, taken[len(taken) // 2 :]
    return (
        f"first call {taken[0]:.0f} ms, the ten after it {median(soon):.3g}; median of the last {len(later):,} of "
        f"{len(taken):,}: {median(later):.3g}"
    )


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--form", type=click.Choice(list(FORMS)), default="seconds", show_default=True)
@click.option("--limit", help="Instead of the form's own.")
@click.option("--threads", default=2, show_default=True)
@click.option("--keep", is_flag=True, help="Keep model and predictions.")
def main(folder: Path, form: str, limit: str | None, threads: int, keep: bool) -> None:
    of, kept = FORMS[form], True
    limit = limit or of.limit
    folder.mkdir(parents=True, exist_ok=True)
    data, best = folder / f"{form}.xmc", folder / f"{form}.json"
    test, model, found = (data.with_name(f"{form}{end}") for end in ("-test.xmc", ".model", ".predictions"))
    options = ("--memory-limit", limit, "--threads", threads)
    print(f"{machine()}; {form}: {of.rows * of.times:,} rows, {of.features:,} features, {of.labels:,} labels; {limit}")

    def line(what: str, done: Watched, said: str = "") -> None:
        nonlocal kept
        kept = kept and done.peak <= parse_size(limit)
        print(f"{what:9} {done.seconds:8.1f} s, peak {format_size(done.peak):>7}{'; ' * bool(said)}{said}", flush=True)

    if not best.exists():
        began = time.perf_counter()
        text = data if of.times > 1 else data.with_suffix(".txt")
        made = generate(text, of)
        print(f"{'generate':9} {time.perf_counter() - began:8.1f} s; {made['nnz_features']:,} values", flush=True)
        if of.times == 1:
            of_test = text.with_name(f"{form}-test.txt")
            line("convert", watch("convert", text, data, *options), format_size(disk(data)))
            watch("convert", of_test, test, "--like", data, *options)
            text.unlink()
            of_test.unlink()
        best.write_text(json.dumps(made["best"]))
    train = ("train", data, model, "--solver", "tree", *options)
    foreseen = run("plan", data, "--solver", "tree", *options)
    peak = sum(foreseen["peak_parts"].values())
    of_disk, of_read = foreseen["disk_bytes"], foreseen["bytes_read"]
    print(
        f"{'plan':9} {foreseen['seconds']:8.1f} s, peak {format_size(peak):>7}; {format_size(of_read)} read, "
        f"{format_size(of_disk)} of disk; least limit {format_size(foreseen['least_limit'])}",
        flush=True,
    )
    if of.times > 1:
        return
    for old in (model, found, model.with_name(f"{model.name}.partial")):
        shutil.rmtree(old, ignore_errors=True)
    with DiskPeak(model.with_name(f"{model.name}.partial")) as watched:
        done = watch(*train)
    figures = done.figures
    read = figures["bytes_read"]
    line(
        "train", done,
        f"{done.seconds / foreseen['seconds']:.2f} of what was foreseen; {format_size(read)} read ({read / of_read:.2f}), "
        f"{format_size(watched.most)} of disk ({watched.most / of_disk:.2f}), {format_size(done.from_disk)} from the disk; "
        f"{figures['nnz']:,} weights, model {format_size(disk(model))}",
    )  # fmt: skip
    done = watch("predict", model, test, found, *options)
    line("predict", done, f"{done.figures['ms_per_sample']:.3g} ms a row")
    print(f"{'one row':9} {one_by_one(model, test, limit)}", flush=True)
    done = watch("evaluate", found, test, "--train", data, *options)
    allowed = json.loads(best.read_text())
    line(
        "evaluate", done, ", ".join(f"{name} {done.figures[name]:.2f} of {most:.2f}" for name, most in allowed.items())
    )
    if not keep:
        shutil.rmtree(model)
        shutil.rmtree(found)
    if not kept:
        sys.exit("a limit did not hold")


if __name__ == "__main__":
    main()
