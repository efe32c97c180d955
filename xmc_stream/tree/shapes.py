"""The first phases of a training: vectors of labels, and from these the shapes of all trees and the groups of the guide.

A tree is made of splits of its vectors, or is given, or is that of the model that a warm start begins from.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from xmc_stream.methods.contract import WEIGHTS
from xmc_stream.runtime.job import Job, Phase, Receipt
from xmc_stream.runtime.plan import even_ranges
from xmc_stream.tree.clustering import SplitJob, StructureJob, Vectors, VectorsJob
from xmc_stream.tree.given import GivenJob
from xmc_stream.tree.guide import CLUSTERINGS, DEPTH, FIRST_CLUSTERING, GroupsJob, groups_path
from xmc_stream.tree.nodes import structure_path
from xmc_stream.tree.plan import Shape, TreePlan
from xmc_stream.tree.shared import Shared
from xmc_stream.tree.start import KeepGroupsJob, KeepTreeJob

Jobs = Generator[Phase, list[Receipt], list[Job]]


@dataclass(frozen=True)
class Shapes:
    """shape: of the trees; guided: whether there are groups. start: the model of a warm start, or ""; groups: if it has some.

    state: where a job of a kind leaves its pack. share: of the whole run, for these phases.
    """

    of: Shared
    n_labels: int
    shape: Shape
    sizes: TreePlan
    guided: bool
    start: str
    groups: bool
    state: Callable[[str, str], str]
    share: float

    def loop(self) -> Generator[Phase, list[Receipt], list[Receipt]]:
        """Phases of jobs; returns the receipts of the last one, of the trees in turn and of the groups."""
        vectors = yield from self._vectors()
        trees = range(self.of.parameters.n_trees)
        groups: list[SplitJob] = []
        if self.guided and not self.groups:
            groups = [self._split(vectors, FIRST_CLUSTERING + r, 0, 0, DEPTH) for r in range(CLUSTERINGS)]
        made = trees if not self.start and self.shape.given is None else range(0)
        parts, steps = list[list[SplitJob]](), self._steps()
        for number, (begin, end) in enumerate(steps):
            above = parts
            parts = [
                [
                    self._split(vectors, tree, node, begin, end, above[tree][node // 2].out if begin else "")
                    for node in range(1 << begin)
                ]
                for tree in made
            ]
            if jobs := [*itertools.chain.from_iterable(parts), *(groups if number == 0 else [])]:
                yield self._phase("splits", jobs, number, len(steps))
        joins = [*(self._tree(tree, parts, vectors) for tree in trees), *self._groups(groups, vectors)]
        return (yield self._phase("shapes", joins, 1, 1))

    def _steps(self) -> list[tuple[int, int]]:
        """From which depth to which the nodes of a tree are split by a job each: by one, until they are small."""
        deepest = max(self.shape.splits, default=0)
        edges = [*range(min(self.sizes.depth, deepest) + 1), deepest]
        return [(begin, end) for begin, end in itertools.pairwise(edges) if begin < end] or [(0, 0)]

    def _phase(self, name: str, jobs: Sequence[Job], number: int, steps: int) -> Phase:
        span = self.share * (0.5 + 0.5 * number / steps), self.share * (0.5 + 0.5 * min(number + 1, steps) / steps)
        return Phase(name, jobs, "splitting the labels" if not self.start else "keeping the trees", span, twice=True)

    def _vectors(self) -> Generator[Phase, list[Receipt], Vectors]:
        """Of all labels, where they are needed."""
        k = self.n_labels
        needed = self.shape.splits or self.guided or self.start
        spans = even_ranges(k, -(-k // self.sizes.labels)) if needed else []
        jobs = [
            VectorsJob(self.of, first, last, self.sizes.block_bytes, self.state("vectors", f"{first}-{last}"))
            for first, last in spans
        ]
        if jobs:
            yield Phase("vectors", jobs, "adding up the rows of labels", (0.0, self.share / 2), twice=True)
        return Vectors(tuple(first for first, _ in spans), tuple(job.out for job in jobs))

    def _split(self, vectors: Vectors, clustering: int, node: int, begin: int, end: int, before: str = "") -> SplitJob:
        out = self.state("split", f"{clustering}_{begin}-{end}_{node}")
        return SplitJob(
            vectors, self.n_labels, self.of.seed, clustering, node, begin, end, before, self.sizes.held, out
        )

    def _tree(self, tree: int, parts: list[list[SplitJob]], vectors: Vectors) -> Job:
        """The job that writes a tree."""
        out = str(structure_path(self.of.model, tree))
        if self.start:
            return KeepTreeJob(self.of, tree, self.start, vectors, out)
        if self.shape.given is not None:
            return GivenJob(str(Path(self.of.work) / WEIGHTS), tuple(self.shape.given.arrays()), out)
        return StructureJob(tree, tuple(self.shape.splits), tuple(job.out for job in parts[tree]), out)

    def _groups(self, parts: list[SplitJob], vectors: Vectors) -> list[Job]:
        """The job that writes the groups, if there are any."""
        out = str(groups_path(self.of.model))
        if not self.guided:
            return []
        if self.groups:
            return [KeepGroupsJob(self.of, self.start, vectors, out)]
        return [GroupsJob(self.n_labels, tuple(job.out for job in parts), out)]
