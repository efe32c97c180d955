"""The guide: classifiers of groups of labels, which say of every label how likely labels like it are.

Each of CLUSTERINGS clusterings cuts all labels into GROUPS groups (`tree.clustering`). The groups are solved on all rows, as
the children of a root. A label's score gets, for each clustering r with its group g_r,

    -w / CLUSTERINGS max(0, 1 - z_{g_r})^3,     w = (labels of a row - 1) / 4, in [0, 1]

The guide's folder has `groups` (K x CLUSTERINGS); its weights are a unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import StoreError
from xmc_stream.runtime.job import Receipt
from xmc_stream.store.chunks import read_small
from xmc_stream.store.encoding import new_store, write_arrays
from xmc_stream.store.model import CHUNK_BYTES
from xmc_stream.tree.clustering import read_split
from xmc_stream.tree.nodes import GUIDE, Unit
from xmc_stream.tree.structure import Level

CLUSTERINGS, DEPTH = 8, 3
GROUPS = 1 << DEPTH
N_GROUPS = CLUSTERINGS * GROUPS
FIRST_CLUSTERING = 128  # numbers of its clusterings: those below are of trees
UNIT = Unit(GUIDE, 0, 0, 1)
LEVEL = Level(0, np.array([0, N_GROUPS]), np.arange(N_GROUPS + 1), False)
NO_GROUPS: NDArray[np.uint8] = np.empty((0, 0), np.uint8)


def guide_weight(labels_per_row: float) -> float:
    """w."""
    return min(1.0, max(0.0, (labels_per_row - 1.0) / 4.0))


def groups_path(model: Path) -> Path:
    """Where the groups lie."""
    return model / "units" / "guide"


@dataclass(frozen=True)
class GroupsJob:
    """Write the groups of each label. parts: what the splits of each clustering left."""

    n_labels: int
    parts: tuple[str, ...]
    out: str

    @property
    def key(self) -> str:
        """There is one."""
        return "groups"

    def run(self) -> Receipt:
        """Read, number, write."""
        groups = np.empty((self.n_labels, CLUSTERINGS), np.uint8)
        for r, part in enumerate(self.parts):
            labels, bounds = read_split(Path(part))
            groups[labels, r] = r * GROUPS + np.repeat(np.arange(GROUPS), np.diff(bounds))
        write_groups(groups, Path(self.out))
        return {}


def write_groups(groups: NDArray[np.uint8], path: Path) -> None:
    """The groups of each label (K, CLUSTERINGS)."""
    with new_store(path, {}) as group:
        write_arrays(group, {"groups": groups.ravel()}, CHUNK_BYTES)


def read_groups(model: Path, n_labels: int) -> NDArray[np.uint8]:
    """The groups of each label (K, CLUSTERINGS). Raises StoreError where there are others than there can be."""
    groups = read_small(groups_path(model), "groups", n_labels * CLUSTERINGS, np.uint8).reshape(n_labels, CLUSTERINGS)
    if (groups >> DEPTH != np.arange(CLUSTERINGS)).any():
        raise StoreError(f"{groups_path(model)} has groups that are none: it is damaged; train the model again")
    return groups
