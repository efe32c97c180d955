"""Calibrating a finished model on rows that it has not seen: what is learned, and how, see `models.calibration`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from xmc_stream.arguments import native_arguments
from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.metrics import among
from xmc_stream.models import Execution, Model, answer, as_model
from xmc_stream.models.calibration import CANDIDATES, Candidates
from xmc_stream.models.calibration import calibrate as learn
from xmc_stream.models.runs import Wanted, check_labels
from xmc_stream.runtime.check import checked_reading
from xmc_stream.store.dataset import Dataset, as_dataset
from xmc_stream.store.matrix import stream
from xmc_stream.store.model import FRACTION
from xmc_stream.store.predictions import Predictions, finish_predictions
from xmc_stream.store.remote import local_path
from xmc_stream.system.files import temporary_folder
from xmc_stream.system.progress import working

CALIBRATING = "calibrating"
_LEAST_ROWS = 100
_MOST_ROWS = 1 << 15  # that are learned from: of more, evenly spaced ones
_CANDIDATE_BYTES = 160  # of a row's candidate: what is known of it, and what is made of that
_BLOCK_BYTES = 2**20  # of true labels that are compared at a time
_PAIR_WORK = 16  # times as much is what is made of them


@native_arguments
def calibrate(
    model: Model | str | Path,
    data: Dataset | str | Path,
    *,
    scores_of: Model | str | Path | None = None,
    check: bool = True,
    memory_limit: str | int | None = None,
    threads: int | None = None,
    scheduler: Any = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Learn from held-out rows how the scores of rare and frequent labels compare, and keep that with the model.

    With s the score of label l before, and n_l its training rows, the score becomes

        z = a_l s + b_l                     up to a cap c
        c + ln(n_l + 1) + (z - c) / 100     beyond it

    where a_l and b_l are linear in ln(n_l + 1). A label that is rarer than nearly all best labels of these rows counts
    as if it had as many training rows as the rarest of them. Labels without training rows come last. The calibration is
    applied from then on if, by these rows, it raises the mean of P@1, P@3 and P@5 by more than two standard errors.
    docs/calibration.md says more.

    Parameters
    ----------
    model : Model, str or Path
        The model to calibrate, or its path. Its files are changed.
    data : Dataset, str or Path
        Rows that the model was not trained on, 100 or more. Of more than 32,768, so many at most are used, evenly
        spaced.
    scores_of : Model, str, Path or None, default None
        A model of the same parameters that has not seen the rows, to take the scores of, where `model` has seen them.
        None: `model` itself.
    check : bool, default True
        Compare the model that scores with its checksums first, and the data as they are read.
    memory_limit : str, int or None, default None
        Peak resident memory of the process, as "4GB" or in bytes. On a cluster: of each worker. None: what it holds,
        and three quarters of what is free.
    threads : int or None, default None
        Threads of this process, from 1 on. None: as many as it has processors.
    scheduler : dask client, str or None, default None
        A client of dask.distributed, or the address of a scheduler, to run the jobs there. None: this process.
    progress : bool, default False
        Show a bar on stderr, where that is a terminal.

    Returns
    -------
    dict
        What is kept: applied (bool); slope and shift (two numbers each), least, fewest and cap, of the formula; rows
        (learned from); gain and standard_error of the mean of P@k in per cent; and P@1, P@3 and P@5, each before and
        after, where each half of the rows is scored by what the other half says.

    Raises
    ------
    InputError
        The rows are too few, do not match the model, or are those that it was trained on; or the two models differ.
    StoreError
        A model or the dataset cannot be opened, is damaged, or cannot be written.
    MemoryLimitError
        The memory limit cannot work.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
    >>> X = sp.csr_matrix(np.repeat(np.eye(3, dtype=np.float32), 50, axis=0))
    >>> model = xs.PPDSparse(C=10).fit(X[::5], X[::5]).model_
    >>> held_out = xs.convert(X, "held-out.xmc", labels=X)
    >>> about = xs.calibrate(model, held_out)
    >>> about["rows"], about["applied"]  # every row is right already
    (150, False)
    """
    opened = as_model(model)
    local_path(opened.path)  # whose files will be changed
    seen = opened if scores_of is None else as_model(scores_of)
    dataset = as_dataset(data)
    return calibrate_with(opened, dataset, seen, Execution(memory_limit, threads, scheduler, progress), check)


