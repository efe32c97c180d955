"""Models of label trees: rows go down each tree, and the labels of the leaves that they reach are scored."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from xmc_stream.arguments import native_arguments, whole
from xmc_stream.errors import InputError, StoreError
from xmc_stream.linear.implied import IMPLIED, ImpliedLabels
from xmc_stream.models.kind import Checker, WeightArrays
from xmc_stream.models.model import Model
from xmc_stream.runtime.check import array_jobs, common_model_jobs
from xmc_stream.runtime.job import Job, Phase, Receipt
from xmc_stream.store.chunks import plain_arrays
from xmc_stream.store.dataset import Dataset
from xmc_stream.tree.exported import exported
from xmc_stream.tree.given import pairs_of
from xmc_stream.tree.guide import read_groups
from xmc_stream.tree.nodes import hash_unit
from xmc_stream.tree.picture import lines_of_picture, picture_of
from xmc_stream.tree.predict import HeldTrees, TreesWarmUp, TreeTask, TreeWeights, held_needs

if TYPE_CHECKING:
    import scipy.sparse


class TreeModel(TreeWeights, Model):
    """A model of label trees."""

    kind = "tree"
    _origin: TreeModel | None = None  # the model that this one is with another beam

    def _more(self) -> str:
        beam = "" if self._origin is None else f", beam {_spelled(self.beam)}"
        return f", {self.n_trees} tree{'s' * (self.n_trees > 1)}{beam}"

    def __reduce__(self) -> Any:
        return super().__reduce__() if self._origin is None else (TreeModel.with_beam, (self._origin, self.beam))

    def reopened(self) -> Model:
        """With the same beam."""
        now = super().reopened()
        return now if self._origin is None else now.with_beam(self.beam)

    @native_arguments
    def with_beam(self, beam: int | None) -> TreeModel:
        """See `Model`."""
        made = TreeModel(self.path, self.attributes)
        made._origin = self._origin or self  # whose files live as long
        made.beam = None if beam is None else whole("beam", beam, str(self.path))
        return made

    @property
    def searched(self) -> dict[str, Any]:
        """The beam."""
        return {"beam": _spelled(self.beam)}

    def _hash_weights(self, update: Callable[[Any], None]) -> None:
        structures = self.structures()
        for structure in structures:
            for values in (structure.order, *structure.bounds):
                update(np.ascontiguousarray(values, "<i8").data)
        for unit, _ in self.tiles:
            hash_unit(update, self.unit(unit, structures))
        if self.score["guide"]:
            update(read_groups(self.path, self.n_labels).data)
        ImpliedLabels.of(self).hash(update)

    def warm_up(self, evaluate: bool = False) -> Job:
        """Predict, and evaluate, a few rows by small trees."""
        return TreesWarmUp()

    def held_needs(self, room: int) -> dict[str, int]:
        """All trees; where there is no room, what says where nodes lie on disk."""
        return held_needs(self, room)

    def hold(self, room: int) -> HeldTrees:
        """The same."""
        return HeldTrees(self, room)

    def ranking(
        self, dataset: Dataset, k: int, filtered: bool, evaluate: bool, once: Callable[[Job], Receipt]
    ) -> TreeTask:
        """What it takes is foreseen without a probe."""
        return TreeTask(self, dataset, k, filtered, evaluate)

    def check_jobs(self) -> Sequence[Job]:
        """Seal, names, trees."""
        arrays = (array for part in ("units", IMPLIED) for array in plain_arrays(self.path / part))
        return [*common_model_jobs(self), *array_jobs(self.path, arrays)]

    def verify(self, checker: Checker) -> Generator[Phase, list[Receipt], None]:
        """Every unit is there and can be read, every bias a number or -inf."""
        try:
            structures = self.structures()
            for unit, _ in self.tiles:
                panels = self.unit(unit, structures)
                if not (np.isfinite(panels.bias) | (panels.bias == -np.inf)).all():
                    checker.damage.append(f"{unit.path(self.path)}: a bias is not a number, or -inf")
        except StoreError as error:
            checker.damage.append(str(error))
        yield from checker.lines({})
        yield from ImpliedLabels.of(self).verify(checker)

    def tree(self, number: int | None = None) -> list[tuple[str, str]]:
        """See `Model`."""
        if number is None and self.n_trees > 1:
            raise InputError(f"{self.path} has {self.n_trees} trees: ask for one in Python, as Model.tree(0)")
        if not 0 <= (number or 0) < self.n_trees:
            raise InputError(f"{self.path} has no tree {number}: its trees have the numbers 0 to {self.n_trees - 1}")
        return list(pairs_of(self.structures()[number or 0], self.label_names()))

    def pictured(self) -> tuple[dict[str, Any], list[str]]:
        """See `Kind`: how many children nodes have, and some nodes with their labels."""
        trees = [picture_of(self, structure) for structure in self.structures()]
        lines = [line for i, tree in enumerate(trees) for line in lines_of_picture(tree, i, self.n_trees)]
        return {"shapes": trees}, lines

    def to_scipy(self) -> scipy.sparse.csc_matrix:
        """Raises InputError: labels are scored on the way down."""
        raise InputError(f"{self.path} is a tree model, whose labels have no scores of their own")

    def weight_arrays(self) -> WeightArrays:
        """Of nodes and labels."""
        return exported(self)


def _spelled(beam: int | None) -> int | str:
    return "none" if beam is None else beam
