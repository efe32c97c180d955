"""Whether rows of one dataset may stand below those of another: the same features, and labels that can be matched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xmc_stream import flags
from xmc_stream.datasets.passes import windows
from xmc_stream.errors import InputError
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.inventory import SEAL, refuse_broken_seal
from xmc_stream.store.names import SELECTED, first_difference, open_vectorizer, selected_of
from xmc_stream.store.nodes import attributes_of, understood

# of a vectorizer: where text and labels stood in the input, and what chose the vocabulary, which is compared itself
_FIELDS = (
    "text_fields", "label_field", "label_delimiter", "label_lists", "label_ids", "id_field", "min_df", "max_df",
    "max_features",
)  # fmt: skip


def refuse_unfit(old: Dataset, new: Dataset) -> None:
    """Raise InputError where two sets cannot be one, saying what to do, and StoreError where `new` is damaged."""
    for dataset in (old, new):
        refuse_broken_seal(dataset.path)
    if old.attributes.get(SELECTED) != new.attributes.get(SELECTED):
        kinds = [
            f"has {'all' if n is None else f'selected features of {n}'}"
            for n in (selected_of(one.attributes) for one in (old, new))
        ]
        raise InputError(
            f"{old.path} {kinds[0]} and {new.path} {kinds[1]}: give both the same ones, by `xmc-stream select-features`"
        )
    again = f"convert the rows of {new.path} again with " + flags.LIKE + f" {old.path}"
    if new.attributes["nnz_labels"]:
        again += ", and " + flags.NEW_LABELS + " where it has labels of its own"
    # ids of libsvm text count from what each text was asked for by itself
    libsvm = all(str(one.attributes.get("source_format")).startswith("libsvm") for one in (old, new))
    mine, theirs = _told(old, libsvm), _told(new, libsvm)
    for what, value in mine.items():
        if value != theirs.get(what):
            raise InputError(f"{what} {value} in {old.path} and {theirs.get(what)} in {new.path}: " + again)
    _same_words(old, new, again)
    no_labels = not new.attributes["nnz_labels"] and observed_seal(new) is None  # nor known ones
    for what, option, in_old, in_new in (
        ("ids of rows", "with " + flags.ID_FIELD + ", or without", old.row_ids(), new.row_ids()),
        ("a mask of known pairs", "with " + flags.OBSERVED + ", or without", observed_seal(old), observed_seal(new)),
        (
            "names of labels", "with names of labels, by " + flags.LABEL_NAMES + ", or ids", old.label_names(),
            old.label_names() if no_labels else new.label_names(),
        ),
    ):  # fmt: skip
        if (in_old is None) != (in_new is None):
            having, lacking = (old, new) if in_new is None else (new, old)
            raise InputError(
                f"{having.path} has {what} and {lacking.path} has none: convert one of them again, " + option
            )


def _told(dataset: Dataset, libsvm: bool) -> dict[str, Any]:
    """What must be the same of two sets, by the words of a message. libsvm: whether both are of such text."""
    about, text = dataset.attributes, open_vectorizer(dataset.path)
    with understood(dataset.path):
        beside = [one["n_features"] for one in about.get("beside", [])]
    told = {
        "the number of features is": dataset.n_features,
        "names of features are": "missing" if dataset.feature_names() is None else "known",
        "rows are normalised by": about.get("normalize", "none"),
        "matrices beside have columns": beside,
        "features are": "columns" if text is None else "words of raw text",
    }
    if text is not None:
        told |= {f"{name} of raw text is": value for name, value in text[0].items() if name not in _FIELDS}
    if libsvm:
        told["ids of features count from"] = about.get("base", 0)
        told["ids of labels count from"] = about.get("label_base", 0)
    return told


def _same_words(old: Dataset, new: Dataset, again: str) -> None:
    """Features have the same names and, if they are words, the same idf."""
    mine, theirs = old.feature_names(), new.feature_names()
    if mine is not None and theirs is not None and (i := first_difference(mine, theirs)) is not None:
        name, other = mine.read(i, i + 1)[0], theirs.read(i, i + 1)[0]
        raise InputError(f"feature {i} is {name!r:.50} in {old.path} and {other!r:.50} in {new.path}: " + again)
    texts = [text for one in (old, new) if (text := open_vectorizer(one.path)) is not None]
    if texts and not all(np.array_equal(*pair) for pair in zip(*(windows(idf) for _, idf in texts), strict=False)):
        raise InputError(f"{old.path} and {new.path} weigh words by other idf: " + again)


def observed_seal(dataset: Dataset) -> str | None:
    """What tells a dataset's mask of known pairs from others, None where it has none; it is sealed apart."""
    path = dataset.path / "observed"
    return str(attributes_of(path).get(SEAL)) if path.exists() else None


def total(datasets: Sequence[Dataset], name: str) -> int:
    """The sum of a size, as "nnz_features"."""
    return sum(int(dataset.attributes[name]) for dataset in datasets)
