"""What predictions and evaluations have in common, whatever the kind of model: jobs, forecasts, counts and metrics of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.errors import InputError
from xmc_stream.kernels.blocks import Labels
from xmc_stream.kernels.calibration import NOT_CALIBRATED
from xmc_stream.kernels.csr import count_indices
from xmc_stream.kernels.metrics import fold_counts, sort_rows, take_positives
from xmc_stream.kernels.ranking import Ranking, fold_top_k
from xmc_stream.metrics import LabelMetrics, among, auc_units, average_auc, leave_out_labels
from xmc_stream.models.cache import drop_tiles
from xmc_stream.models.calibration import UNCHANGED, Calibration
from xmc_stream.models.decisions import BEST_LABEL, Decision
from xmc_stream.runtime.job import Job, Loop, Notes, Phase, Receipt, run_here
from xmc_stream.runtime.plan import MIB, Cuts, Forecaster, MemoryPlan
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import Block, SparseMatrix, stream
from xmc_stream.store.model import COMPACTED, StoredModel
from xmc_stream.store.names import SELECTED, selected_of
from xmc_stream.store.predictions import begin_predictions, write_predictions
from xmc_stream.system.stop import work_name

_LABELS = 1 << 16  # labels whose counts are written, and summed, at a time
COUNT_BYTES = 3 * 4  # of a label, in each thread
_LINE = np.dtype([("label", np.int64), ("counts", np.int32, 3)])  # of a file of counts
HITS, PREDICTED, TRUE = range(3)  # rows of a job's counts over labels
Tiles = Callable[[], Iterable[tuple[int, NDArray[np.float32]]]]
RESULT_BYTES = 28  # of a row and rank: label and score, as they are found and as they are written
_START_SECONDS = 0.5  # of a prediction, about
HELD_ROWS = 4096  # that are ranked at a time by a model in memory
LEAST_BLOCK = MIB // 2  # bytes of X in a row block, at least
PAIRS = 24  # a block's pairs (of Y, of a filter) get such a part of what its X gets: what is made of them is many times larger


@dataclass(frozen=True)
class RankingPlan(ABC):
    """How the work is cut. rows_per_job: whole chunks of the predictions."""

    rows_per_job: int

    def ranges(self, n_samples: int) -> list[tuple[int, int]]:
        """The rows of each job."""
        starts = range(0, n_samples, self.rows_per_job)
        return [(start, min(start + self.rows_per_job, n_samples)) for start in starts]

    @abstractmethod
    def blocks(self, matrices: list[SparseMatrix], start: int, stop: int) -> Iterator[tuple[range, tuple[Block, ...]]]:
        """Row blocks of rows [start, stop): which rows, and what each matrix has of them."""


@dataclass(frozen=True)
class StreamPlan(RankingPlan):
    """Row blocks of X stream by. rows: of a block, at most, 0 for any number; row_bytes: of its X."""

    rows: int
    row_bytes: int

    def blocks(self, matrices: list[SparseMatrix], start: int, stop: int) -> Iterator[tuple[range, tuple[Block, ...]]]:
        """As they stream: of X, which comes first, and of matrices of pairs."""
        most = [self.row_bytes] + [self.row_bytes // PAIRS] * (len(matrices) - 1)
        for blocks in stream(matrices, most, start, stop, self.rows):
            yield range(blocks[0].start, blocks[0].start + blocks[0].n), blocks

    def row_blocks(self, dataset: Dataset) -> int:
        """How many row blocks there are, about."""
        X = dataset.X_rows()
        of_job = min(self.rows_per_job, X.n_lines)
        n_bytes = int((X.nnz * X.entry_bytes / max(X.n_lines, 1) + 8) * of_job)
        by_rows = -(-of_job // self.rows) if self.rows else 1
        return len(self.ranges(X.n_lines)) * max(1, by_rows, -(-n_bytes // self.row_bytes))


@dataclass(frozen=True)
class Wanted:
    """What jobs are to find beside the k best classes, and where all of it goes.

    out: the predictions under construction. filtered: a matrix of (row, label) pairs that are not predicted, or "". folder:
    of an evaluation, for what its jobs count, see `read_counts`; a pair of `filtered` is not true there. decision:
    which labels an evaluation counts as predicted. raw: by the labels' own scores: before calibration, without implied labels.
    """

    out: Path
    filtered: str = ""
    decision: Decision = BEST_LABEL
    folder: Path | None = None
    raw: bool = False

    def counts(self, start: int) -> Path:
        """The file for what an evaluation counts in the rows of a job."""
        return Path(f"{self.folder}/counts-{start}")


@dataclass(frozen=True)
class RankingJob(ABC):
    """Rows [start, stop), row block by row block: their k best classes and, for an evaluation, counts."""

    model: str
    data: str
    k: int
    wanted: Wanted
    start: int
    stop: int
    sizes: RankingPlan

    @property
    def key(self) -> str:
        """The rows."""
        return f"{'metrics' if self.wanted.folder else 'predict'}/{self.start}-{self.stop}"

    def read(self, dataset: Dataset) -> list[SparseMatrix]:
        """What is read: X, and behind it, for an evaluation, Y."""
        return [dataset.X_rows(), *([dataset.Y_rows()] if self.wanted.folder else [])]

    @abstractmethod
    def opened(self) -> Any:
        """The model, as `fold` takes it."""

    @abstractmethod
    def fold(
        self, model: Any, rows: range, read: tuple[Block, ...], barred: Labels, best: Ranking, counts: NDArray[np.int32]
    ) -> int:
        """Fold a row block into predictions and, for an evaluation, into counts; returns the sum of its rows' AUC then.

        read: blocks of what is read; barred: pairs that are not predicted.
        """

    def fold_tiles(
        self, tiles: Tiles, y: tuple[Block, ...], barred: Labels, best: Ranking, counts: NDArray[np.int32]
    ) -> int:
        """As `fold`, from dense tiles of all scores, see `fold_metrics`. y: the block of Y, if it is an evaluation."""
        if y:
            return fold_metrics(tiles, y[0], barred, self.wanted.decision, best, counts)
        for low, tile in tiles():
            fold_top_k(tile, low, barred, *best)
        return 0

    def run(self) -> Receipt:
        """Predict, and count; the receipt has the sum of the rows' AUC, exactly, 0 for a prediction."""
        dataset, wanted, model = Dataset(self.data), self.wanted, self.opened()
        read, n_blocks, auc = self.read(dataset), 0, 0
        labels, scores = no_predictions(self.stop - self.start, self.k)
        counts = np.zeros((3, dataset.n_labels if wanted.folder else 0), np.int32)
        matrices = [*read, *([SparseMatrix(wanted.filtered)] if wanted.filtered else [])]
        for rows, blocks in self.sizes.blocks(matrices, self.start, self.stop):
            mine = slice(rows.start - self.start, rows.stop - self.start)
            best, barred = Ranking(labels[mine], scores[mine]), filter_pairs(blocks[len(read) :])
            auc += self.fold(model, rows, blocks[: len(read)], barred, best, counts)
            n_blocks += 1
        write_predictions(wanted.out, self.start, labels, scores)
        if wanted.folder:
            write_counts(wanted.counts(self.start), counts)
        return {"auc": auc, "bytes_read": sum(matrix.bytes_read for matrix in read), "row_blocks": n_blocks}