def calibrate_with(
    model: Model, dataset: Dataset, seen: Model, execution: Execution, check: bool = True, fraction: float | None = None
) -> dict[str, Any]:
    """Calibrate a model by what another one, or itself, says of rows that it has not seen: see `calibrate`.

    fraction: of the rows, that a training held out for this.
    """
    limit = execution.limit([model.path, seen.path, dataset.path], [model.path.parent])
    _refuse_unfit(model, seen, dataset)
    model.label_counts(0, 0)  # or there is no point in going on
    k = min(CANDIDATES, model.n_labels)
    if execution.scheduler is None:  # else the limit is that of workers
        limit.check(calibrating_needs(dataset, dataset.n_samples), CALIBRATING)
    with (
        working("calibrate", execution.progress),
        checked_reading(dataset.path, check=check),
        temporary_folder(model.path.absolute().parent) as folder,
    ):
        out = folder / "predictions"
        asked = seen, dataset, k, Wanted(out, raw=True)
        try:
            work, _, _ = answer(*asked, execution, limit, check, {})
        except MemoryLimitError:
            if execution.threads == 1 or execution.scheduler is not None:
                raise
            work, _, _ = answer(*asked, replace(execution, threads=1), limit, check, {})
        finish_predictions(work, out, {}, False)
        about = learn(_candidates(Predictions(out), dataset, seen))
    if fraction is not None:
        about[FRACTION] = fraction
    model.set_calibration(about)
    return about


def calibrating_needs(dataset: Dataset, n_rows: int) -> dict[str, int]:
    """Bytes by component that calibrating by so many of a dataset's rows takes, once these are predicted."""
    k, n_labels = min(CANDIDATES, dataset.n_labels), dataset.n_labels
    return {
        "candidates": _CANDIDATE_BYTES * min(n_rows, _MOST_ROWS) * k,
        "label counts": 16 * n_labels,
        "true labels": _PAIR_WORK * dataset.Y_rows().block_bytes(_BLOCK_BYTES),
    }


def uncalibrate(model: Model | str | Path) -> None:
    """Drop a model's calibration: its scores are again those that it was trained to.

    Parameters
    ----------
    model : Model, str or Path
        The model, or its path. Its files are changed. Without a calibration it stays as it is.

    Raises
    ------
    StoreError
        There is no model, or it cannot be written.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
    >>> X = sp.csr_matrix(np.repeat(np.eye(3, dtype=np.float32), 10, axis=0))  # row i has label i // 10
    >>> model = xs.PPDSparse(C=10).fit(X, X).model_
    >>> xs.uncalibrate(model)
    >>> model.calibrated
    False
    """
    as_model(model).set_calibration(None)


def _refuse_unfit(model: Model, seen: Model, dataset: Dataset) -> None:
    """Raise InputError where the rows say nothing about the model."""
    check_labels(model, dataset)
    made = [(m.shape, m.attributes["solver"], m.attributes["params"]) for m in (model, seen)]
    if made[0] != made[1]:
        raise InputError(
            f"{seen.path} is of another shape, solver or parameters than {model.path}: "
            "its scores say nothing about that model; train it with the same settings"
        )
    if dataset.fingerprint == seen.attributes["data"]["fingerprint"]:
        raise InputError(
            f"{seen.path} was trained on the rows of {dataset.path}, which it scores too well: "
            "give rows that were held out (xmc-stream split)"
        )
    refuse_few(dataset)


def refuse_few(dataset: Dataset) -> None:
    """Raise InputError where so few rows tell nothing."""
    if dataset.n_samples < _LEAST_ROWS:
        raise InputError(
            f"{dataset.path} has {dataset.n_samples} rows: calibration needs {_LEAST_ROWS} or more that are held out"
        )


def _candidates(stored: Predictions, dataset: Dataset, model: Model) -> Candidates:
    """Those of the rows that are learned from, in their order."""
    every = -(-stored.n_samples // _MOST_ROWS)
    counts = model.label_counts(0, model.n_labels)
    parts = []
    for start, labels, scores in stored.blocks():
        for (y,) in stream([dataset.Y_rows()], _BLOCK_BYTES, start, start + len(labels)):
            chosen = np.arange(-y.start % every, y.n, every)
            mine = y.start - start + chosen
            best = labels[mine].astype(np.int64)
            true = among(chosen[:, None], best, y.indptr, y.indices) & (counts[best] > 0)
            parts.append((best, scores[mine], counts[best], true))
    return Candidates(*(np.concatenate([part[i] for part in parts]) for i in range(4)))
