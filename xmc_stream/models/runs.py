"""What predictions and evaluations have in common, whatever the kind of model: their jobs, their runs, their forecasts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xmc_stream.models.counts import COUNT_BYTES
from xmc_stream.models.decisions import BEST_LABEL, Decision
from xmc_stream.models.ranking import check_features, check_labels
from xmc_stream.runtime.job import Job, Loop, Receipt
from xmc_stream.runtime.plan import MIB, Forecaster, MemoryPlan
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.model import StoredModel
from xmc_stream.store.predictions import load_library

PREDICTING = "ranking labels"  # in words, for those who watch
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

    @property
    def key(self) -> str:
        """The rows."""
        return f"metrics/{self.start}-{self.stop}"


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
