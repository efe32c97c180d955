"""Label trees as arrays: whoever has them scores without the library."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.compiler import needs_compiler
from helpers.problems import LIMIT
from helpers.trees import stored, topics, unpacked
from numpy.typing import NDArray

import xmc_stream as xs
from xmc_stream.kernels.calibration import UNSEEN
from xmc_stream.tree.guide import N_GROUPS, read_groups
from xmc_stream.tree.predict import TreeWeights

pytestmark = needs_compiler

DOCS = Path(__file__).parents[1] / "docs" / "tree.md"
UNSEEN_LABELS = (0, 1, 40)
MODELS: dict[str, dict[str, Any]] = {
    "several labels": {}, "one label": {"labels": 1}, "two trees": {"n_trees": 2}, "one leaf": {"max_leaf": 60},
    "no guide": {"guide": False},
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[xs.Model, Any, Any, Any]:
    """A model, its rows, the weights and what stands beside them."""
    folder, options = tmp_path_factory.mktemp("model"), dict(MODELS[request.param])
    X, Y = topics(labels=options.pop("labels", 2), unseen=UNSEEN_LABELS)
    p = {"max_leaf": 6, "root": 4, "branching": 2, "beam": 3, "C": 2, **options}
    made = xs.LabelTree(**p, memory_limit=LIMIT).fit(stored(folder, X, Y), model=folder / "m").model_
    told = xs.export(made.path, folder / "w.npz", memory_limit=LIMIT)
    assert told["nnz"] == made.nnz
    W = sp.load_npz(folder / "w.npz")
    W.check_format()
    with np.load(folder / "w.npz") as file:
        return made, X, W, {name: file[name] for name in ("bias", "parent", "label", "groups", "rule")}


def by_the_docs(X: Any, W: Any, beside: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Labels and their scores, by the lines that docs/tree.md shows."""
    (code,) = re.findall(r"\n    z = .*?label\[last\]\n", DOCS.read_text(), re.DOTALL)
    names = {"numpy": np, "x": X, "W": W, **beside}
    exec(textwrap.dedent(code), names)
    return beside["label"][names["last"]], names["s"]


def test_the_arrays_score_as_the_model_does(exported: tuple[xs.Model, Any, Any, Any]) -> None:
    """Of every label, but those without training rows."""
    made, X, W, beside = exported
    labels, scores = by_the_docs(X, W, beside)
    n_trees = TreeWeights(made.path).n_trees
    assert np.sort(labels).tolist() == np.repeat(np.arange(48), n_trees).tolist()
    if n_trees > 1:  # whose lists the model joins
        return
    found = np.zeros((300, 48))
    np.put_along_axis(found, *made.with_beam(None).predict_topk(X, 48), axis=1)
    seen = ~np.isin(labels, UNSEEN_LABELS)
    np.testing.assert_allclose(scores[:, seen], found[:, labels[seen]], rtol=2e-5, atol=2e-5)
    assert (found[:, UNSEEN_LABELS] == UNSEEN).all()
    assert (scores[:, ~seen] == -np.inf).all()


def test_every_column_is_a_group_a_node_or_a_label(exported: tuple[xs.Model, Any, Any, Any]) -> None:
    made, _, W, beside = exported
    of = TreeWeights(made.path)
    structures, column, guided = of.structures(), 0, bool(of.score["guide"])
    assert W.shape == (60, len(beside["bias"]))
    for unit, _ in of.tiles:
        panels = of.unit(unit, structures)
        n, want = len(panels.bias), np.zeros((60, len(panels.bias)), np.float32)
        for features, children, values in unpacked(panels):
            want[features, children - panels.children[0]] = values
        assert np.array_equal(W[:, column : column + n].toarray(), want)
        assert np.array_equal(beside["bias"][column : column + n], panels.bias)
        column += n
    assert column == W.shape[1]
    assert ((beside["parent"] == -2) == (np.arange(column) < N_GROUPS * guided)).all()
    assert np.array_equal(beside["groups"], read_groups(of.path, 48).ravel() if guided else [])
    first = N_GROUPS * guided
    for structure in structures:
        above: dict[int, set[int]] = {-1: set(range(48))}
        for level in structure.levels:
            edges = level.children.tolist()
            below = {first + c: set(structure.order[edges[c] : edges[c + 1]].tolist()) for c in range(level.n_children)}
            for c, labels in below.items():
                assert labels <= above[int(beside["parent"][c])]
                assert labels == {beside["label"][c]} or (beside["label"][c] == -1 and not level.last)
            first, above = first + level.n_children, below
    several = of.score["by_score"]
    assert beside["rule"].tolist() == [1.3, 0.5 if several else 0.25, 0.25 * guided, several, 3, 20]


def test_the_command_keeps_within_its_limit(
    exported: tuple[xs.Model, Any, Any, Any], tmp_path: Path, commands: Callable[..., Any]
) -> None:
    made, _, W, _ = exported
    told = commands("export", made.path, tmp_path / "w.npz", "--memory-limit", "512MB")
    assert told["peak_rss"] <= 512e6
    assert (sp.load_npz(tmp_path / "w.npz") != W).nnz == 0
    assert "memory" in commands("export", made.path, tmp_path / "v.npz", "--memory-limit", "50MB", fails=True)
