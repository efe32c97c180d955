"""What predictions and evaluations have in common, whatever the kind of model: jobs, runs, forecasts, and what jobs share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.errors import InputError
from xmc_stream.kernels.blocks import Labels
from xmc_stream.kernels.calibration import NOT_CALIBRATED
from xmc_stream.models.calibration import UNCHANGED, Calibration
from xmc_stream.models.counts import COUNT_BYTES
from xmc_stream.models.decisions import BEST_LABEL, Decision
from xmc_stream.runtime.job import Job, Loop, Receipt
from xmc_stream.runtime.plan import MIB, Forecaster, MemoryPlan
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import Block, SparseMatrix
from xmc_stream.store.model import COMPACTED, StoredModel
from xmc_stream.store.names import SELECTED, selected_of
from xmc_stream.store.predictions import load_library

PREDICTING = "ranking labels"  # in words, for those who watch
RESULT_BYTES = 28  # of a row and rank: label and score, as they are found and as they are written
_START_SECONDS = 0.5  # of a prediction, about
HELD_ROWS = 4096  # that are ranked at a time by a model in memory
LEAST_BLOCK = MIB // 2  # bytes of X in a row block, at least
PAIRS = 24  # a block's pairs (of Y, of a filter) get such a part of what its X gets: what is made of them is many times larger


def least_block(dataset: Dataset, labels: bool) -> int:
    """Bytes of X in a row block, at least: of the longest row. labels: those of a row have their part of it."""
    least = dataset.X_rows().block_bytes(LEAST_BLOCK)
    return max(least, PAIRS * dataset.Y_rows().block_bytes(LEAST_BLOCK // PAIRS)) if labels else least


@dataclass(frozen=True)
class ToDisk:
    """What predictions to disk load before memory is planned: what `warm` loads, and the library that writes them."""

    warm: Job

    @property
    def key(self) -> str:
        """Never in a ledger."""
        return self.warm.key

    def run(self) -> Receipt:
        """Load."""
        load_library()
        return self.warm.run()


class CutIntoJobs:
    """A plan that has `rows_per_job`, whole chunks of the predictions."""

    rows_per_job: int

    def ranges(self, n_samples: int) -> list[tuple[int, int]]:
        """The rows of each job."""
        starts = range(0, n_samples, self.rows_per_job)
        return [(start, min(start + self.rows_per_job, n_samples)) for start in starts]


@dataclass(frozen=True)
class RankingJob:
    """Rows [start, stop): their k best classes, written to the predictions under construction at `out`.

    filtered: a matrix of (row, label) pairs that are not predicted, or nothing. raw: by the labels' own scores: before
    calibration, without implied labels.
    """

    model: str
    data: str
    start: int
    stop: int
    k: int
    out: str
    filtered: str
    raw: bool = field(default=False, kw_only=True)

    @property
    def key(self) -> str:
        """The rows."""
        return f"predict/{self.start}-{self.stop}"


@dataclass(frozen=True)
class CountingJob(RankingJob):
    """As a RankingJob, and counts for metrics, see `counts.read_counts`. A pair of `filtered` is not true."""

    decision: Decision = field(kw_only=True)
    counts: str = field(default="", kw_only=True)


@dataclass
class RankingRun(ABC):
    """The jobs of one prediction; with a folder for counts, of an evaluation."""

    model: StoredModel
    dataset: Dataset
    k: int
    out: Path
    plan: MemoryPlan
    filtered: str = ""
    decision: Decision = BEST_LABEL
    folder: Path | None = None
    raw: bool = field(default=False, kw_only=True)

    @property
    def of_labels(self) -> int:
        """Bytes of the counts over labels that each thread keeps."""
        return COUNT_BYTES * self.model.n_labels if self.folder else 0

    def counts(self, start: int) -> str:
        """The file for what an evaluation counts in the rows of a job."""
        return f"{self.folder}/counts-{start}"

    @abstractmethod
    def loop(self) -> Loop:
        """Phases of jobs; returns sums of a prediction, or the metrics of an evaluation."""


@dataclass(frozen=True)
class RankingForecaster(Forecaster):
    """See `Model.forecaster`."""

    model: StoredModel
    dataset: Dataset
    k: int
    evaluate: bool

    def __post_init__(self) -> None:
        check_features(self.model, self.dataset)
        if self.evaluate:
            check_labels(self.model, self.dataset)

    @property
    def of_labels(self) -> int:
        """Bytes of the counts over labels that each thread keeps."""
        return COUNT_BYTES * self.model.n_labels if self.evaluate else 0

    @abstractmethod
    def sizes(self, plan: MemoryPlan) -> Any:
        """How the work is cut. Raises MemoryLimitError where the smallest pieces do not fit."""

    def check(self, plan: MemoryPlan) -> None:
        """Whether the smallest pieces fit."""
        self.sizes(plan)

    @staticmethod
    def foreseen(row_blocks: int, n_bytes: int, parts: dict[str, int], seconds: float) -> dict[str, Any]:
        """One pass over the data, which streams n_bytes; parts: of the peak; seconds: without the start."""
        return {
            "passes": 1, "row_blocks": row_blocks, "bytes_read": n_bytes, "bytes_streamed": n_bytes, "bytes_gathered": 0,
            "peak_parts": parts, "seconds": round(seconds + _START_SECONDS, 1),
        }  # fmt: skip


def check_features(model: StoredModel, dataset: Dataset) -> None:
    """Raise InputError where the columns of a dataset are not those of the model."""
    of_data, of_model = (selected_of(store.attributes) for store in (dataset, model))
    if of_model is not None:
        other = of_data is not None and dataset.attributes[SELECTED] != model.attributes[SELECTED]
        if other or dataset.n_features != model.n_features:
            by = f" by `xmc-stream select-features DATA OUT --model {model.path}`"
            raise InputError(
                f"{model.path} needs its {model.n_features} selected features of {of_model}, and {dataset.path} has "
                f"{'others' if other else dataset.n_features}: select them"
                + (by if COMPACTED in model.attributes else " as those of its training set were selected")
            )
    elif of_data is not None:
        raise InputError(
            f"{dataset.path} has {dataset.n_features} selected features of {of_data}, and the model {model.path} needs all: "
            "give the dataset that it was made from, or, if this model selected them, what `xmc-stream compact` makes of it"
        )
    elif dataset.n_features != model.n_features:
        raise InputError(_mismatch(model, dataset, "features"))


def check_labels(model: StoredModel, dataset: Dataset) -> None:
    """Raise InputError where the labels of a dataset cannot be compared with the model's."""
    if dataset.n_labels != model.n_labels:
        raise InputError(_mismatch(model, dataset, "labels"))


