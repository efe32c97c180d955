"""Whether rows of one dataset may stand below those of another: the same features, and labels that can be matched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xmc_stream import flags
from xmc_stream.datasets.check import windows
from xmc_stream.errors import InputError
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.inventory import SEAL, refuse_broken_seal
from xmc_stream.store.names import first_difference, open_vectorizer
from xmc_stream.store.nodes import attributes_of, understood
from xmc_stream.store.selection import SELECTED, selected_of


def refuse_unfit(old: Dataset, new: Dataset) -> None:
    """Raise InputError where two sets cannot be one, saying what to do, and StoreError where `new` is damaged."""
    for dataset in (old, new):
        refuse_broken_seal(dataset.path)
    _same_features(old, new)
    _same_transform(old, new)
    _same_bases(old, new)
    for what, option, in_old, in_new in (
        ("ids of rows", "with " + flags.ID_FIELD + ", or without", old.row_ids(), new.row_ids()),
        ("a mask of known pairs", "with " + flags.OBSERVED + ", or without", observed_seal(old), observed_seal(new)),
        (
            "names of labels",
            "with names of labels, by " + flags.LABEL_NAMES + ", or ids",
            *map(_label_names, (old, new)),
        ),
    ):
        lacking = "" if (in_old is None) == (in_new is None) else f"{old.path} has {what} and {new.path} has none"
        no_labels = not new.attributes["nnz_labels"] and observed_seal(new) is None  # nor known ones
        if lacking and not (what == "names of labels" and no_labels):
            if in_old is None:
                lacking = f"{new.path} has {what} and {old.path} has none"
            raise InputError(f"{lacking}: convert one of them again, " + option)


def _label_names(dataset: Dataset) -> Any:
    return dataset.label_names()


def _like(old: Dataset, new: Dataset) -> str:
    labels = ", and " + flags.NEW_LABELS + " where it has labels of its own" if new.attributes["nnz_labels"] else ""
    return f"convert the rows of {new.path} again with " + flags.LIKE + f" {old.path}" + labels


def _same_features(old: Dataset, new: Dataset) -> None:
    """As many, of one selection, with the same names."""
    if (of := selected_of(old.attributes)) != (of_new := selected_of(new.attributes)) or (
        old.attributes.get(SELECTED) != new.attributes.get(SELECTED)
    ):
        kinds = [f"has {'all' if n is None else f'selected features of {n}'}" for n in (of, of_new)]
        raise InputError(
            f"{old.path} {kinds[0]} and {new.path} {kinds[1]}: give both the same ones, by `xmc-stream select-features`"
        )
    if old.n_features != new.n_features:
        raise InputError(
            f"{old.path} has {old.n_features} features and {new.path} {new.n_features}: " + _like(old, new)
        )
    mine, theirs = old.feature_names(), new.feature_names()
    if (mine is None) != (theirs is None):
        named, other = (new, old) if mine is None else (old, new)
        raise InputError(
            f"{named.path} has names of features and {other.path} has none, so nothing tells whether they are the same: "
            + _like(old, new)
        )
    if mine is not None and theirs is not None and (i := first_difference(mine, theirs)) is not None:
        name, other_name = mine.read(i, i + 1)[0], theirs.read(i, i + 1)[0]
        raise InputError(
            f"feature {i} is {name!r:.50} in {old.path} and {other_name!r:.50} in {new.path}: " + _like(old, new)
        )


def _same_transform(old: Dataset, new: Dataset) -> None:
    """Text became features, and rows were scaled, in the same way; matrices beside had the same columns."""
    for name, words in (("normalize", "are normalised by"), ("beside", "have matrices beside of the columns")):
        values = [_told(dataset, name) for dataset in (old, new)]
        if values[0] != values[1]:
            raise InputError(
                f"rows of {old.path} {words} {values[0]} and those of {new.path} {values[1]}: " + _like(old, new)
            )
    mine, theirs = open_vectorizer(old.path), open_vectorizer(new.path)
    if (mine is None) != (theirs is None):
        text, other = (new, old) if mine is None else (old, new)
        raise InputError(f"{text.path} was made of raw text and {other.path} was not: " + _like(old, new))
    if mine is None or theirs is None:
        return
    differ = [name for name in mine[0] if name not in _FIELDS and mine[0][name] != theirs[0].get(name)]
    if differ:
        raise InputError(
            f"{differ[0]} of raw text is {mine[0][differ[0]]} in {old.path} and {theirs[0].get(differ[0])} in {new.path}: "
            + _like(old, new)
        )
    pairs = zip(windows(mine[1]), windows(theirs[1]), strict=False)
    if mine[1].size != theirs[1].size or not all(np.array_equal(a, b) for a, b in pairs):
        raise InputError(f"{old.path} and {new.path} weigh words by other idf: " + _like(old, new))


def _same_bases(old: Dataset, new: Dataset) -> None:
    """Ids in texts that do not say so count from the same number, which each text was asked for by itself."""
    if not all(str(dataset.attributes.get("source_format")).startswith("libsvm") for dataset in (old, new)):
        return
    for name, what in (("base", "features"), ("label_base", "labels")):
        first, second = (dataset.attributes.get(name, 0) for dataset in (old, new))
        if first != second:
            raise InputError(
                f"ids of {what} count from {first} in {old.path} and from {second} in {new.path}, by the ids that occur: "
                + _like(old, new)
            )


# of a vectorizer: where text and labels stood in the input, and what chose the vocabulary, which is compared itself
_FIELDS = (
    "text_fields", "label_field", "label_delimiter", "label_lists", "label_ids", "id_field", "min_df", "max_df",
    "max_features",
)  # fmt: skip


def _told(dataset: Dataset, name: str) -> Any:
    value = dataset.attributes.get(name, "none" if name == "normalize" else [])
    if name == "normalize":
        return value
    with understood(dataset.path):
        return [one["n_features"] for one in value]


def observed_seal(dataset: Dataset) -> str | None:
    """What tells a dataset's mask of known pairs from others, None where it has none; it is sealed apart."""
    path = dataset.path / "observed"
    return str(attributes_of(path).get(SEAL)) if path.exists() else None


def total(datasets: Sequence[Dataset], name: str) -> int:
    """The sum of a size, as "nnz_features"."""
    return sum(int(dataset.attributes[name]) for dataset in datasets)
