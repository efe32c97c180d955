"""How the labels of an input were understood, in words: which there are, and whether several may stand in one name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.convert.messages import shown_text
from xmc_stream.flags import Wording

if TYPE_CHECKING:
    from xmc_stream.store.dataset import Dataset

SEPARATOR = (
    "label_separator"  # attribute of a dataset: what its names seem to be separated by; LIST: they look like lists
)
LIST = "[]"
_SEPARATORS = ("|", ";", ",", "\t", "\n", "/", " ")
_WEAK = ("/", " ")  # which stand in names of one label too: those occur often
_OFTEN = 4  # times that a name of one label occurs, at least, on average
_EXAMPLES = 3
_LONGEST = 200  # characters of an example


def held_by(names: Sequence[bytes], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many of some names of labels hold each separator or look like a list, and how many labels of rows these are.

    rows: that each name is a label of. Returns pairs (names, labels), of all and then of LIST and each separator.
    """
    listed = [name[:1] + name[-1:] in (b"[]", b"()", b"{}") for name in map(bytes.strip, names)]
    held = [[separator in name for name in names] for separator in map(str.encode, _SEPARATORS)]
    which = np.array([[True] * len(names), listed, *held], np.bool_)
    return np.stack([which.sum(axis=1), which @ rows], axis=1)


def separator_of(counts: Sequence[Sequence[int]]) -> str:
    """What most of the names, or of the labels of rows, hold, by the counts of `held_by`; "" where it is nothing."""
    (names, labels), *others = counts
    most, found = 0, ""
    for kind, (of_names, of_labels) in zip((LIST, *_SEPARATORS), others, strict=True):
        holds = 2 * of_names > names or 2 * of_labels > labels
        if holds and of_labels > most and not (kind in _WEAK and labels >= _OFTEN * names):
            most, found = of_labels, kind
        if found == LIST:
            break
    return found


def understood(dataset: Dataset) -> dict[str, Any]:
    """How the labels of a converted dataset were understood: kind ("names", "ids" or "none"), examples (the most frequent
    ones), separator (None, or what most names hold) and said (all of it in a line, a `Wording`)."""
    about, counts = dataset.attributes, dataset.label_counts()
    frequent: list[int] = []
    for _ in range(min(_EXAMPLES, len(counts))):
        best = int(np.argmax(counts))  # the first one of equals
        if counts[best] > 0:
            frequent.append(best)
            counts[best] = 0
    names = dataset.label_names() if "label_base" not in about else None
    base = int(about.get("label_base", 0))
    examples: list[Any] = [i + base for i in frequent]
    if names is not None:
        examples = [names.read(i, i + 1)[0][:_LONGEST] for i in frequent]
    kind = "none" if not frequent else "ids" if names is None else "names"
    separator = about.get(SEPARATOR)
    field = about.get("label_field") or about.get("label_key")
    said = f"labels{f' of {shown_text(field)}' if field else ''}: "
    if kind == "none":
        said += "no row has any"
    else:
        words = ", ".join(shown_text(one) if isinstance(one, str) else str(one) for one in examples)
        said += f"{dataset.n_labels:,} {kind}{f' from {base}' if names is None else ''}, most frequent {words}"
    if separator == LIST:
        said += "; most look like lists of labels: if they are, convert again with " + flags.LABEL_LISTS
    elif separator:
        said += f"; most hold {separator!r}: if it separates labels, convert again with "
        said += flags.LABEL_DELIMITER + f" {separator!r}"
    return {"kind": kind, "examples": examples, "separator": separator, "said": Wording.of(said)}
