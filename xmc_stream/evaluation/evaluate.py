"""Metrics of stored predictions, or of a model, which then gives those that need every score too."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.arguments import native, native_arguments
from xmc_stream.convert.formats.predicted import Rankings, open_predictions
from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.metrics import (
    PROPENSITY_PRESETS,
    RankingMetrics,
    inverse_propensity,
    leave_out_labels,
    leave_out_predictions,
)
from xmc_stream.models import Execution, Model, answer, load_model, stored_filter
from xmc_stream.models.decisions import Decision
from xmc_stream.models.held import check_k
from xmc_stream.models.runs import Wanted
from xmc_stream.runtime.check import checked_reading
from xmc_stream.runtime.plan import Needs
from xmc_stream.store.dataset import Dataset, as_dataset
from xmc_stream.store.matrix import SparseMatrix, stream, stream_bytes
from xmc_stream.store.model import is_model
from xmc_stream.store.predictions import CHUNK_ROWS, Predictions, finish_predictions
from xmc_stream.store.remote import as_path
from xmc_stream.system.files import temporary_folder
from xmc_stream.system.memory import MemoryLimit, grown, least_limit, resident
from xmc_stream.system.progress import current, working

COMPARING = "evaluating predictions"
_PREDICTED = 0.8  # of evaluating a model, that predicting takes
_PAIR_BYTES = 2**20  # of the true labels, and of the filter, that are compared at a time
_PAIR_WORK = 16  # times as much is what is made of them
_RANK_BYTES = 88  # of a row and rank: label and score as they are read and ranked, terms of the metrics
_LABEL_BYTES = 48  # of a label: its count and inverse propensity, and what is made on the way


@native_arguments
def evaluate(
    predictions: Model | str | Path,
    data: Dataset | str | Path,
    train: Dataset | str | Path | None = None,
    ks: Sequence[int] = (1, 3, 5),
    propensity: tuple[float, float] | str = "default",
    *,
    filter: str | Path | None = None,
    threshold: float | None = None,
    check: bool = True,
    memory_limit: str | int | None = None,
    threads: int | None = None,
    scheduler: Any = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Compare predictions with the true labels, by rows, in bounded memory.

    With h_r = 1 where the label of rank r is true, and y the set of a row's true labels, the means over all rows of

        P@k      (1/k) sum_{r<=k} h_r
        nDCG@k   sum_{r<=k} h_r / log2(r + 1)  divided by  sum_{r<=min(k,|y|)} 1 / log2(r + 1)
        R@k      sum_{r<=k} h_r / max(|y|, 1)

    PSP@k and PSnDCG@k weigh a true label by 1/p = 1 + (ln N - 1) (B + 1)^A (n + B)^-A, where n of the N training rows
    have it. They are divided by what the best possible ranking has.

    Parameters
    ----------
    predictions : str, Path or Model
        What `predict` wrote, in any of its forms, or another program in one of them; or a model, which then predicts
        first. Labels are ranked by their scores, equal scores as they stand. Names of labels in a .jsonl file are those
        of `data`.
    data : Dataset, str or Path
        The samples with their true labels.
    train : Dataset, str, Path or None, default None
        The training set, for PSP@k and PSnDCG@k. None: without these.
    ks : sequence of int, default (1, 3, 5)
        The values of k, distinct and from 1 on.
    propensity : tuple (float, float) or str, default "default"
        A and B, or "default" (0.55, 1.5), "amazon" (0.6, 2.6) or "wikipedia" (0.5, 0.4).
    filter : str, Path or None, default None
        A file of lines `row label`, counted from zero. These pairs are taken out of the predictions, where the
        following ones move up, and out of the true labels.
    threshold : float or None, default None
        Of a model: a label counts as predicted where its score is higher. None: the model decides, as `predict` of the
        estimators does (`Model.decision`): by the best label where every training row has one, else by a threshold.
    check : bool, default True
        Compare a model with its checksums first, and the data as they are read.
    memory_limit : str, int or None, default None
        Peak resident memory of the process, as "4GB" or in bytes. On a cluster: of each worker. None: what it holds,
        and three quarters of what is free.
    threads : int or None, default None
        Threads of this process, from 1 on. None: as many as it has processors.
    scheduler : dask client, str or None, default None
        A client of dask.distributed, or the address of a scheduler, to run the jobs there. Temporary files of a model's
        evaluation lie beside the model, or where that is behind a URL or cannot be written to, beside `data` or in the
        current folder, which all workers must share. None: this process.
    progress : bool, default False
        Show a bar on stderr, where that is a terminal.

    Returns
    -------
    dict
        n_samples; P@k, nDCG@k, R@k, and with `train` PSP@k and PSnDCG@k for each k, in per cent. Of a model also
        average_auc (the mean over the rows, ties count 1/2, 0 for rows without true or without other labels; of label
        trees only by `Model.with_beam(None)` and one tree) and
        hamming_loss as fractions, macro_F1 (over all labels) and macro_F1_present (over those with a true row) in per
        cent. These four have the labels' own scores, the others those that implied labels are lifted to (PPDSparse).

    Raises
    ------
    InputError
        Rows do not match, k is larger than what was predicted, or the filter leaves fewer than k predictions. A
        predicted label is none of `data` or stands twice in a row, or its score is nan.
    StoreError
        The model or the predictions are damaged.
    MemoryLimitError
        The memory limit cannot work, or was nearly reached.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
    >>> X = sp.csr_matrix(np.repeat(np.eye(3, dtype=np.float32), 10, axis=0))  # row i has label i // 10
    >>> data = xs.convert(X, "evaluate.xmc", labels=X)
    >>> _ = xs.PPDSparse().fit(data, model="evaluate.model")
    >>> report = xs.evaluate("evaluate.model", data, ks=(1,))
    >>> report["P@1"], report["average_auc"]
    (100.0, 1.0)
    """
    if data is None:
        raise InputError("evaluating needs the samples with their true labels: give them as data=")
    dataset, train = as_dataset(data), None if train is None else as_dataset(train)
    given = predictions if isinstance(predictions, Model) else as_path(predictions)
    execution = Execution(memory_limit, threads, scheduler, progress)
    if isinstance(ks, Iterable):  # else it is refused with what else cannot be
        ks = tuple(map(native, ks))
    return evaluate_with(given, dataset, train, ks, propensity, execution, filter, threshold, check)


