"""Warm starts of any method: do a model and data have the same features, and which label of the model is a label of the data.

A label of the data is one of the model's by its name, where both have names of labels, else by its id.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.errors import InputError
from xmc_stream.runtime.plan import MIB
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.model import StoredModel
from xmc_stream.store.names import WINDOW, NamedIds, first_difference
from xmc_stream.system.progress import LOG

STARTED = "warm_start_labels"  # the attribute of a model that says what `said_of` does


def check_start(model: StoredModel, dataset: Dataset) -> None:
    """Raise InputError where the features, or the labels, of a model and of data cannot be the same ones."""
    if model.n_features > dataset.n_features:
        raise InputError(
            f"{model.path} is a model of {model.n_features} features, and {dataset.path} has {dataset.n_features}: convert "
            "the data with " + flags.LIKE + " the data of the model, so that they have the same features"
        )
    mine, theirs = dataset.feature_names(), model.feature_names()
    if mine is not None and theirs is not None and (differs := first_difference(mine, theirs)) is not None:
        raise InputError(
            f"feature {differs} of {dataset.path} has another name than that of {model.path}: convert the data with "
            + flags.LIKE
            + " the data of the model, so that they have the same features"
        )
    if model.n_labels > dataset.n_labels and not by_name(model, dataset):
        raise InputError(
            f"{model.path} is a model of {model.n_labels} labels, and {dataset.path} has {dataset.n_labels}: which were taken "
            "out cannot be told without names of labels on both sides: convert the data of both with "
            + flags.LABEL_NAMES
        )


def by_name(model: StoredModel, dataset: Dataset) -> bool:
    """Whether labels are matched by name."""
    return dataset.label_names() is not None and model.label_names() is not None


def matched_labels(model: StoredModel, dataset: Dataset) -> NDArray[np.int64]:
    """Of each label of the data, the label of the model that it is, or -1.

    Raises InputError where names cannot be told apart, or none agrees.
    """
    names, of_model, n = dataset.label_names(), model.label_names(), dataset.n_labels
    if names is None or of_model is None:
        found = np.where(np.arange(n) < model.n_labels, np.arange(n), -1)
    else:
        found, known = np.empty(n, np.int64), NamedIds(of_model)
        for start in range(0, n, WINDOW):
            some = names.read(start, min(start + WINDOW, n))
            different = sorted(set(some))
            try:
                ids = dict(zip(different, known.find(different).tolist(), strict=True))
            except LookupError as error:
                raise InputError(f"labels of {model.path} cannot be matched by name: {error}") from None
            found[start : start + len(some)] = [ids[name] for name in some]
    used = found[found >= 0]
    if len(np.unique(used)) < len(used):
        raise InputError(f"{dataset.path} has two labels of the same name: labels cannot be matched by name")
    if not len(used):
        raise InputError(
            f"{dataset.path} and {model.path} have no label of the same name: there is nothing to begin from"
        )
    return found


def said_of(model: StoredModel, dataset: Dataset, found: NDArray[np.int64], kept: NDArray[np.bool_]) -> dict[str, Any]:
    """How many labels there are to learn of those that are kept and new, and how many of the model's are gone.

    found: `matched_labels`; kept: labels that do not begin from nothing.
    """
    counts = dataset.label_counts()
    to_learn = (counts > 0) & (counts < dataset.n_samples)
    return {
        "by_name": by_name(model, dataset),
        "kept": int((kept & to_learn).sum()),
        "new": int((~kept & to_learn).sum()),
        "gone": model.n_labels - int((found >= 0).sum()),
    }


def say_matched(said: dict[str, Any], what: str) -> None:
    """Say in a line how labels were matched, where some are new or gone. what: that labels keep."""
    if said["new"] or said["gone"]:
        told = "warm start: {kept:,} labels keep their %s, {new:,} are new, {gone:,} are gone (by %s)"
        LOG.info(told.format(**said), what, "name" if said["by_name"] else "id")


def match_bytes(model: StoredModel, dataset: Dataset) -> int:
    """What `matched_labels` holds, and a caller with it."""
    return 40 * dataset.n_labels + (12 + NamedIds.BYTES * by_name(model, dataset)) * model.n_labels + 4 * MIB
