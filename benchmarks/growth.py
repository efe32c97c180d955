"""How training time, prediction time and model size grow with the labels K and the rows N, on synthetic data.

    python benchmarks/growth.py FOLDER [--quick]

FOLDER is for scratch. K: 1k, 4k, 16k, 64k labels of the same number of rows, with as many features and labels a row. N: rows
in fourfold steps, of the same number of labels; the rows of a smaller set begin the larger one. PPDSparse with its defaults
on one thread, in one process that has loaded its kernels. Exponents are slopes of least squares through the logarithms:
seconds of the processor ~ K^e. --quick: smaller sets, a minute or two, to see that it runs.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from commands import machine

import xmc_stream as xs

GENERATOR = Path(__file__).resolve().parent.parent / "tools" / "make_synthetic.py"
LIMIT = "2GB"
SEED = 0
PER_ROW = ["--features-per-sample", "40", "--labels-per-sample", "3"]


@dataclass(frozen=True)
class Sizes:
    """labels, rows: those that are varied; at_rows, at_labels: what is fixed meanwhile; rows to predict."""

    labels: tuple[int, ...]
    rows: tuple[int, ...]
    at_rows: int
    at_labels: int
    features: int
    predicted: int


FULL = Sizes((1_000, 4_000, 16_000, 64_000), (8_000, 32_000, 128_000, 512_000), 16_000, 2_000, 20_000, 8_000)
QUICK = Sizes((250, 1_000, 4_000), (1_000, 4_000, 16_000), 2_000, 500, 2_000, 2_000)


@dataclass(frozen=True)
class Point:
    """One training: seconds of the processor, milliseconds of it a predicted row, megabytes on disk, weights, P@1."""

    n_rows: int
    n_labels: int
    seconds: float
    ms: float
    megabytes: float
    weights: int
    precision: float


def measure(folder: Path, sizes: Sizes, n_rows: int, n_labels: int) -> Point:
    """Make the data, train, predict the test rows."""
    train = folder / f"{n_rows}x{n_labels}.xmc"
    shape = ["--samples", n_rows, "--features", sizes.features, "--labels", n_labels, "--test-samples", sizes.predicted]
    command = [sys.executable, GENERATOR, train, *shape, *PER_ROW, "--seed", SEED, "--overwrite"]
    subprocess.run([*map(str, command)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    test = xs.open_dataset(train.with_name(f"{train.stem}-test.xmc"))
    model_path, out = folder / f"{train.stem}.model", folder / f"{train.stem}.predictions"
    learner = xs.PPDSparse(memory_limit=LIMIT, threads=1, seed=SEED, progress=False)
    began = time.process_time()
    model = learner.fit(xs.open_dataset(train), model=model_path, overwrite=True).model_
    trained = time.process_time()
    xs.predict(model, test, out, k=5, memory_limit=LIMIT, threads=1, overwrite=True)
    predicted = time.process_time()
    figures = xs.evaluate(out, test, ks=(1,))
    n_bytes = sum(file.stat().st_size for file in model_path.rglob("*") if file.is_file())
    return Point(
        n_rows, n_labels, trained - began, 1000 * (predicted - trained) / sizes.predicted, n_bytes / 1e6, model.nnz,
        figures["P@1"],
    )  # fmt: skip


def exponents(sizes: list[int], points: list[Point]) -> list[float]:
    """Of seconds, milliseconds a row and megabytes, in what is varied."""
    values = np.array([(point.seconds, point.ms, point.megabytes) for point in points])
    return [float(slope) for slope in np.polyfit(np.log(sizes), np.log(values), 1)[0]]


def show(name: str, sizes: list[int], points: list[Point]) -> None:
    """A row of the table for each point, and one of exponents."""
    for point in points:
        print(
            f"| {name} | {point.n_rows:,} | {point.n_labels:,} | {point.seconds:.1f} | {point.ms:.4f} | "
            f"{point.megabytes:.2f} | {point.weights:,} | {point.precision:.1f} |",
            flush=True,
        )
    seconds, ms, megabytes = exponents(sizes, points)
    print(f"| exponent in {name} | | | {seconds:.2f} | {ms:.2f} | {megabytes:.2f} | | |", flush=True)


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--quick", is_flag=True, help="Smaller sets.")
def main(folder: Path, quick: bool) -> None:
    sizes = QUICK if quick else FULL
    folder.mkdir(parents=True, exist_ok=True)
    print(machine())
    measure(folder, QUICK, QUICK.rows[0], QUICK.labels[0])  # loads the kernels
    measure(folder, QUICK, QUICK.rows[-1], QUICK.labels[-1])  # those of groups of labels too
    print("| varied | rows | labels | training, CPU s | prediction, CPU ms a row | model MB | weights | P@1 |")
    print("|---|---|---|---|---|---|---|---|")
    show("K", list(sizes.labels), [measure(folder, sizes, sizes.at_rows, n) for n in sizes.labels])
    show("N", list(sizes.rows), [measure(folder, sizes, n, sizes.at_labels) for n in sizes.rows])


if __name__ == "__main__":
    main()
