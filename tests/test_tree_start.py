"""Warm starts of label trees: which labels keep their place, where new ones go, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.problems import LIMIT
from helpers.trees import topics
from reference import tree as twin

import xmc_stream as xs
from xmc_stream.errors import InputError
from xmc_stream.tree.clustering import DIMENSIONS
from xmc_stream.tree.guide import read_groups
from xmc_stream.tree.nodes import structure_path
from xmc_stream.tree.structure import Structure

SHAPE: dict[str, Any] = {"max_leaf": 6, "root": 4, "branching": 2, "memory_limit": LIMIT, "progress": False}
K = 48


def converted(path: Path, X: Any, Y: Any, names: list[str] | None = None) -> xs.Dataset:
    if names is None:
        return xs.convert(X, path, labels=sp.csr_matrix(Y), memory_limit=LIMIT)
    file = path.with_suffix(".names")
    file.write_text("".join(f"{name}\n" for name in names))
    return xs.convert(X, path, labels=sp.csr_matrix(Y), label_names=file, memory_limit=LIMIT)


def trees_of(model: xs.Model) -> list[Structure]:
    return [Structure.read(structure_path(model.path, tree), model.n_labels) for tree in range(model.n_trees)]


def leaves(structure: Structure) -> np.ndarray:
    return structure.nodes_of_labels(len(structure.bounds) - 1)


@pytest.mark.parametrize("more", [{}, {"n_trees": 2}, {"max_leaf": 100}], ids=str)
def test_the_same_data_give_the_same_model(tmp_path: Path, more: dict[str, Any]) -> None:
    X, Y = topics(labels=3)
    data = converted(tmp_path / "data.xmc", X, Y)
    first = xs.LabelTree(**{**SHAPE, **more}).fit(data, model=tmp_path / "first")
    # another shape and seed would give another tree
    other = {**SHAPE, **more, "root": 8, "branching": 4, "max_leaf": 20 if "max_leaf" in more else 3}
    again = xs.LabelTree(**other).fit(data, model=tmp_path / "again", warm_start=first.model_)
    assert again.model_.arrays_digest() == first.model_.arrays_digest()
    assert again.report_["C"] == first.report_["C"]
    assert len(again.report_["C_tried"]) == 1
    assert again.report_["warm_start_labels"] == {"by_name": False, "kept": K, "new": 0, "gone": 0}


@pytest.mark.parametrize("named", [False, True])
def test_labels_keep_their_leaf_and_new_ones_hang_below_the_nearest(tmp_path: Path, named: bool) -> None:
    X, Y = topics(labels=3)
    old = np.random.default_rng(0).permutation(K)[:40] if named else np.arange(40)
    gone = old[:5] if named else old[:0]
    mine = np.setdiff1d(np.arange(K), gone)
    names = [f"l{label}" for label in range(K)] if named else None
    before = converted(tmp_path / "before.xmc", X, Y[:, old], names and [names[label] for label in old])
    data = converted(tmp_path / "data.xmc", X, Y[:, mine], names and [names[label] for label in mine])
    first = xs.LabelTree(**SHAPE).fit(before, model=tmp_path / "first").model_
    model = xs.LabelTree(**SHAPE).fit(data, model=tmp_path / "next", warm_start=first).model_
    assert model.attributes["warm_start_labels"] == {
        "by_name": named,
        "kept": 40 - len(gone),
        "new": 8,
        "gone": len(gone),
    }

    (was,), (now,) = trees_of(first), trees_of(model)
    assert len(now.bounds) == len(was.bounds) == 2
    place = dict(zip(old.tolist(), range(40), strict=True))
    kept = np.array([label in place for label in mine.tolist()])
    of_kept = np.array([leaves(was)[place[label]] for label in mine[kept].tolist()])
    number = {leaf: i for i, leaf in enumerate(np.unique(of_kept).tolist())}  # leaves that are empty are gone
    assert leaves(now)[kept].tolist() == [number[leaf] for leaf in of_kept.tolist()]
    tops = was.nodes_of_labels(0)[[place[label] for label in mine[kept].tolist()]], now.nodes_of_labels(0)[kept]
    together = set(zip(*(nodes.tolist() for nodes in tops), strict=True))  # labels below one node are so still
    assert len(together) == len(np.unique(tops[0])) == len(np.unique(tops[1]))

    rows = [list(zip(row.indices.tolist(), row.data.tolist(), strict=True)) for row in X]
    labels = [row.indices.tolist() for row in sp.csr_matrix(Y[:, mine])]
    vectors = twin.sketched(rows, labels, [1.0] * len(rows), len(mine), DIMENSIONS, 0).astype(np.float64)

    def is_nearest(sets: np.ndarray) -> None:
        sums = np.stack([vectors[kept & (sets == one)].sum(axis=0) for one in np.unique(sets[kept])])
        products = vectors @ (sums / np.linalg.norm(sums, axis=1, keepdims=True)).T
        of_new = products[~kept]
        chosen = of_new[np.arange(len(of_new)), np.searchsorted(np.unique(sets[kept]), sets[~kept])]
        assert (chosen >= of_new.max(axis=1) - 1e-5).all()

    is_nearest(leaves(now))
    groups = read_groups(model.path, model.n_labels)
    groups_before = read_groups(first.path, 40)
    assert (groups[kept] == groups_before[[place[label] for label in mine[kept].tolist()]]).all()
    for r in range(groups.shape[1]):
        is_nearest(groups[:, r].astype(np.int64))


def test_a_model_of_one_level_takes_new_labels(tmp_path: Path) -> None:
    X, Y = topics()
    first = xs.LabelTree(**{**SHAPE, "max_leaf": 100}).fit(
        converted(tmp_path / "before.xmc", X, Y[:, :40]), model=tmp_path / "first"
    )
    model = xs.LabelTree(**{**SHAPE, "max_leaf": 100}).fit(
        converted(tmp_path / "data.xmc", X, Y), model=tmp_path / "next", warm_start=first.model_
    )
    (now,) = trees_of(model.model_)
    assert not now.bounds
    assert now.order.tolist() == list(range(K))


def test_what_cannot_be_begun_from_is_refused(tmp_path: Path) -> None:
    X, Y = topics()
    data = converted(tmp_path / "data.xmc", X, Y)
    tree = xs.LabelTree(**SHAPE).fit(data, model=tmp_path / "tree").model_
    linear = xs.PPDSparse(memory_limit=LIMIT, progress=False).fit(data, model=tmp_path / "linear").model_
    fewer = converted(tmp_path / "fewer.xmc", X, Y[:, :40])
    for learner, of, start, words in (
        (xs.LabelTree(**SHAPE), data, linear, "is a linear model, which has no trees"),
        (xs.LabelTree(**SHAPE, n_trees=2), data, tree, "has 1 trees: set n_trees"),
        (xs.LabelTree(**SHAPE), fewer, tree, "which were taken out cannot be told"),
        (xs.LabelTree(**SHAPE, tree=tree.tree()), data, tree, "leave one of them out"),
        (xs.PPDSparse(memory_limit=LIMIT, progress=False), data, tree, "is a tree model"),
    ):
        with pytest.raises(InputError, match=words):
            learner.fit(of, model=tmp_path / "next", warm_start=start)
