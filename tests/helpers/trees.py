"""Trainings of label trees without an engine: their jobs, and what these left on disk."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

import xmc_stream as xs
from helpers.problems import LIMIT
from xmc_stream.methods.contract import WEIGHTS
from xmc_stream.methods.weights import Given
from xmc_stream.runtime.job import Job, Loop, Notes, run_here
from xmc_stream.runtime.plan import MemoryPlan
from xmc_stream.store.chunks import open_array
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.model import KIND, begin_model, finish_model, model_attributes
from xmc_stream.tree.kernels.records import FULL, ODD, Panels
from xmc_stream.tree.nodes import structure_path
from xmc_stream.tree.parameters import TreeParameters
from xmc_stream.tree.run import TreeRun
from xmc_stream.tree.solve import SolveJob
from xmc_stream.tree.streaming import StreamJob
from xmc_stream.tree.structure import Structure

J = TypeVar("J")
PLAN = MemoryPlan(2**40, 2**30, 1)


def topics(
    n: int = 300, d: int = 60, k: int = 48, labels: int = 2, seed: int = 0, unseen: Sequence[int] = ()
) -> tuple[sp.csr_matrix, sp.csr_matrix]:
    """Rows of length one with so many labels of one of six topics, whose features they share. unseen: no row has them."""
    rng = np.random.default_rng(seed)
    seen = np.setdiff1d(np.arange(k), unseen)
    X, Y = sp.random(n, d, 0.08, format="lil", random_state=seed), sp.lil_matrix((n, k))
    for i in range(n):
        mine = rng.choice(seen[seen % 6 == rng.integers(0, 6)], labels, replace=False)
        Y[i, mine] = 1.0
        for label in mine:
            X[i, label % 6 * 4 + rng.integers(0, 4)] = 1.0
            X[i, 24 + label % (d - 24)] = 1.0
    lengths = np.sqrt(np.asarray(X.multiply(X).sum(axis=1)))
    return sp.csr_matrix(X.multiply(1 / lengths), dtype=np.float32), sp.csr_matrix(Y, dtype=np.float32)


def stored(folder: Path, X: Any, Y: Any, **options: Any) -> Dataset:
    return xs.convert(X, folder / "data.xmc", labels=Y, memory_limit=LIMIT, **options)


@dataclass
class Trained:
    """A run that has ended: its jobs in turn, what it says; its state is still there."""

    dataset: Dataset
    work: Path
    p: TreeParameters
    seed: int
    jobs: list[Job]
    result: dict[str, Any]

    def of(self, kind: type[J]) -> list[J]:
        """The jobs of a kind."""
        return [job for job in self.jobs if isinstance(job, kind)]

    def structure(self, tree: int = 0) -> Structure:
        """The shape of a tree."""
        return Structure.read(structure_path(self.work, tree), self.dataset.n_labels)


def run_tree(
    dataset: Dataset, folder: Path, p: TreeParameters, seed: int = 0, plan: MemoryPlan = PLAN, notes: Notes | None = None,
    given: Given | None = None,
) -> Trained:  # fmt: skip
    """Train, one job after another in this thread. notes: of a run that goes on; given: weights.

    What the run removes on its way is there again behind it.
    """
    work, jobs, kept = folder / "model.partial", list[Job](), folder / "kept"
    kept.mkdir(parents=True, exist_ok=True)
    notes = Notes() if notes is None else notes
    begin_model(work)
    if given is not None:
        given.write(work / WEIGHTS)
    run = TreeRun(dataset, work, p, seed, plan, notes, given)

    def watched() -> Loop:
        loop, receipts = run.loop(), None
        while True:
            try:
                phase = loop.send(receipts)  # type: ignore[arg-type]
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            jobs.extend(phase.jobs)
            receipts = yield phase
            for pack in packs_of(phase.jobs):
                if pack.is_file() and not (link := kept / f"{pack.parent.name}-{pack.name}").exists():
                    link.hardlink_to(pack)

    result = run_here(watched(), notes)
    for pack in packs_of(jobs):
        if not pack.exists() and (link := kept / f"{pack.parent.name}-{pack.name}").exists():
            pack.hardlink_to(link)
    return Trained(dataset, work, p, seed, jobs, result)


def packs_of(jobs: Iterable[Job]) -> Iterator[Path]:
    """What jobs leave."""
    for job in jobs:
        if hasattr(job, "out"):
            yield Path(job.out)


def flat(lists: Iterable[Iterable[int]]) -> list[int]:
    """One list of all."""
    return [*itertools.chain.from_iterable(lists)]


def array(pack: str | Path, name: str) -> NDArray[Any]:
    """What a job left."""
    opened = open_array(Path(pack) / name)
    return opened.read(0, opened.size)


def solved(run: Trained, number: int, tree: int = 0) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Weights (D, children) and bias of a level, as they were solved, not rounded; nan where nothing was left."""
    level = run.structure(tree).levels[number]
    W, bias = np.full((run.dataset.n_features, level.n_children), np.nan), np.full(level.n_children, np.nan)
    for job in run.jobs:
        if isinstance(job, StreamJob) and (job.tree, job.level) == (tree, number):
            begin = int(level.ptr[job.parent])
            take_solved(job.out, [(begin + job.first, begin + job.last)], begin, W, bias)
        elif isinstance(job, SolveJob) and (job.tree, job.level) == (tree, number):
            ends = level.ptr.tolist()
            take_solved(job.out, [(ends[c], ends[c + 1]) for c in range(job.first, job.last)], None, W, bias)
    return W, bias


