"""Groups of labels that a model asks beside its labels' own weights: how they lie on disk, and what they say of rows.

The folder `guide` of a model has weights (D x groups, csc) and a bias for each group, as a unit has for its classes, and
`groups`: of each clustering in turn, the group of each label. See `linear.kernels.guide` for what becomes of their scores.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
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
from xmc_stream.linear.weights import LinearWeights, new_unit
from xmc_stream.models.cache import shared_cache
from xmc_stream.models.kind import Checker
from xmc_stream.runtime.job import Phase, Receipt
from xmc_stream.store.chunks import read_small
from xmc_stream.store.matrix import Block, SparseMatrix
from xmc_stream.store.nodes import understood

GUIDE = "guide"  # the folder, and the attribute that says what it holds
MOST_GROUPS = 64


@dataclass(frozen=True)
class GuideSizes:
    """weight: of what the groups say together; clusterings, each of so many groups; bytes of their tile, their weights."""

    weight: float
    clusterings: int
    groups: int
    tile: int
    weights: int

    @classmethod
    def of(cls, model: LinearWeights) -> GuideSizes | None:
        """What a model's attributes say; None for a model without groups. Raises StoreError where it cannot be."""
        about = model.attributes.get(GUIDE)
        if about is None:
            return None
        with understood(model.path / "zarr.json"):
            sizes = cls(float(about["weight"]), *(about[name] for name in ("clusterings", "groups", "tile", "weights")))
            whole = (sizes.clusterings, sizes.groups, sizes.tile, sizes.weights)
            if not all(type(number) is int and number >= 0 for number in whole) or not sizes.weight > 0:
                raise ValueError(f"{GUIDE}: {about}")
            if not 0 < sizes.n_groups <= MOST_GROUPS:
                raise ValueError(f"{GUIDE}: {sizes.n_groups} groups")
        return sizes

    @property
    def n_groups(self) -> int:
        """Of all clusterings together."""
        return self.clusterings * self.groups

    @property
    def row_bytes(self) -> int:
        """What the groups say of a row."""
        return 4 * self.n_groups


class Guide:
    """The groups of a model, opened."""

    def __init__(self, model: LinearWeights, sizes: GuideSizes) -> None:
        self.model, self.sizes, self.path = model, sizes, model.path / GUIDE

    @classmethod
    def of(cls, model: LinearWeights) -> Guide | None:
        """Of a model; None for one without groups."""
        sizes = GuideSizes.of(model)
        return None if sizes is None else cls(model, sizes)

    def groups(self, first: int, last: int) -> NDArray[np.uint8]:
        """Of labels [first, last): the group in each clustering (clusterings, last - first)."""
        n, k = self.sizes.clusterings, self.model.n_labels
        found = [read_small(self.path, "groups", n * k, np.uint8, slice(r * k + first, r * k + last)) for r in range(n)]
        groups = np.stack(found)
        low = np.arange(n)[:, None] * self.sizes.groups
        if ((groups < low) | (groups >= low + self.sizes.groups)).any():
            raise StoreError(f"{self.path / 'groups'} has groups that are none: it is damaged; train the model again")
        return groups

    def weights(self) -> SparseMatrix:
        """Weights of the groups (D x groups, csc)."""
        shape = (self.model.n_features, self.sizes.n_groups)
        return SparseMatrix(self.path / "weights").expect(shape, "csc_matrix", np.float32)

    def bias(self) -> NDArray[np.float32]:
        """Of each group."""
        return read_small(self.path, "bias", self.sizes.n_groups, np.float32)

    def make_tile(self) -> Tile:
        """The weights of all groups."""
        weights = self.weights()
        if weights.nnz != self.sizes.weights:
            raise StoreError(
                f"{weights.path} has {weights.nnz} weights where {self.sizes.weights} were noted: it is damaged; train the "
                "model again"
            )
        block = weights.block(0, self.sizes.n_groups)
        return make_tile(block.indptr, block.indices, block.values, self.bias(), self.model.n_features)

    @contextmanager
    def _tile(self, cache_bytes: int) -> Iterator[Tile]:
        key = (str(self.model.path), GUIDE)
        with shared_cache(cache_bytes).use(key, self.sizes.tile, self.make_tile) as tile:
            yield tile

    def terms(self, x: Block, cache_bytes: int) -> NDArray[np.float32]:
        """What the groups say of the rows of a block (rows, groups), see `linear.kernels.guide`. cache_bytes: for all tiles."""
        with self._tile(cache_bytes) as tile:
            return self.terms_by(tile, x)

    def terms_by(self, tile: Tile, x: Block) -> NDArray[np.float32]:
        """As `terms`, by the tile of `make_tile`."""
        terms = np.empty((x.n, self.sizes.n_groups), np.float32)
        group_terms(CSR.of(x), tile, np.float32(self.sizes.weight / self.sizes.clusterings), terms)
        return terms

    def hash(self, update: Callable[[Any], None]) -> None:
        """Hash what scores depend on."""
        matrix = self.weights()
        update(np.diff(matrix.ends(0, matrix.n_lines)).astype("<i8").data)
        update(self.bias().astype("<f4").data)
        for block in matrix.blocks(max(1 << 24, 16 * self.model.n_features)):
            update(block.indices.astype("<i8").data)
            update(block.values.data)
        update(read_small(self.path, "groups", self.sizes.clusterings * self.model.n_labels, np.uint8).data)

    def verify(self, checker: Checker) -> Generator[Phase, list[Receipt], None]:
        """The weights as a matrix, each bias a number, each label in a group of each clustering."""
        shape = (self.model.n_features, self.sizes.n_groups)
        matrix = checker.matrix(self.path / "weights", shape, "csc_matrix")
        checker.expect_size(self.path / "bias", self.sizes.n_groups, f"{GUIDE}/bias")
        if checker.whole(self.path / "bias"):
            checker.finite(self.path / "bias")
        if checker.whole(self.path / "groups"):
            try:
                self.groups(0, self.model.n_labels)
            except StoreError as error:
                checker.damage.append(str(error))
        if matrix is not None:
            checker.expect(f"the weights of {self.path}", matrix.nnz, self.sizes.weights)
            yield from checker.lines({GUIDE: matrix})


def terms_of(guide: Guide | None, x: Block, cache_bytes: int) -> NDArray[np.float32]:
    """What the groups say of a row block, nothing without groups."""
    return no_terms(x.n) if guide is None else guide.terms(x, cache_bytes)


def groups_of(guide: Guide | None, first: int, last: int) -> NDArray[np.uint8]:
    """The groups of some labels, none without groups."""
    return NO_GROUPS if guide is None else guide.groups(first, last)


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
