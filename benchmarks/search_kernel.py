"""Useful multiply-adds per second of the search kernel, beside what one core of the machine does at best.

    python benchmarks/search_kernel.py DATA.xmc FOLDER --repeats 5

Trains two rounds of PPDSparse into FOLDER if that is not there yet, then searches all rows for every unit of 1,024
classes with those weights, warm, on one core: exactly, and with weights of 16 bits. A multiply-add is useful where both
the value and the weight are stored: zeros of dense rows do not count. Beside it, in the same run: a float32 axpy over a
tile's width of scores that stay in the first-level cache, from a row of weights there and from rows all over a tile, and
the same adds scattered by index. Prints the median rate over the repeats.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import numba
import numpy as np
from commands import machine, run
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.calibration import NOT_CALIBRATED
from xmc_stream.kernels.ranking import Ranking
from xmc_stream.linear.kernels.guide import NO_GROUPS, no_terms
from xmc_stream.linear.kernels.scores import DENSE_SHARE, NO_BOUNDS, Tile, TileClasses, in_fours
from xmc_stream.linear.kernels.topk import top_k
from xmc_stream.linear.model import LinearModel
from xmc_stream.linear.tiles import make_tile
from xmc_stream.linear.weights import Unit, plain_units
from xmc_stream.ppdsparse.kernels.search import (
    NO_LOSS,
    SQUARED_HINGE,
    ActiveAhead,
    BestRows,
    LossSums,
    bias_losses,
    loss_grid,
    places,
    search,
)
from xmc_stream.ppdsparse.solver import added_sizes, start_sizes
from xmc_stream.store.dataset import Dataset, open_dataset
from xmc_stream.store.model import UNIT


@numba.njit(nogil=True)
def axpy(n: int, rows: NDArray[np.int64], weights: NDArray[np.float32], scores: NDArray[np.float32]) -> None:
    """Add n rows of weights, as listed, to the scores."""
    for i in range(n):
        x = np.float32(1.0 + 1e-6 * i)
        row = weights[rows[i & (len(rows) - 1)]]
        for c in range(len(scores)):
            scores[c] += x * row[c]


@numba.njit(nogil=True)
def scatter(n: int, slots: NDArray[np.uint16], weights: NDArray[np.float32], scores: NDArray[np.float32]) -> None:
    """Add n runs of weights to the scores that `slots` names."""
    for i in range(n):
        x = np.float32(1.0 + 1e-6 * i)
        for q in range(len(slots)):
            scores[slots[q]] += x * weights[q]


def machine_rates(rng: np.random.Generator, repeats: int) -> dict[str, float]:
    """Multiply-adds per second of the three loops."""
    n = 1 << 16
    tile = rng.random((4096, UNIT), np.float32)  # 16 MiB, as large as a unit's tile
    scores = np.zeros(UNIT, np.float32)
    near, far = np.zeros(1, np.int64), rng.permutation(len(tile))
    slots = np.sort(rng.permutation(UNIT)[: UNIT // DENSE_SHARE]).astype(np.uint16)
    cases: dict[str, tuple[Callable[[], None], int]] = {
        "contiguous axpy, weights in the first-level cache": (lambda: axpy(n, near, tile, scores), n * UNIT),
        "contiguous axpy, weights all over 16 MiB": (lambda: axpy(n, far, tile, scores), n * UNIT),
        "scatter, runs of 1/4 of the classes": (
            lambda: scatter(n, slots, tile[0, : len(slots)], scores),
            n * len(slots),
        ),
    }
    return {name: work / median_seconds(call, repeats) for name, (call, work) in cases.items()}


def median_seconds(call: Callable[[], Any], repeats: int) -> float:
    """The first call, which compiles and fills the caches, apart."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