def take_solved(pack: str, spans: list[tuple[int, int]], base: int | None, W: Any, bias: Any) -> None:
    """Enter what a job left. spans: the children of each parent; base: what they are counted from, None for their first."""
    features, children, values, counts, biases = (
        array(pack, name) for name in ("features", "children", "values", "counts", "bias")
    )
    assert len(counts) == len(spans)
    assert counts.sum() == len(features)
    begin = at = 0
    for count, (first, last) in zip(counts.tolist(), spans, strict=True):
        mine = slice(begin, begin + count)
        W[:, first:last], bias[first:last] = 0.0, biases[at : at + last - first]
        W[features[mine], (first if base is None else base) + children[mine]] = values[mine]
        begin, at = begin + count, at + last - first
    assert at == len(biases)


def unpacked(panels: Panels) -> Iterator[tuple[Any, Any, Any]]:
    """Features, children and weights of each panel, bucket after bucket."""
    inverse, mask = pow(ODD, -1, 1 << panels.word), (1 << panels.word) - 1
    for panel, (low, high) in enumerate(itertools.pairwise(panels.children.tolist())):
        found: list[tuple[int, int, np.float32]] = []
        shift = panels.word - int(panels.bits[panel])
        places = panels.offsets[panels.buckets[panel] : panels.buckets[panel + 1]].astype(int) + panels.starts[panel]
        for bucket, (p, end) in enumerate(itertools.pairwise(places.tolist())):
            while p < end:
                rest, count = int(panels.records[p]) | int(panels.records[p + 1]) << 8, int(panels.records[p + 2])
                feature, p = ((bucket << shift | rest) * inverse) & mask, p + 3
                if count == FULL:
                    of, p = list(enumerate(panels.records[p : p + high - low])), p + high - low
                else:
                    pairs = panels.records[p : p + 2 * (count + 1)].reshape(-1, 2)
                    of, p = [(int(child), value) for child, value in pairs], p + 2 * (count + 1)
                for child, value in of:
                    if value:
                        scale = panels.scale[low + child - panels.children[0]]
                        found.append((feature, low + child, np.float32(np.uint8(value).view(np.int8)) * scale))
        columns = list(zip(*found, strict=True)) or [(), (), ()]
        yield np.array(columns[0], np.int64), np.array(columns[1], np.int64), np.array(columns[2], np.float32)


def finished(run: Trained) -> xs.Model:
    """Give what a run made the name of a model."""
    about = model_attributes(run.dataset, "tree", run.p.to_dict(), run.seed, run.result)
    finish_model(run.work, run.work.with_name("model"), {**about, KIND: "tree"})
    return xs.load_model(run.work.with_name("model"))