def evaluate_with(
    given: Model | Path,
    dataset: Dataset,
    train: Dataset | None,
    ks: Sequence[int],
    propensity: tuple[float, float] | str,
    execution: Execution,
    filter: str | Path | None = None,
    threshold: float | None = None,
    check: bool = True,
) -> dict[str, Any]:
    """Compare a model, or what lies at a path, with the true labels: see `evaluate`."""
    path = given.path if isinstance(given, Model) else given
    if threshold is not None and not (isinstance(threshold, int | float) and abs(threshold) <= sys.float_info.max):
        raise InputError(f"threshold must be a finite number. Got {threshold!r:.100}.")
    shared = execution.scratch(path, dataset.path) if is_model(path) else None
    limit = execution.limit([path, dataset.path], [shared] if shared else [])
    pair = _propensity(propensity)
    if train is not None and train.n_labels != dataset.n_labels:
        raise InputError(
            f"{train.path} has {train.n_labels} labels and {dataset.path} has {dataset.n_labels}: "
            "convert the test set with " + flags.LIKE + " and the training set"
        )
    RankingMetrics(ks)  # refuses what cannot be
    with (
        working("evaluate", execution.progress) as bar,
        checked_reading(*(of.path for of in (dataset, train) if of is not None), check=check),
        temporary_folder(shared) as scratch,
        stored_filter(filter, scratch, dataset.n_samples, dataset.n_labels, limit) as filtered,
    ):
        of_labels: dict[str, Any] = {}
        if is_model(path):
            model = given.reopened() if isinstance(given, Model) else load_model(path)
            path = scratch / "predictions"
            check_k(model, max(ks))
            decision = model.decision if threshold is None else Decision(threshold)
            wanted, beside = Wanted(path, filtered, decision, scratch), comparing(max(ks), dataset, train)
            with bar.part(0.0, _PREDICTED):
                work, of_labels, _ = answer(model, dataset, max(ks), wanted, execution, limit, check, beside)
            finish_predictions(work, path, {}, False)
            stored: Rankings = Predictions(path)
        else:
            stored = ranked = open_predictions(path, dataset.n_labels, dataset.label_names())
            limit.check(comparing_needs(stored.k, dataset, train) | ranked.needs, COMPARING)
        if stored.n_samples != dataset.n_samples:
            raise InputError(
                f"{path} has {stored.n_samples} rows and {dataset.path} has {dataset.n_samples}: they do not match"
            )
        weights = None
        if train is not None:
            weights = inverse_propensity(train.label_counts(), train.n_samples, *pair)
        metrics = RankingMetrics(ks, weights)
        pairs = SparseMatrix(filtered) if filtered else None
        with bar.part(_PREDICTED if of_labels else 0.0, 1.0):
            for labels, y_indptr, y_indices in _blocks(stored, dataset, pairs, max(ks)):
                metrics.update(labels, y_indptr, y_indices)
    return {"n_samples": dataset.n_samples, **metrics.result(), **of_labels}


