"""Predictions and figures by an `Execution`, which may cut small data into many blocks: what commands and users cannot ask."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xmc_stream.evaluation.evaluate import evaluate_with
from xmc_stream.models import Execution, Model
from xmc_stream.models.prediction import predict_to, predict_topk
from xmc_stream.store.dataset import Dataset


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
