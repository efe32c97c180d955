"""Trees that are given: what lines mean, what is refused, the models that are learned, and trees read from models."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.compiler import needs_compiler
from helpers.cuts import CutError, CutLedger
from helpers.forked import run_forked
from helpers.problems import LIMIT
from helpers.trees import PLAN, finished, run_tree, solved, stored, topics
from hypothesis import given
from hypothesis import strategies as st

import xmc_stream as xs
from xmc_stream.errors import InputError, ResumeError
from xmc_stream.methods.contract import Task
from xmc_stream.methods.registry import method_of, names, parameters
from xmc_stream.methods.weights import Given
from xmc_stream.runtime.plan import MIB, MemoryPlan
from xmc_stream.store.names import Names, new_names
from xmc_stream.tree.clustering import SplitJob, VectorsJob
from xmc_stream.tree.given import GivenJob, lines_of, pairs_of, structure_of
from xmc_stream.tree.parameters import TreeParameters
from xmc_stream.tree.structure import Structure

Pairs = list[tuple[str, str]]


@dataclass
class Labels:
    """As much of a dataset as a tree asks for."""

    n_labels: int
    names: Names | None = None
    path: str = "d.xmc"

    def label_names(self) -> Names | None:
        return self.names


def named(folder: Path, *called: str) -> Any:
    with new_names(folder / "names" / "labels") as writer:
        writer.append([name.encode() for name in called])
    return Labels(len(called), Names(folder / "names" / "labels"))


def numbered(n: int) -> Any:
    return Labels(n)


def nodes_of(structure: Structure) -> list[list[list[int]]]:
    """The labels of each node, level by level."""
    return [
        [structure.order[low:high].tolist() for low, high in zip(level.children, level.children[1:], strict=False)]
        for level in structure.levels
    ]


# ----------------------------------------------------------------------------------------------------------------------
# what lines mean


def test_levels_of_a_file(tmp_path: Path) -> None:
    """Depths differ, an inner node is a label, names have blanks, two roots hang under one."""
    data = named(tmp_path, "animal", "cat", "great dane", "dog", "oak", "#tag")
    text = (
        "# a comment\n\n#\ncat\tanimal\r\n  dog animal\ngreat dane\tdog\ngreat dane\tdog\n"
        "oak\tplant tall\n#tag plant\nplant all\nplant tall\tplant"
    )
    path = tmp_path / "tree.txt"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    animal, cat, dane, dog, oak, tag = range(6)
    made = structure_of(path, data)
    assert nodes_of(made) == [
        [[animal, cat, dog, dane], [tag, oak]],  # by the lines; `all` and `plant` are one
        [[animal], [cat], [dog, dane], [tag], [oak]],
        [[animal], [cat], [dog], [dane], [tag], [oak]],
    ]
    with gzip.open(tmp_path / "tree.gz", "wb") as file:
        file.write(path.read_bytes())
    assert nodes_of(structure_of(str(tmp_path / "tree.gz"), data)) == nodes_of(made)


def test_numbers_are_labels_where_these_have_no_names() -> None:
    made = structure_of([(2, "7"), (np.int64(0), "7"), ("1", "01")], numbered(3))
    assert nodes_of(made) == [[[2, 0], [1]], [[2], [0], [1]]]
    assert nodes_of(structure_of([(1, "root"), (0, "root")], numbered(2))) == [[[1], [0]]]
    assert nodes_of(structure_of([("a", "b"), (0, "a")], numbered(1))) == [[[0]]]


@st.composite
def forests(draw: st.DrawFn) -> tuple[int, Pairs]:
    """Labels, some of which are inner nodes, and pairs in any order."""
    k, n_inner = draw(st.integers(2, 14)), draw(st.integers(1, 8))
    words = draw(st.permutations([*map(str, range(k)), *(f"n{i}" for i in range(n_inner))]))
    parents = {
        word: words[draw(st.integers(0, i - 1))] for i, word in enumerate(words) if i and draw(st.integers(0, 9))
    }
    while idle := [word for word in words if word[0] == "n" and word not in parents.values()]:
        words = [word for word in words if word not in idle]
        parents = {child: parent for child, parent in parents.items() if child not in idle}
    for word in words:  # a label that is neither below nor above another word
        if word not in parents and word not in parents.values():
            parents[word] = "top"
    return k, draw(st.permutations(list(parents.items())))


@given(forests())
def test_any_forest_becomes_levels_of_the_same_nodes(forest: tuple[int, Pairs]) -> None:
    k, pairs = forest
    made, parents = structure_of(pairs, numbered(k)), dict(pairs)
    below: dict[str, set[int]] = {}
    for label in range(k):
        word: str | None = str(label)
        while word is not None:
            below.setdefault(word, set()).add(label)
            word = parents.get(word)
    assert sorted(made.order.tolist()) == list(range(k))
    levels = nodes_of(made)
    for above, level in zip([[made.order.tolist()], *levels], levels, strict=False):
        assert [label for node in level for label in node] == made.order.tolist()
        assert len(level) > len(above)
    found = {frozenset(node) for level in levels for node in level}
    wanted = {frozenset(node) for node in below.values() if len(node) < k} | {frozenset([i]) for i in range(k)}
    assert found == wanted
    again = structure_of(list(pairs_of(made, None)), numbered(k))
    assert again.order.tolist() == made.order.tolist()
    assert [bounds.tolist() for bounds in again.bounds] == [bounds.tolist() for bounds in made.bounds]


def test_names_of_inner_nodes_are_no_labels(tmp_path: Path) -> None:
    data = named(tmp_path, "root", "node-0-1", "_node-", "a b")
    made = structure_of([("root", "x"), ("node-0-1", "x"), ("_node-", "y"), ("a b", "y")], data)
    pairs = list(pairs_of(made, data.names))
    assert pairs[0] == ("__node-0-0", "__root")
    (tmp_path / "t").write_text("".join(f"{line}\n" for line in lines_of(pairs)))
    assert nodes_of(structure_of(tmp_path / "t", data)) == nodes_of(made)
    with pytest.raises(InputError, match="cannot be written in a line"):
        list(lines_of([("a\tb", "root")]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0 a\n1 a\n\n2 b\n0 b\n", r"t:5: '0' has another parent, 'a' \(.*t:1\)"),
        ("0 a\na b\n1 b\nb a\n2 a\n", r"t:4: 'b' lies below itself, in a cycle of 2 lines"),
        ("0 0\n1 a\n2 a\n", r"t:1: '0' lies below itself, in a cycle of 1 line"),
        ("0 a\n2 a\n", r"t lacks 1 of the 3 labels of d.xmc \(1\): give"),
        ("0 a\n1 a\n2 a\n3 a\n", r"t:4: '3' is no label of d.xmc, and nothing lies below it"),
        ("0 a\n1 a b\n", r"t:2: '1 a b' is not 'child parent'"),
        ("0\ta\t\n", r"t:1: .* is not 'child parent'"),
        ("0 a\n1\t \n", r"t:2: .* is not 'child parent'"),
        ("", r"t lacks 3 of the 3 labels of d.xmc \(0, 1, 2\)"),
        ("0 a\n1 \xff\n", r"t:2: it is no UTF-8"),
        ("0 a\n1 " + 20_000 * "b", r"t:2: .* is not 'child parent'"),
        ("".join(f"n{i} n{i + 1}\n" for i in range(70)) + "0 n0\n1 n0\n2 n70\n", r"t has 71 levels: .* 64"),
    ],
)
def test_what_is_no_tree_is_refused_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=said):
        structure_of(tmp_path / "t", numbered(3))


def test_what_else_is_refused(tmp_path: Path) -> None:
    for tree, said in (
        (tmp_path / "none", "cannot be read"), (7, "give the path"), ([("0", "a", "b")], r"tree\[0\] is"),
        ([(0, "a"), (1, None)], r"tree\[1\] is"), ([(0, "a"), (1, "a"), (0, "b")], r"tree\[2\]: '0' has another parent"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            structure_of(tree, numbered(2))
    with pytest.raises(InputError, match="give labels different names"):
        structure_of([("a", "x"), ("b", "x")], named(tmp_path, "a", "b", "a"))
    data, asked = stored(tmp_path, *topics(k=12)), parameters("parabel", {"tree": "given"})
    for tree, said in (
        (Given(tree=structure_of([(i, "a") for i in range(12)], data).arrays()), "n_trees"),
        (None, "no tree"),
    ):
        with pytest.raises(InputError, match=said):
            method_of(asked).check(Task(data, asked, 0, given=tree))


@pytest.mark.parametrize("solver", [name for name in names() if "tree" not in parameters(name, {}).rules()])
def test_methods_that_take_no_tree_say_so(solver: str, tmp_path: Path) -> None:
    data, asked = stored(tmp_path, *topics(k=12)), parameters(solver, {})
    tree = structure_of([(i, "a") for i in range(12)], data).arrays()
    with pytest.raises(InputError, match="takes no tree of labels: leave it out"):
        method_of(asked).check(Task(data, asked, 0, given=Given(tree=tree)))


# ----------------------------------------------------------------------------------------------------------------------
# what is learned

TREE = [
    *((i, f"t{i % 6}") for i in range(40)), ("t1", "t0"), ("t2", "t1"), (41, 40), (42, 41), (43, 40), (44, 43), (45, 44),
    (46, "q"), (47, "q"),
]  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("guide", [True, False])
def test_the_tree_is_taken_as_it_is_whatever_the_limit(guide: bool, tmp_path: Path) -> None:
    data = stored(tmp_path, *topics(n=600))
    tree, p = structure_of(TREE, data), TreeParameters(beam=4, guide=guide, tree="given")
    runs = [
        run_tree(data, tmp_path / str(number), p, plan=plan, given=Given(tree=tree.arrays()))
        for number, plan in enumerate((PLAN, MemoryPlan(2**40, 140 * MIB, 2, processes=2)))
    ]
    run, ledger = runs[0], CutLedger()
    while True:
        ledger.left = 4
        try:
            runs.append(run_tree(data, tmp_path / "cut", p, notes=ledger, given=Given(tree=tree.arrays())))
        except CutError:
            continue
        break
    assert nodes_of(run.structure()) == nodes_of(tree)
    assert len(run.of(GivenJob)) == 1
    assert bool(run.of(VectorsJob)) == guide
    assert len(run.of(SplitJob)) == (8 if guide else 0)  # of the guide
    for level in run.structure().levels[1:]:
        W, bias = solved(run, level.number)
        first = level.ptr[:-1][level.alone]
        assert (bias[first] == 1.0).all()
        assert not W[:, first].any()
        assert (np.abs(W).sum(axis=0) > 0).sum() > 0.8 * (level.n_children - len(first))
    assert sum(level.alone.sum() for level in run.structure().levels) > 10
    assert len({finished(one).digest() for one in runs}) == 1


@needs_compiler
def test_a_wide_and_flat_tree_ranks_as_one_that_is_made(tmp_path: Path) -> None:
    """A node of more children than a panel has, beside a label that is a child of the root."""
    rng, k = np.random.default_rng(0), 700
    y = rng.integers(0, k, 4 * k)
    X = sp.csr_matrix((np.ones(len(y), np.float32), (np.arange(len(y)), y)), (len(y), k))
    data = stored(tmp_path, X, X)
    clf = xs.LabelTree(
        tree=[(0, "root"), ("most", "root"), *((i, "most") for i in range(1, k))], memory_limit=LIMIT, C=4
    )
    labels, _ = clf.fit(data, model=tmp_path / "m").predict_topk(X, k=1)
    assert (labels[:, 0] == y).mean() > 0.99
    shape = clf.model_.pictured()[0]["shapes"][0]
    assert [of["children"]["max"] for of in shape["parents"]] == [2, k - 1]


@needs_compiler
def test_a_tree_is_read_from_a_model_and_given_again(tmp_path: Path) -> None:
    """By names, in Python; of another tree it is another run, and so it is without one."""
    X, Y = topics()
    y = [[f"label {i}" for i in Y[row].indices] for row in range(300)]
    asked: dict[str, Any] = {"memory_limit": LIMIT, "C": 1.0, "beam": 3}
    first = xs.LabelTree(max_leaf=6, root=4, branching=2, **asked).fit(X, y)
    pairs = first.model_.tree()
    assert {child for child, _ in pairs} >= {f"label {i}" for i in range(48)}
    for tree in (pairs, iter(pairs)):
        again = xs.LabelTree(tree=tree, **asked).fit(X, y, model=tmp_path / "m", overwrite=True)
        assert [nodes_of(one) for one in again.model_.structures()] == [
            nodes_of(one) for one in first.model_.structures()
        ]
        assert again.report_["params"]["tree"] == "given"
    assert np.array_equal(
        again.predict_topk(X, 5)[1], first.predict_topk(X, 5)[1]
    )  # weights do not depend on who made it
    data = stored(tmp_path, X, Y)
    numbers = [(i, f"n{i % 5}") for i in range(48)]
    clf = xs.LabelTree(tree=numbers, **asked).fit(data, model=tmp_path / "n")
    assert xs.LabelTree(tree=numbers[::1], **asked).fit(data, model=tmp_path / "n").report_["resumed"]
    with pytest.raises(ResumeError, match=r"a run with tree [0-9a-f]+, not"):
        xs.LabelTree(tree=[*numbers[:-1], (47, "n0")], **asked).fit(data, model=tmp_path / "n")
    with pytest.raises(ResumeError):
        xs.LabelTree(**asked).fit(data, model=tmp_path / "n")
    assert clf.plan(data)["fits"]
    with pytest.raises(InputError, match="is a linear model, which has no tree"):
        xs.PPDSparse(max_rounds=1, memory_limit=LIMIT).fit(X, Y).model_.tree()


@needs_compiler
@pytest.mark.parametrize("more", [{}, {"class_weight": np.linspace(1.0, 2.0, 48)}])
def test_trainings_on_a_part_of_the_rows_have_the_tree_too(more: dict[str, Any], tmp_path: Path) -> None:
    """That which calibrates, and that which says what is predicted."""
    X, Y = topics(n=700)
    clf = xs.LabelTree(tree=[(i, f"n{i % 6}") for i in range(48)], C=1.0, memory_limit=LIMIT, **more)
    assert "threshold" in clf.fit(X, Y).report_["decision"]
    if not more:
        assert clf.fit(X, Y, calibrate=0.3).predict_proba(X[:2]).shape == (2, 48)


# ----------------------------------------------------------------------------------------------------------------------
# commands


@needs_compiler
def test_commands_take_a_tree_and_show_one(tmp_path: Path, here: Callable[..., Any]) -> None:
    X, Y = topics()
    (tmp_path / "names").write_text("".join(f"a label {i}\n" for i in range(48)))
    data = stored(tmp_path, X, Y, label_names=tmp_path / "names")
    words = ("--solver", "tree", "--memory-limit", "2GB", "--set", "C=1")
    made = ("--set", "max_leaf=6", "--set", "root=4", "--set", "branching=2")
    here("train", data.path, tmp_path / "m", *words, *made)
    (tmp_path / "t").write_text(run_forked("info", tmp_path / "m", "--tree"))
    assert here("info", tmp_path / "m", "--tree")["tree"][0] == ["node-0-0", "root"]
    assert here("plan", "train", data.path, tmp_path / "n", *words, "--tree", tmp_path / "t")["fits"]
    told = here("train", data.path, tmp_path / "n", *words, "--tree", tmp_path / "t")
    assert told["params"]["tree"] == "given"
    shown = [here("info", tmp_path / name)["shapes"][0] for name in "mn"]
    assert shown[0] == shown[1]
    assert [of["nodes"] for of in shown[0]["parents"]] == [1, 4, 8]
    assert shown[0]["parents"][2]["children"] == {"min": 6, "median": 6, "max": 6}
    counts = data.label_counts()
    for of in shown[0]["examples"]:
        assert of["labels"] == 12
        assert [count for _, count in of["frequent"]] == [counts[int(name.split()[-1])] for name, _ in of["frequent"]]
    text = run_forked("info", tmp_path / "n")
    assert f"node-0-{shown[0]['examples'][0]['node']}: 'a label " in text
    lines = (tmp_path / "t").read_text().splitlines()
    (tmp_path / "t").write_text("\n".join([*lines, "a label 3\tnode-0-0"]))
    said = here("train", data.path, tmp_path / "o", *words, "--tree", tmp_path / "t", fails=True)
    assert f"{tmp_path / 't'}:{len(lines) + 1}: 'a label 3' has another parent" in said
    (tmp_path / "t").write_text("\n".join(lines[:-1]))
    for solver, wrong in (
        ("tree", "lacks 1 of the 48 labels"),
        ("leml", "takes no tree"),
        ("ppdsparse", "takes no tree"),
    ):
        other = ("--solver", solver, "--memory-limit", "2GB")
        tree = tmp_path / ("t" if solver == "tree" else "whole")
        (tmp_path / "whole").write_text("\n".join(lines))
        assert wrong in here("train", data.path, tmp_path / "o", *other, "--tree", tree, fails=True)
    said = here("train", data.path, tmp_path / "o", *words, "--set", "tree=given", fails=True)
    assert "tree is 'given', and no tree is: give both (--tree FILE), or none" in said