def _propensity(propensity: tuple[float, float] | str) -> tuple[float, float]:
    """A and B. Raises InputError where there are none."""
    if isinstance(propensity, str):
        if propensity not in PROPENSITY_PRESETS:
            raise InputError(
                f"propensity {propensity!r} is unknown: give A,B or one of {', '.join(PROPENSITY_PRESETS)}"
            )
        propensity = PROPENSITY_PRESETS[propensity]
    try:
        a, b = map(float, propensity)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"propensity must be A and B, two numbers, or a name. Got {propensity!r:.100}.") from None
    return a, b


def plan_comparison(
    predictions: str | Path, dataset: Dataset, train: Dataset | None, execution: Execution
) -> dict[str, Any]:
    """What `evaluate` would do with stored predictions; keys as in `plan --json`."""
    limit = execution.limit()
    stored = open_predictions(Path(predictions), dataset.n_labels, dataset.label_names())
    n_bytes = stream_bytes([dataset.Y_rows()], [(0, dataset.n_samples)])
    needs = comparing_needs(stored.k, dataset, train) | stored.needs
    process = grown(resident())
    least = least_limit(lambda size: sum(needs.values()) <= MemoryLimit(size).budget(process))
    fits: dict[str, Any] = {"fits": True}
    try:
        limit.check(needs, COMPARING)
    except MemoryLimitError as error:
        fits = {"fits": False, "why": error.args[0]}
    parts = {"process": resident() + 8 * 2**20, **needs}
    parts["true labels"] = min(parts["true labels"], _PAIR_WORK * n_bytes)
    return {
        "command": "evaluate",
        **fits,
        "memory_limit": limit.limit,
        "passes": 1,
        "row_blocks": -(-stored.n_samples // CHUNK_ROWS),
        "bytes_read": n_bytes,
        "peak_rss": sum(parts.values()),
        "peak_phase": "evaluate",
        "peak_parts": parts,
        "seconds": round(0.5 + 5e-6 * stored.n_samples * stored.k, 1),
        "least_limit": least,
        "limit_for_fewest_passes": least,
        "threads": 1,
    }


def comparing_needs(k: int, dataset: Dataset, train: Dataset | None) -> dict[str, int]:
    """Bytes by component that comparing predictions with true labels takes. train: for propensities."""
    of_labels = 2 * _PAIR_WORK * dataset.Y_rows().block_bytes(_PAIR_BYTES)
    needs = {"predictions": _RANK_BYTES * k * CHUNK_ROWS, "true labels": of_labels}
    if train is None:
        return needs
    return {**needs, f"propensities of {train.n_labels} labels": _LABEL_BYTES * train.n_labels}


def comparing(k: int, dataset: Dataset, train: Dataset | None) -> dict[str, Needs]:
    """What an evaluation needs after the prediction by a model, see `Together`."""
    return {COMPARING: lambda _: comparing_needs(k, dataset, train)}


def _blocks(
    stored: Rankings, dataset: Dataset, filtered: SparseMatrix | None, depth: int
) -> Iterator[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
    """Predicted labels, and indptr and indices of the true ones, of consecutive rows, without filtered pairs.

    Raises InputError where that leaves fewer than `depth` predictions in a row and there may be more.
    """
    matrices = [dataset.Y_rows()] if filtered is None else [dataset.Y_rows(), filtered]
    bar = current()
    bar.phase("comparing with the true labels")
    for start, labels, _ in stored.blocks():
        for y, *pairs in stream(matrices, _PAIR_BYTES, start, start + len(labels)):
            mine = labels[y.start - start : y.start - start + y.n]
            y_indptr, y_indices = y.indptr, y.indices
            if pairs:
                y_indptr, y_indices = leave_out_labels(y_indptr, y_indices, pairs[0].indptr, pairs[0].indices)
                left = leave_out_predictions(mine, pairs[0].indptr, pairs[0].indices)
                _refuse_if_short(stored, mine, left, depth, dataset.n_labels, y.start)
                mine = left
            yield mine, y_indptr, y_indices
            bar.advance((y.start + y.n) / stored.n_samples)


def _refuse_if_short(
    stored: Rankings, labels: NDArray[Any], left: NDArray[Any], depth: int, n_labels: int, start: int
) -> None:
    """Raise InputError for rows that would have had `depth` labels left, had more been predicted."""
    if depth > stored.k or stored.k >= n_labels:
        return
    short = (labels[:, -1] >= 0) & (left[:, depth - 1] < 0)
    if short.any():
        most = int((left[short] < 0).sum(axis=1).max())
        raise InputError(
            f"row {start + int(np.argmax(short))} of {stored.path} has fewer than {depth} of its {stored.k} predictions "
            "left behind the filter: predict with "
            + flags.FILTER
            + ", or with "
            + flags.K
            + f" {min(depth + most, n_labels)} or more"
        )