class UnitSearch:
    """What a search of one unit over all rows needs, as a search job makes it; active sets left out."""

    def __init__(self, data: Dataset, model: LinearModel, unit: Unit) -> None:
        self.first, last = unit
        block = model.classes(self.first, last)
        whole, low, high = next(model.parts(self.first, last))  # the model's own unit, which may be wider than a tile
        bias = model.unit_array(whole)[low:high]
        self.counts = np.bincount(block.indices, minlength=data.n_features)
        self.tile, self.narrow = (
            make_tile(block.indptr, block.indices, values, bias, data.n_features, narrowed)
            for values, narrowed in ((block.values, False), (block.values.copy(), True))
        )
        n, self.width = last - self.first, len(self.tile.bias)
        self.slot_of = np.arange(n, dtype=np.int16)
        positives = data.label_counts()[self.first : last]
        active = positives + start_sizes(positives, data.n_samples)
        self.capacity = np.zeros(self.width, np.int64)
        self.capacity[:n] = added_sizes(active, 50, data.n_samples)
        of_slot = places(self.capacity, data.n_samples)
        self.best_end = np.cumsum(of_slot)
        self.best_begin = self.best_end - of_slot
        self.best_scores = np.empty(self.best_end[-1], np.float32)
        self.best_rows = np.empty(self.best_end[-1], np.int32)
        self.grid = loss_grid(data.n_samples)
        self.bias_loss = bias_losses(self.tile.bias, 0, self.grid)
        self.n = n

    def run(self, x: Any, y: Any, tile: Tile, loss: int) -> None:
        """Search."""
        threshold = np.full(self.width, np.inf, np.float32)
        threshold[: self.n] = -0.99
        none = np.zeros(self.width, np.int64)
        search(
            CSR.of(x), Labels.of(y), 0, self.first, self.slot_of, tile, ActiveAhead(none, none, np.empty(0, np.int32)),
            BestRows(
                self.capacity, self.best_begin, self.best_end, none.copy(), self.best_scores, self.best_rows, threshold
            ),
            LossSums(loss, self.grid, np.ones(self.width), self.bias_loss, np.zeros(self.width), np.empty(0)),
            in_fours(x.n, len(tile.start) - 1, len(x.indices)),
        )  # fmt: skip

    def rank(self, x: Any) -> None:
        """Top 5 of every row, which is scoring and little else."""
        labels, scores = np.full((x.n, 5), -1, np.int64), np.full((x.n, 5), -np.inf, np.float32)
        classes = TileClasses(
            self.first, self.n, self.tile, NOT_CALIBRATED, NO_GROUPS, NO_BOUNDS, np.empty(self.width, np.float32)
        )
        nothing = Labels(np.empty(0, np.int64), np.empty(0, np.int32))
        top_k(CSR.of(x), [classes], no_terms(x.n), Ranking(labels, scores), nothing)


@click.command()
@click.argument("data", type=click.Path(path_type=Path, exists=True))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--repeats", default=5, show_default=True)
def main(data: Path, folder: Path, repeats: int) -> None:
    path = folder / "two-rounds.model"
    if not path.exists():
        run("train", data, path, "--set", "max_rounds=2", "--set", "prune=0")
    dataset, model = open_dataset(data), LinearModel(path)
    x, y = dataset.X_rows().block(0, dataset.n_samples), dataset.Y_rows().block(0, dataset.n_samples)
    print(f"{machine()}; {data.name}, {model.attributes['nnz']:,} weights after two rounds; one core")
    for name, rate in machine_rates(np.random.default_rng(0), repeats).items():
        print(f"{name:50} {rate / 1e9:6.2f}e9 multiply-adds/s")
    useful = 0
    seconds = {"search": 0.0, "narrow search": 0.0, "top 5": 0.0}
    occurrences = dataset.feature_counts()
    for unit in plain_units(model.n_labels):
        piece = UnitSearch(dataset, model, unit)
        useful += int((occurrences * piece.counts).sum())
        for name, tile, loss in (("search", piece.tile, SQUARED_HINGE), ("narrow search", piece.narrow, NO_LOSS)):
            seconds[name] += median_seconds(partial(piece.run, x, y, tile, loss), repeats)
        seconds["top 5"] += median_seconds(partial(piece.rank, x), repeats)
    for name, took in seconds.items():
        print(
            f"{name + ', useful ones':50} {useful / took / 1e9:6.2f}e9 multiply-adds/s ({useful / 1e9:.2f}e9 in {took:.2f} s)"
        )
    print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