@dataclass(frozen=True)
class RankingTask(Forecaster):
    """A prediction or an evaluation, see `Model.ranking`: what it would do under a plan, and its jobs.

    once: runs a probe.
    """

    job: ClassVar[type[RankingJob]]

    model: StoredModel
    dataset: Dataset
    k: int
    filtered: bool = False
    evaluate: bool = False
    once: Callable[[Job], Receipt] = methodcaller("run")

    def __post_init__(self) -> None:
        check_features(self.model, self.dataset)
        if self.evaluate:
            check_labels(self.model, self.dataset)

    @property
    def unscored(self) -> str:
        """Of an evaluation, why not all classes have a score, so that there is no average_auc; "" where they have."""
        return ""

    @property
    def pairs(self) -> bool:
        """Whether rows have pairs beside X: of Y, or of a filter."""
        return self.filtered or self.evaluate

    @property
    def of_labels(self) -> int:
        """Bytes of the counts over labels that each thread keeps."""
        return COUNT_BYTES * self.model.n_labels if self.evaluate else 0

    @property
    def least_block(self) -> int:
        """Bytes of X in a row block, at least: of the longest row. Labels of a row have their part of it."""
        least = self.dataset.X_rows().block_bytes(LEAST_BLOCK)
        return max(least, PAIRS * self.dataset.Y_rows().block_bytes(LEAST_BLOCK // PAIRS)) if self.evaluate else least

    @abstractmethod
    def sizes(self, plan: MemoryPlan) -> Any:
        """How the work is cut, a `RankingPlan`. Raises MemoryLimitError where the smallest pieces do not fit."""

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

    def loop(self, plan: MemoryPlan, wanted: Wanted) -> Loop:
        """Phases of jobs; returns bytes and row blocks of a prediction, or the metrics of an evaluation."""
        return self.ranked(self.sizes(plan), wanted, 0.0)

    def ranked(self, sizes: RankingPlan, wanted: Wanted, begun: float, *more: Any) -> Loop:
        """The phase that ranks labels. begun: the part of the whole that is done; more: what else the jobs take."""
        drop_tiles()
        n, of = self.dataset.n_samples, (str(self.model.path), str(self.dataset.path), self.k, wanted)
        jobs = [self.job(*of, start, stop, sizes, *more) for start, stop in sizes.ranges(n)]
        name = "evaluate" if self.evaluate else "predict"
        receipts = yield Phase(name, jobs, "ranking labels", (begun, 1.0), twice=True)
        drop_tiles()
        if self.evaluate:
            return metrics_of(receipts, [wanted.counts(job.start) for job in jobs], n, self.model.n_labels)
        return {name: sum(receipt[name] for receipt in receipts) for name in ("bytes_read", "row_blocks")}


def rank_a_few(task: RankingTask, classes: int = 0) -> None:
    """Do a task on a few rows, to disk beside them: it loads kernels, and the library that writes predictions.

    classes: see `Cuts`.
    """
    dataset, folder = task.dataset, task.dataset.path.parent
    plan = MemoryPlan(2**40, 256 * MIB, 1, cuts=Cuts(classes))
    out = begin_predictions(folder / f"predictions-{task.evaluate}", dataset.n_samples, dataset.n_labels, task.k)
    run_here(task.loop(plan, Wanted(out, folder=folder if task.evaluate else None)), Notes())


def fold_metrics(
    tiles: Tiles, y: Block, pairs: Labels, decision: Decision, best: Ranking, counts: NDArray[np.int32]
) -> int:
    """Fold the scores of a row block into predictions and counts; returns the sum of its rows' AUC.

    tiles: makes the scores of all rows of the block by ranges of classes (first class, rows x classes), ascending; it is
    called twice: for the scores of true labels, and for how many exceed them. pairs: are not true and score -inf.
    """
    y_indptr, y_indices = y.indptr, y.indices
    if len(pairs.indptr):
        y_indptr, y_indices = leave_out_labels(y_indptr, y_indices, *pairs)
    positives = np.empty(len(y_indices), np.float32)
    for low, tile in tiles():
        take_positives(tile, low, y_indptr, y_indices, positives)
    count_indices(y_indices, counts[TRUE])
    count_indices(y_indices[positives > decision.above], counts[HITS])
    sort_rows(y_indptr, positives)
    above = np.zeros(y.n, np.int64)
    for low, tile in tiles():
        fold_top_k(tile, low, pairs, *best)  # which bars pairs in the tile
        fold_counts(tile, low, y_indptr, positives, decision.above, counts[PREDICTED], above)
    count_best(decision, best, (y_indptr, y_indices), counts)
    return auc_units(above, np.diff(y_indptr), counts.shape[1])


def count_best(
    decision: Decision, best: Ranking, y: tuple[NDArray[np.int64], NDArray[Any]], counts: NDArray[np.int32]
) -> None:
    """Count the best label of each row where it is predicted though it does not exceed the threshold."""
    if decision.best:
        labels, scores = best.labels[:, 0], best.scores[:, 0]
        low = (labels >= 0) & (scores <= decision.above)
        count_indices(labels[low], counts[PREDICTED])
        right = among(np.arange(len(labels)), labels, *y)
        count_indices(labels[low & right], counts[HITS])


def write_counts(path: Path, counts: NDArray[np.int32]) -> None:
    """Write the labels that some row of a job has or is predicted, ascending, each with its counts.

    Other labels are left out: a job meets few of many.
    """
    work = work_name(path)
    with open(work, "wb") as file:
        for first in range(0, counts.shape[1], _LABELS):
            part = counts[:, first : first + _LABELS]
            some = np.flatnonzero(part.any(axis=0))
            lines = np.empty(len(some), _LINE)
            lines["label"], lines["counts"] = first + some, part[:, some].T
            file.write(lines.data)
    work.replace(path)


def read_counts(path: Path, first: int, total: NDArray[np.int64]) -> None:
    """Add what a job wrote of labels first, first + 1, ... to total (3, n).

    Row HITS counts the rows in which a label is predicted and true, PREDICTED those in which it is predicted, TRUE those that
    have it.
    """
    if not path.stat().st_size:  # no file of nothing can be mapped
        return
    lines = np.memmap(path, _LINE, "r")
    low, high = (bisect_left(lines["label"], label) for label in (first, first + total.shape[1]))
    total[:, lines["label"][low:high] - first] += lines["counts"][low:high].T


def metrics_of(receipts: list[Receipt], counts: list[Path], n_samples: int, n_labels: int) -> Receipt:
    """The metrics of all jobs together, from their receipts and files of counts."""
    metrics = LabelMetrics()
    for first in range(0, n_labels, _LABELS):
        total = np.zeros((3, min(_LABELS, n_labels - first)), np.int64)
        for path in counts:
            read_counts(path, first, total)
        metrics.update(*total)
    auc = average_auc(sum(receipt["auc"] for receipt in receipts), n_samples)
    return {"average_auc": auc, **metrics.result(n_samples)}


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


def filter_pairs(blocks: tuple[Block, ...] = ()) -> Labels:
    """The pairs of a row block; empty without any."""
    return Labels.of(blocks[0]) if blocks else Labels(np.empty(0, np.int64), np.empty(0, np.int32))
