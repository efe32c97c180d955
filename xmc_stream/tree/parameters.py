"""Parameters of the label tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from xmc_stream.methods.parameters import GIVEN, ClassWeight, Flag, GivenTree, Number, Parameters, Whole, parameter

# of the known trees: a node is trained on the rows that have a label below its parent
_SIBLINGS = {"negatives": 0.0, "C": 2.0, "lam": 0.0, "guide": False}
_FEW_ROWS = 1 << 15
# where rows are few time is short anyway, and a model small: solved further, and more weights are kept
_OF_FEW = {"lam": 0.02, "prune": 0.05, "epochs": 60, "tol": 0.03}
_OF_MANY = {"lam": 0.05, "prune": 0.1, "epochs": 10, "tol": 0.1}


def _by_rows(name: str) -> str:
    return f" none: {_OF_MANY[name]:g}, or {_OF_FEW[name]:g} for fewer than {_FEW_ROWS:,} rows."


@dataclass(frozen=True)
class TreeParameters(Parameters):
    """Parameters of the label tree: what they do stands beside each."""

    solver = "tree"
    label = "LabelTree"
    title = "label tree: rows go down a tree of labels, and meet a few of them in place of all"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "parabel": {"n_trees": 3, "root": 2, "branching": 2, **_SIBLINGS},
        "bonsai": {"n_trees": 3, "root": 128, "branching": 128, **_SIBLINGS},
        "xr-linear": {"root": 16, "branching": 16, **_SIBLINGS},
    }
    grids: ClassVar[Mapping[str, Mapping[str, Sequence[Any]]]] = {
        name: {"C": (0.5, 1.0, 2.0, 4.0)} for name in ("tree", "parabel", "bonsai", "xr-linear")
    }

    n_trees: int = parameter(1, Whole("Trees, whose scores are averaged."))
    max_leaf: int = parameter(100, Whole("Labels of a leaf, at most, and at least half as many."))
    root: int = parameter(
        256,
        Whole("Children of the root, at most; a power of two counts. All rows see them.", least=2),
    )
    branching: int = parameter(16, Whole("Children of other nodes, at most; a power of two counts.", least=2))
    beam: int = parameter(
        10,
        Whole("Nodes of a level that a row goes on from; in training, twice as many on the last level of nodes."),
    )
    C: float | None = parameter(
        None,
        Number(
            "Weight of the loss of labels. none: one of 0.125, 0.25, ..., 32, by rows that some leaves hold out.",
            open_least=True,
            none=True,
        ),
    )
    positive_weight: float = parameter(
        1.0, Number("How many times C counts for rows that have the label.", open_least=True)
    )
    class_weight: str | None = parameter(
        None,
        ClassWeight(
            "What C and positive_weight are multiplied by for the positives of each label. given: the weights of "
            "--class-weight FILE; in Python a dict (label as in y: weight; others 1) or an array of one weight a label.",
            options=(GIVEN,),
            none=True,
            unsaid=True,
        ),
    )
    C_nodes: float = parameter(2.0, Number("Weight of the loss of nodes.", open_least=True))
    lam: float | None = parameter(
        None, Number("Weight of the l1 term of labels; nodes have none." + _by_rows("lam"), none=True)
    )
    prune: float | None = parameter(
        None,
        Number("The model leaves out weights |w_j| below it, the bias never. 0: off." + _by_rows("prune"), none=True),
    )
    negatives: float = parameter(
        2.0,
        Number(
            "Rows without a label below a node that its children are trained on, for each row with one, at most. They are "
            "drawn among the rows whose beam has the node."
        ),
    )
    guide: bool = parameter(
        True,
        Flag(
            "Where rows have several labels: whether groups of labels like it (docs/tree.md) and labels that imply it count "
            "for a label's score."
        ),
    )
    epochs: int | None = parameter(
        None,
        Whole("Visits of each row while children are solved, at most." + _by_rows("epochs"), none=True),
    )
    tol: float | None = parameter(
        None, Number("Steps are taken where the gradient of the dual is larger." + _by_rows("tol"), none=True)
    )
    tree: str | None = parameter(
        None,
        GivenTree(
            "A tree that is taken as it is, in place of one that is made (docs/tree.md). given: that of --tree FILE, lines "
            "`child parent`; in Python the path of such a file, or a list of pairs. max_leaf, root and branching count for "
            "nothing then.",
            options=(GIVEN,),
            none=True,
            unsaid=True,
        ),
    )

    def resolved(self, n_samples: int) -> TreeParameters:
        """With what rules decide for so many rows, C apart."""
        rule = _OF_FEW if n_samples < _FEW_ROWS else _OF_MANY
        chosen: dict[str, Any] = {name: value for name, value in rule.items() if getattr(self, name) is None}
        return replace(self, **chosen)

    def number(self, name: str) -> float:
        """Of resolved parameters: lam, prune, epochs or tol."""
        return float(getattr(self, name))

    @property
    def leaf_beam(self) -> int:
        """Leaves that a training row goes on from: rows that labels learn from are drawn among more than a beam reaches."""
        return 2 * self.beam

    @property
    def chosen_C(self) -> float:
        """C of labels; 1 where it is not chosen yet."""
        return 1.0 if self.C is None else self.C
