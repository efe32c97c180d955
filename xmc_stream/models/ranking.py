"""What predicting with a model of any kind shares: pairs that are left out, calibration by class."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import Labels
from xmc_stream.kernels.calibration import NOT_CALIBRATED
from xmc_stream.models.calibration import Calibration
from xmc_stream.store.matrix import Block, SparseMatrix
from xmc_stream.store.model import StoredModel

RESULT_BYTES = 28  # of a row and rank: label and score, as they are found and as they are written


def calibration_of(model: StoredModel, first: int, last: int, raw: bool = False) -> NDArray[np.float32]:
    """What scores of classes [first, last) are calibrated by; raw: not at all."""
    calibration = None if raw else Calibration.of(model.path, model.attributes)
    return NOT_CALIBRATED if calibration is None else calibration.by(model.label_counts(first, last))


def no_predictions(n: int, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Labels and scores (n, k) before any class is seen."""
    return np.full((n, k), -1, np.int64), np.full((n, k), -np.inf, np.float32)


def filter_matrix(filtered: str) -> list[SparseMatrix]:
    """The pairs that are not predicted, if there are any."""
    return [SparseMatrix(filtered)] if filtered else []


def filter_pairs(blocks: list[Block]) -> Labels:
    """The pairs of a row block; empty without any."""
    return Labels.of(blocks[0]) if blocks else Labels(np.empty(0, np.int64), np.empty(0, np.int32))
