"""What `export` writes of label trees: the weights of all nodes and labels, and what else their scores are made of.

A column is a group of the guide, if there is one, or else a node or a label: level after level of tree after tree. Beside
weights and bias there are

    parent (M,)    the column of the parent; ROOT for the children of the root, GROUP for groups
    label (M,)     the label; NODE for nodes and groups
    groups (8 K,)  the columns of a label's groups, label after label; empty without a guide
    rule (6,)      1.3, a, w, 1 where rows have several labels, the beam (0: all), and LIST
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.models.kind import Beside, WeightArrays
from xmc_stream.store.chunks import open_array
from xmc_stream.tree.guide import CLUSTERINGS, N_GROUPS, read_groups
from xmc_stream.tree.kernels.records import ODD, Panels
from xmc_stream.tree.kernels.unpack import unpack_panel
from xmc_stream.tree.predict import TreeWeights
from xmc_stream.tree.scoring import LIST
from xmc_stream.tree.structure import Level, Structure

ROOT, GROUP, NODE = -1, -2, -1
_ENTRY_BYTES = 64  # of a weight of a panel, as it is unpacked and put in order
_UNITS = 3  # as many bytes as the largest unit, while one is read
Values = Iterator[NDArray[np.int64]]


def exported(model: TreeWeights) -> WeightArrays:
    """All arrays. Kernels are loaded here: behind it a limit is checked."""
    structures, n_groups = model.structures(), N_GROUPS if model.score["guide"] else 0
    k, columns = model.n_labels, n_groups + sum(map(sum, model.levels))
    biases = [open_array(unit.path(model.path) / "bias") for unit, _ in model.tiles]
    starts = (open_array(unit.path(model.path) / "starts") for unit, _ in model.tiles)
    largest = max(int(np.diff(array.read(0, array.size)).max()) for array in starts)
    next(_panels(model, structures), None)
    score, whole = model.score, np.dtype(np.int64)
    rule = np.array(
        [*(score[name] for name in ("short", "path", "guide", "by_score")), model.beam or 0, LIST], np.float64
    )
    beside: dict[str, Beside] = {
        "parent": (columns, whole, _of_levels(structures, n_groups, GROUP, _parents)),
        "label": (columns, whole, _of_levels(structures, n_groups, NODE, _labels)),
        "groups": (CLUSTERINGS * k if n_groups else 0, whole, _groups(model)),
        "rule": (len(rule), rule.dtype, iter([rule])),
    }
    needs = _UNITS * max(size for _, size in model.tiles) + _ENTRY_BYTES * largest + model.shape_bytes
    return WeightArrays(
        model.nnz,
        _ends(model, structures),
        (features for _, features, _ in _panels(model, structures)),
        (values for _, _, values in _panels(model, structures)),
        (array.read(0, array.size) for array in biases),
        columns,
        beside,
        needs,
    )


def _panels(
    model: TreeWeights, structures: list[Structure]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]]:
    """Weights of each panel, column after column: how many each column has, their features, their values."""
    for unit, _ in model.tiles:
        of = model.unit(unit, structures)
        for panel in range(len(of.children) - 1):
            yield _unpacked(of, panel)


def _unpacked(of: Panels, panel: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    most = int(of.starts[panel + 1] - of.starts[panel])
    features, children, values = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.float32)
    n = unpack_panel(panel, of, pow(ODD, -1, 1 << of.word), features, children, values)
    order = np.lexsort((features[:n], children[:n]))
    counts = np.bincount(children[:n], minlength=int(of.children[panel + 1] - of.children[panel]))
    return counts, features[order], values[order]


def _ends(model: TreeWeights, structures: list[Structure]) -> Values:
    """Where the weights of each column end, behind 0."""
    done = np.zeros(1, np.int64)
    yield done
    for counts, _, _ in _panels(model, structures):
        yield (done := done[-1] + np.cumsum(counts))


def _of_levels(structures: list[Structure], n_groups: int, of_groups: int, of_level: Callable[..., Any]) -> Values:
    """What each column has. of_level: of the children of a level, whose parents begin at a column."""
    yield np.full(n_groups, of_groups)
    before = n_groups
    for structure in structures:
        for level in structure.levels:
            yield of_level(structure, level, before)
            before += level.n_parents if level.number else 0
        before += structure.n_labels


def _parents(_: Structure, level: Level, before: int) -> NDArray[np.int64]:
    if level.number == 0:
        return np.full(level.n_children, ROOT)
    return before + np.repeat(np.arange(level.n_parents), np.diff(level.ptr))


def _labels(structure: Structure, level: Level, _: int) -> NDArray[np.int64]:
    return structure.order if level.last else np.full(level.n_children, NODE)


def _groups(model: TreeWeights) -> Values:
    if model.score["guide"]:
        yield read_groups(model.path, model.n_labels).ravel().astype(np.int64)
