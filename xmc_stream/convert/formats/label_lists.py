"""Labels of rows of a matrix that stand in a list or a column in memory: ids or names, one in a row or several."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.convert.formats.frames import Column
from xmc_stream.convert.formats.string_classes import ids_by_name
from xmc_stream.convert.matrices.sides import Side
from xmc_stream.convert.matrices.whole import in_memory
from xmc_stream.convert.messages import shown_text
from xmc_stream.convert.options import ConvertOptions, Like, TextOptions, of_labels
from xmc_stream.convert.tfidf.counting import BadRowError, label_base, labels_in
from xmc_stream.errors import InputError

LISTS = "lists of labels"  # the kind of such a side
_BATCH = 2**12


def listed_side(column: Column, name: str, options: ConvertOptions, like: Like | None) -> Side:
    """Y of a column. name: what messages call it. Raises InputError for what is no label, naming the row."""
    from scipy.sparse import csr_matrix

    text, like = options.text_options or TextOptions(), of_labels(like)
    numbers: dict[str, int] = {}
    found, ends, kinds = array("q"), array("q", [0]), set()
    for start in range(0, column.n_rows, _BATCH):
        for row, value in enumerate(column.objects(start, min(start + _BATCH, column.n_rows)), start):
            try:
                labels = labels_in({name: value}, name, text)
            except BadRowError as error:
                raise InputError(f"row {row} (from 0): " + error.args[0]) from None
            kinds |= {type(label) for label in labels}
            if len(kinds) > 1:
                raise InputError(
                    f"row {row} (from 0): labels are names in some rows and ids in others: write them alike"
                )
            found.extend(numbers.setdefault(one, len(numbers)) if isinstance(one, str) else one for one in labels)
            ends.append(len(found))
    ids, n_columns, names = np.array(found, np.int64), 0, None
    if numbers:
        known, n_columns, names = _numbered(numbers, like, options.drop_unseen, name)
        ids = known[ids]
    elif len(ids):
        ids -= label_base(options, like)
    indptr = np.array(ends)
    if (ids < 0).any() and numbers:
        indptr = np.concatenate([[0], np.cumsum(ids >= 0)])[indptr]
        ids = ids[ids >= 0]
    if len(ids) and ids.min() < 0:
        raise InputError(f"{name} has the label {ids.min()}: ids of labels count from 0")
    n_columns = n_columns or max(int(ids.max(initial=-1)) + 1, options.n_labels or 0, like.n_labels if like else 0)
    matrix = csr_matrix((np.ones(len(ids), np.float32), ids, indptr), shape=(column.n_rows, n_columns))
    return replace(in_memory(matrix, name), kind=LISTS, labels=names)


def _numbered(
    numbers: dict[str, int], like: Like | None, drop: bool, name: str
) -> tuple[NDArray[np.int64], int, list[str] | None]:
    """The label of each number, -1 for none; how many labels there are, and their names where those are new."""
    order = sorted(numbers, key=str.encode)
    known = np.empty(len(numbers), np.int64)
    places = [numbers[one] for one in order]
    if like is None:
        known[places] = np.arange(len(order))
        return known, len(order), order
    known[places] = ids = ids_by_name(like, "labels", order, name)
    if not drop and (ids < 0).any():
        unseen = order[int(np.argmin(ids))]
        raise InputError(
            f"{name}: label {shown_text(unseen)} does not occur in {like.name}: " + flags.UNSEEN_DROP + " leaves it out"
        )
    return known, like.n_labels, None