def _mismatch(model: StoredModel, dataset: Dataset, what: str) -> str:
    of_data, of_model = (getattr(store, f"n_{what}") for store in (dataset, model))
    return (
        f"{dataset.path} has {of_data} {what} and the model {model.path} has {of_model}: convert the data again with "
        + flags.LIKE
        + " and the training set"
    )


def calibration_of(model: StoredModel, first: int, last: int, raw: bool = False) -> NDArray[np.float32]:
    """What scores of classes [first, last) are calibrated by; raw: not at all."""
    calibration = None if raw else Calibration.of(model.path, model.attributes)
    return NOT_CALIBRATED if calibration is None else calibration.by(model.label_counts(first, last))


def rescaling_of(model: StoredModel, first: int, last: int, raw: bool = False) -> NDArray[np.float32]:
    """The same for models without a bias of each class: labels without training rows score UNSEEN by it too."""
    by = calibration_of(model, first, last, raw)
    if by.shape[1] or not model.has_label_counts:
        return by
    counts = model.label_counts(first, last)
    return by if counts.all() else UNCHANGED.by(counts)


def no_predictions(n: int, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Labels and scores (n, k) before any class is seen."""
    return np.full((n, k), -1, np.int64), np.full((n, k), -np.inf, np.float32)


def filter_matrix(filtered: str) -> list[SparseMatrix]:
    """The pairs that are not predicted, if there are any."""
    return [SparseMatrix(filtered)] if filtered else []


def filter_pairs(blocks: list[Block]) -> Labels:
    """The pairs of a row block; empty without any."""
    return Labels.of(blocks[0]) if blocks else Labels(np.empty(0, np.int64), np.empty(0, np.int32))
