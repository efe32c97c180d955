"""What `info` shows of a tree: how many children nodes have, and what labels lie below some of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.store.model import StoredModel
from xmc_stream.tree.structure import Level, Structure

_NODES, _LABELS = 3, 5  # that are shown: of the first level, and of each of its nodes


def picture_of(model: StoredModel, structure: Structure) -> dict[str, Any]:
    """Numbers of each level's parents, the root first, and the nodes of the first level with the most positives."""
    return {"parents": [_parents(level) for level in structure.levels], "examples": _examples(model, structure)}


def _parents(level: Level) -> dict[str, Any]:
    spans = np.diff(level.ptr), np.diff(level.parents)
    return {"nodes": level.n_parents, **dict(zip(("children", "labels"), map(_spread, spans), strict=True))}


def _spread(numbers: NDArray[np.int64]) -> dict[str, int]:
    low, middle, high = np.quantile(numbers, [0.0, 0.5, 1.0], method="lower").tolist()
    return {"min": int(low), "median": int(middle), "max": int(high)}


def _examples(model: StoredModel, structure: Structure) -> list[dict[str, Any]]:
    """Nodes, and the labels with the most training rows below each, by name or number."""
    first = structure.levels[0]
    if first.last:
        return []
    k, order = structure.n_labels, structure.order
    counts = model.label_counts(0, k) if model.has_label_counts else np.zeros(k, np.int64)
    positives = np.add.reduceat(counts[order], first.children[:-1])
    return [
        {
            "node": node, "labels": int(first.children[node + 1] - first.children[node]), "positives": int(positives[node]),
            "frequent": _frequent(model, order[first.children[node] : first.children[node + 1]], counts),
        }
        for node in np.argsort(-positives, kind="stable")[:_NODES].tolist()
    ]  # fmt: skip


def _frequent(model: StoredModel, labels: NDArray[np.int64], counts: NDArray[np.int64]) -> list[tuple[str | int, int]]:
    """The labels with the most training rows, by name, or number where they have none, and how many each has."""
    most = labels[np.lexsort((labels, -counts[labels]))[:_LABELS]]
    ids, names = np.sort(most), model.label_names()
    called = dict(zip(ids.tolist(), ids.tolist() if names is None else names.take(ids), strict=True))
    return [(called[label], int(counts[label])) for label in most.tolist()]


def lines_of_picture(picture: dict[str, Any], number: int, n_trees: int) -> list[str]:
    """For people."""
    title = "tree" if n_trees == 1 else f"tree {number}"
    lines = [f"{title:16} {'nodes':>9}   {'children of each (median)':27}labels below each (median)"]
    for depth, of in enumerate(picture["parents"]):
        name = f"level {depth - 1}" if depth else "root"
        lines.append(f"  {name:14} {of['nodes']:9,}   {_words(of['children']):27}{_words(of['labels'])}")
    for of in picture["examples"]:
        labels = ", ".join(f"{name!r:.40} ({count:,})" for name, count in of["frequent"])
        more = of["labels"] - len(of["frequent"])
        lines.append(f"  node-0-{of['node']}: {labels}" + (f" and {more:,} more" if more else ""))
    return lines


def _words(spread: dict[str, int]) -> str:
    low, middle, high = spread.values()
    return f"{low:,}" if low == high else f"{low:,} to {high:,} ({middle:,})"
