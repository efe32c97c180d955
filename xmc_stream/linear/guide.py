"""Groups of labels that a model asks beside its labels' own weights: how they lie on disk, and what they say of rows.

The folder `guide` of a model has weights (D x groups, csc) and a bias for each group, as a unit has for its classes, and
`groups`: of each clustering in turn, the group of each label. See `linear.kernels.guide` for what becomes of their scores.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from xmc_stream.errors import StoreError
from xmc_stream.kernels.blocks import CSR
from xmc_stream.linear.kernels.guide import NO_GROUPS, group_terms, no_terms
from xmc_stream.linear.kernels.scores import Tile
from xmc_stream.linear.tiles import make_tile
from xmc_stream.linear.weights import LinearWeights, hash_classes, new_unit
from xmc_stream.models.cache import shared_cache
from xmc_stream.models.kind import Checker
from xmc_stream.runtime.job import Phase, Receipt
from xmc_stream.store.chunks import read_small
from xmc_stream.store.matrix import Block, SparseMatrix
from xmc_stream.store.nodes import understood

GUIDE = "guide"  # the folder, and the attribute that says what it holds
MOST_GROUPS = 64


@dataclass(frozen=True)
class Guide:
    """The groups of an opened model, or that it has none: `clusterings` is 0 then, and what it says of rows is nothing.

    weight: of what the groups say together; clusterings, each of so many groups; bytes of their tile, their weights.
    """

    model: LinearWeights
    weight: float = 0.0
    clusterings: int = 0
    groups: int = 0
    tile: int = 0
    nnz: int = 0

    @classmethod
    def of(cls, model: LinearWeights) -> Guide:
        """What a model's attributes say. Raises StoreError where it cannot be."""
        about = model.attributes.get(GUIDE)
        if about is None:
            return cls(model)
        with understood(model.path / "zarr.json"):
            whole = [about[name] for name in ("clusterings", "groups", "tile", "weights")]
            guide = cls(model, float(about["weight"]), *whole)
            if not all(type(number) is int and number >= 0 for number in whole) or not guide.weight > 0:
                raise ValueError(f"{GUIDE}: {about}")
            if not 0 < guide.n_groups <= MOST_GROUPS:
                raise ValueError(f"{GUIDE}: {guide.n_groups} groups")
        return guide

    @property
    def path(self) -> Path:
        """Where they lie."""
        return self.model.path / GUIDE

    @property
    def n_groups(self) -> int:
        """Of all clusterings together."""
        return self.clusterings * self.groups

    @property
    def row_bytes(self) -> int:
        """What the groups say of a row."""
        return 4 * self.n_groups

    def groups_of(self, first: int, last: int) -> NDArray[np.uint8]:
        """Of labels [first, last): the group in each clustering (clusterings, last - first)."""
        if not self.clusterings:
            return NO_GROUPS
        n, k = self.clusterings, self.model.n_labels
        found = [read_small(self.path, "groups", n * k, np.uint8, slice(r * k + first, r * k + last)) for r in range(n)]
        groups = np.stack(found)
        low = np.arange(n)[:, None] * self.groups
        if ((groups < low) | (groups >= low + self.groups)).any():
            raise StoreError(f"{self.path / 'groups'} has groups that are none: it is damaged; train the model again")
        return groups

    def weights(self) -> SparseMatrix:
        """Weights of the groups (D x groups, csc)."""
        shape = (self.model.n_features, self.n_groups)
        return SparseMatrix(self.path / "weights").expect(shape, "csc_matrix", np.float32)

    def bias(self) -> NDArray[np.float32]:
        """Of each group."""
        return read_small(self.path, "bias", self.n_groups, np.float32)

    def make_tile(self) -> Tile:
        """The weights of all groups."""
        weights = self.weights()
        if weights.nnz != self.nnz:
            raise StoreError(
                f"{weights.path} has {weights.nnz} weights where {self.nnz} were noted: it is damaged; train the "
                "model again"
            )
        block = weights.block(0, self.n_groups)
        return make_tile(block.indptr, block.indices, block.values, self.bias(), self.model.n_features)

    def terms(self, x: Block, cache_bytes: int) -> NDArray[np.float32]:
        """What the groups say of the rows of a block (rows, groups), see `linear.kernels.guide`. cache_bytes: for all tiles."""
        if not self.clusterings:
            return self.terms_by(None, x)
        key = (str(self.model.path), GUIDE)
        with shared_cache(cache_bytes).use(key, self.tile, self.make_tile) as tile:
            return self.terms_by(tile, x)

    def terms_by(self, tile: Tile | None, x: Block) -> NDArray[np.float32]:
        """As `terms`, by the tile of `make_tile`; None without groups."""
        if tile is None:
            return no_terms(x.n)
        terms = np.empty((x.n, self.n_groups), np.float32)
        group_terms(CSR.of(x), tile, np.float32(self.weight / self.clusterings), terms)
        return terms

    def hash(self, update: Callable[[Any], None]) -> None:
        """Hash what scores depend on."""
        if not self.clusterings:
            return
        hash_classes(update, self.weights(), self.bias(), 0, self.n_groups)
        update(read_small(self.path, "groups", self.clusterings * self.model.n_labels, np.uint8).data)

    def verify(self, checker: Checker) -> Generator[Phase, list[Receipt], None]:
        """The weights as a matrix, each bias a number, each label in a group of each clustering."""
        if not self.clusterings:
            return
        shape = (self.model.n_features, self.n_groups)
        matrix = checker.matrix(self.path / "weights", shape, "csc_matrix")
        checker.expect_size(self.path / "bias", self.n_groups, f"{GUIDE}/bias")
        if checker.whole(self.path / "bias"):
            checker.finite(self.path / "bias")
        if checker.whole(self.path / "groups"):
            try:
                self.groups_of(0, self.model.n_labels)
            except StoreError as error:
                checker.damage.append(str(error))
        if matrix is not None:
            checker.expect(f"the weights of {self.path}", matrix.nnz, self.nnz)
            yield from checker.lines({GUIDE: matrix})


def write_guide(
    path: Path, n_features: int, weights: Iterable[Block], bias: NDArray[np.float32], groups: NDArray[np.uint8],
    dtype: DTypeLike = np.float32,
) -> None:  # fmt: skip
    """Write the folder. weights: blocks of groups in turn; groups (clusterings, K); dtype: of weights on disk."""
    with new_unit(path, n_features, len(bias), dtype) as writer:
        for block in weights:
            writer.weights.append(np.diff(block.indptr), block.indices, block.values)
        writer.bias[:] = bias
        writer.statistics["groups"] = groups.ravel()
