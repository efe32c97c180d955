"""Which features of wider data the columns of a dataset, or of a model, are.

A store of selected features has an array of their ids, ascending, by the name of the attribute SELECTED. The attribute says
how many features there were ("of") and has a hash of the ids: two stores of one attribute have the same columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import StoreError
from xmc_stream.store.chunks import read_small
from xmc_stream.store.encoding import ArrayWriter, fsync_tree
from xmc_stream.store.nodes import Group, is_whole

SELECTED = "selected_features"
_CHUNK_BYTES = 4 * 2**20


def write_selection(work: Path, features: NDArray[np.int64], of: int) -> dict[str, Any]:
    """Put the ids of the features (ascending, of so many) into a store under construction; returns its attribute."""
    array = ArrayWriter(Group(work), SELECTED, np.int64, _CHUNK_BYTES)
    array.append(features)
    digest = array.close()
    fsync_tree(work / SELECTED)
    return {SELECTED: {"of": of, "sha256": digest}}


def selected_of(attributes: Mapping[str, Any]) -> int | None:
    """How many features the data had of which a store has some; None for a store of all. Raises StoreError."""
    about = attributes.get(SELECTED)
    if about is None:
        return None
    if not isinstance(about, dict) or not is_whole(about.get("of"), 0):
        raise StoreError(f"the attribute {SELECTED} is not understood: the store is damaged; make it again")
    return int(about["of"])


def n_converted(attributes: Mapping[str, Any]) -> int:
    """How many features the data of a dataset or model had when they were converted. Raises StoreError."""
    of = selected_of(attributes)
    return int(attributes["n_features"]) if of is None else of


def read_selection(path: Path, attributes: Mapping[str, Any], n: int) -> NDArray[np.int64] | None:
    """The ids of a store's n features in the data they were selected from; None for a store of all features."""
    of = selected_of(attributes)
    if of is None:
        return None
    features = read_small(path, SELECTED, n, np.int64)
    if n and not (features[0] >= 0 and features[-1] < of and (np.diff(features) > 0).all()):
        raise StoreError(
            f"{path / SELECTED} has no {n} features of {of} in ascending order: the store is damaged; make it again"
        )
    return features
