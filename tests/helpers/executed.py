"""Trainings, predictions and figures by an `Execution`, which may cut small data into many blocks.

No command and no function of the library takes such cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xmc_stream.evaluation.evaluate import evaluate_with
from xmc_stream.methods.contract import Task
from xmc_stream.methods.weights import Given
from xmc_stream.models import Execution, Model, as_model
from xmc_stream.models.prediction import predict_to, predict_topk
from xmc_stream.runtime.plan import Cuts
from xmc_stream.store.dataset import Dataset, as_dataset
from xmc_stream.training.train import train


def fit_cut(
    clf: Any, data: Any, model: Path, cuts: Cuts | None, warm_start: Any = None, sample_weight: Any = None
) -> Any:
    """As `Estimator.fit` with a dataset."""
    start = None if warm_start is None else as_model(warm_start)
    given = None if sample_weight is None else Given(np.asarray(sample_weight))
    task = Task(as_dataset(data), clf.parameters(), clf.seed, start, given=given)
    clf.model_, clf.report_ = train(task, model, Execution(clf.memory_limit, clf.threads, cuts=cuts))
    return clf


def ranked(model: Model, data: Any, k: int, execution: Execution) -> Any:
    """As `Model.predict_topk`."""
    return predict_topk(model, data, k, execution)


def predicted(model: Model, data: Dataset, out: Path, k: int, execution: Execution, **more: Any) -> dict[str, Any]:
    """As `xmc_stream.predict`."""
    return predict_to(model, data, out, k, execution, **more)


def evaluated(
    path: Path, data: Dataset, execution: Execution, train: Dataset | None = None, ks: Sequence[int] = (1, 3, 5)
) -> dict[str, Any]:
    """As `xmc_stream.evaluate`."""
    return evaluate_with(Path(path), data, train, ks, "default", execution)
