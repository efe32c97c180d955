"""A tree that is given: pairs of a child and its parent, and the levels that they become.

A word is the name of a label, or its number where labels have no names; any other word is an inner node. An inner node that
is a label gets a leaf of its own, before its other children; several roots hang under one. Children stand in the order of the
lines that name them.

All labels are on the last level. A branch that is shorter than others hangs lower: a node with h levels below it stands h
levels above the labels, and for itself on the levels between it and its parent. What is alone below its parent there needs no
classifier, see `Level.alone`. A level that divides no node of the one above is left out, and so is one of single labels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.errors import InputError
from xmc_stream.methods.weights import Given
from xmc_stream.runtime.job import Receipt
from xmc_stream.store.chunks import open_array
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.names import NamedIds, Names
from xmc_stream.system.memory import MemoryLimit, return_freed_memory
from xmc_stream.tree.parameters import TreeParameters
from xmc_stream.tree.structure import Structure

MOST_LEVELS = 64
_LONGEST_LINE = 1 << 14
_STEP = 1 << 16  # words that are taken between two looks at the limit
_WORD_BYTES, _NODE_BYTES = 250, 350  # of a word, and of what becomes of it, until the levels are made
_NAMED = 3  # labels that a message names
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
Tree = str | Path | Iterable[tuple[Any, Any]]


def structure_of(tree: Tree, dataset: Dataset, memory_limit: str | int | None = None) -> Structure:
    """The levels of a tree that is given: by the path of its text, or as pairs (child, parent).

    Raises InputError, with the file and line, for what is no tree of the dataset's labels.
    """
    made = _structure_of(tree, dataset, memory_limit)
    if dataset.n_labels > _STEP:  # whose words took much memory
        return_freed_memory()
    return made


def _structure_of(tree: Tree, dataset: Dataset, memory_limit: str | int | None) -> Structure:
    words = _Words(tree, memory_limit)
    labels = _labels_of(words, dataset)
    parents, inner = np.array(words.parents, np.int64), np.zeros(len(words.parents), np.bool_)
    inner[parents[parents >= 0]] = True
    words.refuse_cycle()
    _refuse_unfit(words, labels, inner, dataset)
    return _levels(words, parents, np.array(words.lines, np.int64), labels, inner)


class _Words:
    """Different words by their first line; parents: of each, -1 of a root; lines: that say so, -1 of a root."""

    def __init__(self, tree: Tree, memory_limit: str | int | None) -> None:
        self._path = Path(tree) if isinstance(tree, str | Path) else None
        self.what = "the tree" if self._path is None else str(self._path)
        self.numbers: dict[str, int] = {}
        self.parents: list[int] = []
        self.lines: list[int] = []
        limit, seen = MemoryLimit.of(memory_limit), 0
        for line, child, parent in _lines(self._path) if self._path is not None else _pairs(tree):
            c, p = self._number(child), self._number(parent)
            if self.parents[c] not in (-1, p):
                raise InputError(
                    f"{self.place(line)}: {child!r:.50} has another parent, {self.word(self.parents[c])!r:.50} "
                    f"({self.place(self.lines[c])}), and in a tree it has one: leave one of them out"
                )
            if self.parents[c] < 0:
                self.parents[c], self.lines[c] = p, line
            if len(self.parents) >= seen + _STEP:
                seen = len(self.parents)
                limit.check({"words": _WORD_BYTES * _STEP, "nodes": _NODE_BYTES * (seen + _STEP)}, "reading the tree")

    def _number(self, word: str) -> int:
        number = self.numbers.setdefault(word, len(self.parents))
        if number == len(self.parents):
            self.parents.append(-1)
            self.lines.append(-1)
        return number

    def place(self, line: int) -> str:
        """Where a line is, for messages."""
        return f"tree[{line}]" if self._path is None else f"{self._path}:{line}"

    def word(self, number: int) -> str:
        """A word by its number."""
        return next(word for word, mine in self.numbers.items() if mine == number)

    def refuse_cycle(self) -> None:
        """Raise InputError where a word lies below itself: with the last line of those that say so."""
        seen = [0] * len(self.parents)  # in which walk
        for walk, first in enumerate(range(len(seen)), 1):
            at = first
            while at >= 0 and not seen[at]:
                seen[at], at = walk, self.parents[at]
            if at < 0 or seen[at] != walk:
                continue
            round_trip = [at]
            while self.parents[round_trip[-1]] != at:
                round_trip.append(self.parents[round_trip[-1]])
            last = max(round_trip, key=self.lines.__getitem__)
            raise InputError(
                f"{self.place(self.lines[last])}: {self.word(last)!r:.50} lies below itself, in a cycle of "
                f"{len(round_trip)} line{'s' * (len(round_trip) > 1)}: leave one of them out"
            )


def _lines(path: Path) -> Iterator[tuple[int, str, str]]:
    """Number and words of each line of a file, plain or compressed."""
    from xmc_stream.convert.lines.files import numbered_lines, reading, stamps, unchanged

    with reading(path), unchanged(stamps([path])):
        for number, line in numbered_lines(path, _LONGEST_LINE):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                pair = _words_of(text) if len(line) < _LONGEST_LINE else None
            except UnicodeDecodeError:
                raise InputError(f"{path}:{number}: it is no UTF-8: save the file in UTF-8") from None
            if pair is None:
                raise InputError(
                    f"{path}:{number}: {text.strip()!r:.50} is not 'child parent': write two words, with a tab between them "
                    "where they have blanks"
                )
            if pair:
                yield number, *pair


def _words_of(text: str) -> tuple[str, str] | tuple[()] | None:
    """Child and parent of a line; nothing of a blank one and a comment, None of any other."""
    if text.strip() in ("", "#") or text.lstrip().startswith("# "):
        return ()
    words = [word.strip() for word in (text.split("\t") if "\t" in text else text.split())]
    return (words[0], words[1]) if len(words) == 2 and all(words) else None


def _pairs(tree: Any) -> Iterator[tuple[int, str, str]]:
    """Number and words of each pair."""
    try:
        pairs = [tuple(pair) for pair in tree]
    except TypeError:
        raise InputError(
            f"tree is {tree!r:.50}: give the path of a file of lines 'child parent', or a list of such pairs"
        ) from None
    for number, pair in enumerate(pairs):
        if len(pair) != 2 or not all(isinstance(word, str | Integral) and str(word) for word in pair):
            raise InputError(
                f"tree[{number}] is {pair!r:.50}: give a pair (child, parent) of names, or numbers of labels"
            )
        yield number, str(pair[0]), str(pair[1])


def _labels_of(words: _Words, dataset: Dataset) -> NDArray[np.int64]:
    """The label that each word is, -1 of those that are none."""
    names, every = dataset.label_names(), list(words.numbers)
    if names is not None:
        by_name, found = NamedIds(names), np.empty(len(every), np.int64)
        try:
            for low in range(0, len(every), _STEP):
                found[low : low + _STEP] = by_name.find(every[low : low + _STEP])
        except LookupError as error:
            raise InputError(f"{words.what}: {error}: give labels different names") from None
        return found
    numbers = (int(word) if _NUMBER.fullmatch(word) else -1 for word in every)
    return np.array([number if number < dataset.n_labels else -1 for number in numbers], np.int64)


def _refuse_unfit(words: _Words, labels: NDArray[np.int64], inner: NDArray[np.bool_], dataset: Dataset) -> None:
    """Raise InputError for leaves that are no labels, and labels that are missing."""
    strange = np.flatnonzero((labels < 0) & ~inner)
    if len(strange):
        first = min(strange.tolist(), key=words.lines.__getitem__)
        raise InputError(
            f"{words.place(words.lines[first])}: {words.word(first)!r:.50} is no label of {dataset.path}, and nothing lies "
            "below it: correct it, or leave the line out"
        )
    there = np.zeros(dataset.n_labels, np.bool_)
    there[labels[labels >= 0]] = True
    missing = np.flatnonzero(~there)
    if len(missing):
        names, some = dataset.label_names(), missing[:_NAMED]
        called = ", ".join(f"{name!r:.50}" for name in (some.tolist() if names is None else names.take(some)))
        raise InputError(
            f"{words.what} lacks {len(missing):,} of the {dataset.n_labels:,} labels of {dataset.path} ({called}"
            f"{', ...' if len(missing) > _NAMED else ''}): give each a line 'label parent'"
        )


def _levels(
    words: _Words, parents: NDArray[np.int64], lines: NDArray[np.int64], labels: NDArray[np.int64], inner: NDArray[np.bool_]
) -> Structure:  # fmt: skip
    """Words, a root above them all, and leaves of inner nodes that are labels: in the order of a walk, then by levels."""
    n, own = len(parents), np.flatnonzero(inner & (labels >= 0))
    root = n
    above = np.concatenate([np.where(parents < 0, root, parents), [-1], own])
    label = np.concatenate([np.where(inner, -1, labels), [-1], labels[own]])
    rank = np.concatenate([np.where(parents < 0, np.arange(n), lines), [-1], np.full(len(own), -1)])
    children = np.lexsort((rank, above))
    ptr = np.searchsorted(above[children], np.arange(len(above) + 1))
    walk = np.array(_walk(root, children.tolist(), ptr.tolist()), np.int64)
    height = np.array(_heights(walk.tolist(), above.tolist()), np.int64)
    while ptr[root + 1] - ptr[root] == 1 and label[children[ptr[root]]] < 0:
        root = int(children[ptr[root]])
    depth = int(height[root])
    if depth > MOST_LEVELS:
        raise InputError(f"{words.what} has {depth:,} levels: give a tree of {MOST_LEVELS} levels at most")
    leaves = label[walk] >= 0
    n_labels = int(leaves.sum())
    begin = np.empty(len(above), np.int64)
    begin[walk] = np.cumsum(leaves) - leaves
    highest, lowest = depth - height[above], depth - 1 - height  # levels on which a node stands
    bounds: list[NDArray[np.int64]] = []
    for i in range(depth - 1):
        of_level = np.append(np.sort(begin[(highest <= i) & (i <= lowest)]), n_labels)
        if (len(bounds[-1]) if bounds else 2) < len(of_level) <= n_labels:
            bounds.append(of_level)
    return Structure(label[walk][leaves], bounds)


def _walk(root: int, children: list[int], ptr: list[int]) -> list[int]:
    """All nodes, each before those below it, those below a node beside each other."""
    walk, waiting = list[int](), [root]
    while waiting:
        walk.append(waiting.pop())
        waiting.extend(reversed(children[ptr[walk[-1]] : ptr[walk[-1] + 1]]))
    return walk


def _heights(walk: list[int], above: list[int]) -> list[int]:
    """Levels below each node."""
    height = [0] * len(above)
    for node in reversed(walk[1:]):
        height[above[node]] = max(height[above[node]], height[node] + 1)
    return height


# ----------------------------------------------------------------------------------------------------------------------
# a structure as it travels: with what is given of a run, as a job's work, as pairs


@dataclass(frozen=True)
class GivenJob:
    """Write the tree that was given. given: the pack that has it; names: of its arrays."""

    given: str
    names: tuple[str, ...]
    out: str

    @property
    def key(self) -> str:
        """As of a tree that is made of splits."""
        return "structure/0"

    def run(self) -> Receipt:
        """Read, write."""
        arrays = {name: open_array(Path(self.given) / name) for name in self.names}
        Structure.of({name: array.read(0, array.size) for name, array in arrays.items()}).write(Path(self.out))
        return {}


def given_tree(given: Given | None) -> Structure | None:
    """The tree that comes with the data, if one does."""
    return None if given is None or given.tree is None else Structure.of(given.tree)


def check_tree(tree: Structure | None, p: TreeParameters, dataset: Dataset) -> None:
    """Raise InputError where parameters and what was given do not go together, or not with the dataset."""
    if (tree is None) != (p.tree is None):
        words = "tree is 'given', and no tree is" if tree is None else "a tree is given, and the parameter tree is None"
        raise InputError(words + ": give both (" + flags.TREE + " FILE), or none")
    if tree is not None and p.n_trees != 1:
        raise InputError(f"a tree is given, and n_trees is {p.n_trees}: set n_trees to 1")
    if tree is not None and tree.n_labels != dataset.n_labels:
        raise InputError(
            f"the tree has {tree.n_labels:,} labels, and {dataset.path} has {dataset.n_labels:,}: give one of its labels"
        )


def pairs_of(structure: Structure, names: Names | None) -> Iterator[tuple[str, str]]:
    """A tree as pairs (child, parent), which give it again. names: of the labels; None: they have numbers."""
    mark = ""
    while names is not None and any(name.startswith((f"{mark}root", f"{mark}node-")) for name in names):
        mark += "_"
    for level in structure.levels:
        parents = np.repeat(np.arange(level.n_parents), np.diff(level.ptr)).tolist()
        called = range(level.n_children) if not level.last else iter(_labels(structure.order, names))
        for child, parent in zip(called, parents, strict=True):
            word = child if level.last else f"{mark}node-{level.number}-{child}"
            yield str(word), f"{mark}node-{level.number - 1}-{parent}" if level.number else f"{mark}root"


def _labels(order: NDArray[np.int64], names: Names | None) -> Iterator[str]:
    """Names, or numbers, of labels in some order."""
    for low in range(0, len(order), _STEP):
        some = order[low : low + _STEP]
        ids, back = np.unique(some, return_inverse=True)
        called = list(map(str, ids.tolist())) if names is None else names.take(ids)
        yield from (called[i] for i in back.tolist())


def lines_of(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Pairs as the lines of a file. Raises InputError for a name that a line cannot have."""
    for pair in pairs:
        line = "\t".join(pair)
        if "\n" in line or _words_of(line) != pair:
            raise InputError(f"the label {pair[0]!r:.50} cannot be written in a line: take the pairs of Model.tree()")
        yield line
