"""A method of learning that the package does not know: what test_contract.py registers, also in processes of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from xmc_stream.linear.tiles import TileSizes
from xmc_stream.linear.weights import finalise_key, new_unit, plain_units, tiles_of, unit_path
from xmc_stream.methods.contract import Forecast, Method, Task
from xmc_stream.methods.parameters import Number, Parameters, parameter
from xmc_stream.methods.registry import register
from xmc_stream.runtime.job import Job, Ledger, Loop, Phase, Receipt
from xmc_stream.runtime.plan import MIB, Forecaster, MemoryPlan
from xmc_stream.store.dataset import Dataset, open_dataset
from xmc_stream.store.places import make_folder

SLOW = "XMC_STREAM_SLOW"  # seconds that a job takes beside its work


@dataclass(frozen=True)
class CentroidParameters(Parameters):
    """Of a class the mean of its rows, drawn towards 0."""

    solver = "centroid"
    label = "Centroid"
    title = "nearest centroid"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"half-centroid": {"shrink": 0.5}}

    shrink: float = parameter(0.0, Number("Part of a centroid that is taken away.", most=1.0))


@dataclass(frozen=True)
class CentroidJob:
    """Classes of a unit: w = centroid, bias = -|centroid|^2 / 2, so that the best score is the nearest centroid's."""

    data: str
    first: int
    last: int
    keep: float
    out: str

    @property
    def key(self) -> str:
        """The unit, as others name it."""
        return finalise_key(Path(self.out).name)

    def run(self) -> Receipt:
        """Write a unit of the model."""
        time.sleep(float(os.environ.get(SLOW, "0")))
        dataset = Dataset(self.data)
        X, Y = dataset.X_rows(), dataset.Y_columns().block(self.first, self.last)
        sizes = TileSizes(self.first, self.last, dataset.n_features)
        with new_unit(Path(self.out), dataset.n_features, self.last - self.first) as writer:
            for c in range(self.last - self.first):
                rows = Y.indices[Y.indptr[c] : Y.indptr[c + 1]].astype(np.int64)
                mean = np.zeros(dataset.n_features)
                if len(rows):
                    x = X.gather(rows)
                    np.add.at(mean, x.indices, x.values)
                    mean *= self.keep / len(rows)
                w = mean.astype(np.float32)
                features = np.flatnonzero(w).astype(np.int32)
                writer.weights.append(np.array([len(features)]), features, w[features])
                sizes.add(np.array([len(features)]), features)
                writer.bias[c] = -0.5 * float(w @ w)
            nnz = writer.weights.nnz
        return {"nnz": nnz, "tile_ranges": [astuple(span) for span in sizes.ranges], "bytes_read": X.bytes_read}


@dataclass
class CentroidRun:
    """A job a unit."""

    task: Task
    work: Path

    def loop(self) -> Loop:
        """One phase, which gathers rows."""
        dataset, p = self.task.dataset, self.task.parameters
        make_folder(self.work / "units")
        jobs = [
            CentroidJob(str(dataset.path), *unit, 1.0 - p.shrink, str(unit_path(self.work, unit)))
            for unit in plain_units(dataset.n_labels)
        ]
        receipts = yield Phase("centroids", jobs, unit="sweep", number=1, gathers=True)
        return {
            "rounds": 1,
            "nnz": sum(receipt["nnz"] for receipt in receipts),
            "tiles": tiles_of(receipts),
            "objective": 0.0,
            "duality_gap": 0.0,
        }


@dataclass(frozen=True)
class CentroidForecaster(Forecaster):
    """Without a probe."""

    dataset: Dataset

    def _needs(self) -> dict[str, int]:
        return {"a class": 40 * self.dataset.n_features + 8 * MIB}

    def check(self, plan: MemoryPlan) -> None:
        """A class fits."""
        plan.refuse_unless({name: plan.threads * size for name, size in self._needs().items()}, "centroids")

    def forecast(self, plan: MemoryPlan) -> Forecast:
        """A guess."""
        self.check(plan)
        n_bytes = 8 * self.dataset.X_rows().nnz
        return {
            "passes": 1,
            "bytes_read": n_bytes,
            "peak_phase": "centroids",
            "peak_parts": self._needs(),
            "seconds": 1.0,
        }


class CentroidMethod(Method):
    """Nearest centroids."""

    parameters = CentroidParameters
    reported = ("rounds",)

    def warm_up(self, task: Task) -> Job:
        """There are no kernels."""
        return Nothing()

    def forecaster(self, task: Task, plan: MemoryPlan, once: Callable[[Job], Receipt]) -> CentroidForecaster:
        """Without a probe."""
        return CentroidForecaster(task.dataset)

    def run(self, task: Task, work: Path, plan: MemoryPlan, ledger: Ledger, foreseen: Forecast) -> CentroidRun:
        """One phase."""
        return CentroidRun(task, work)

    def made_by(self, work: Path, folder: Path, warm_start: bool) -> str | None:
        """Units."""
        return finalise_key(folder.name) if folder.parent.name == "units" else None

    def summary(self, report: Mapping[str, Any]) -> list[str]:
        """In words."""
        return [f"{report['nnz']} weights of centroids"]


@dataclass(frozen=True)
class Nothing:
    """A job that does nothing."""

    key: str = "warm"

    def run(self) -> Receipt:
        """Nothing."""
        return {}


def centroids(data: Path) -> tuple[Any, Any]:
    """The plain NumPy twin: W (D x K) and bias, in memory."""
    dataset = open_dataset(data)
    x, y = dataset.X_rows().block(0, dataset.n_samples), dataset.Y_columns().block(0, dataset.n_labels)
    rows = np.repeat(np.arange(dataset.n_samples), np.diff(x.indptr))
    X = np.zeros((dataset.n_samples, dataset.n_features))
    X[rows, x.indices] = x.values
    W = np.zeros((dataset.n_features, dataset.n_labels))
    for c in range(dataset.n_labels):
        mine = y.indices[y.indptr[c] : y.indptr[c + 1]]
        if len(mine):
            W[:, c] = X[mine].mean(axis=0)
    return W, -0.5 * np.square(W).sum(axis=0)


def command(*words: str) -> None:
    """A command of xmc-stream that knows the method: for a process of its own."""
    from xmc_stream.cli import main

    register(CentroidMethod())
    main(list(words))
