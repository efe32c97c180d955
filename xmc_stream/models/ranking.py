"""What predicting with a model of any kind shares: data that fit it, pairs that are left out, calibration by class."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.errors import InputError
from xmc_stream.kernels.blocks import Labels
from xmc_stream.kernels.calibration import NOT_CALIBRATED
from xmc_stream.models.calibration import UNCHANGED, Calibration
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import Block, SparseMatrix
from xmc_stream.store.model import COMPACTED, StoredModel
from xmc_stream.store.names import SELECTED, selected_of

RESULT_BYTES = 28  # of a row and rank: label and score, as they are found and as they are written


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
