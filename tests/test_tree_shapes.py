"""Shapes of label trees, and weights as they lie on disk: against plain NumPy, however the work is cut; what is refused."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.compiler import unless_plain
from helpers.tiles import rows_of
from helpers.trees import array, flat, run_tree, stored, topics, unpacked
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import tree as twin

from xmc_stream.errors import StoreError
from xmc_stream.kernels.blocks import CSR
from xmc_stream.methods.weights import Given
from xmc_stream.store.encoding import ArrayWriter, new_pack
from xmc_stream.store.nodes import Group
from xmc_stream.tree import clustering
from xmc_stream.tree.clustering import DIMENSIONS, SplitJob, StructureJob, Vectors, VectorsJob
from xmc_stream.tree.kernels.records import Weights, margins
from xmc_stream.tree.nodes import Source, Unit, read_unit, write_unit
from xmc_stream.tree.parameters import TreeParameters
from xmc_stream.tree.structure import Level, Structure, depths_of

# uncompiled, numpy says so when a key wraps around
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|divide by zero) encountered:RuntimeWarning")

# ----------------------------------------------------------------------------------------------------------------------
# clustering


@pytest.mark.parametrize("weighted", [False, True])
def test_vectors_of_labels_are_sketched_sums_of_their_rows(tmp_path: Path, weighted: bool) -> None:
    unseen = (0, 5, 47)
    X, Y = topics(n=80, unseen=unseen)
    weights = np.linspace(0.5, 3.0, 80) if weighted else np.ones(80)
    p, of_rows = TreeParameters(max_leaf=12, C=1.0, epochs=1), Given(weights) if weighted else None
    run = run_tree(stored(tmp_path, X, Y), tmp_path, p, seed=3, given=of_rows)
    (job,) = run.of(VectorsJob)
    rows, labels = rows_of(X.toarray()), [Y[i].indices.tolist() for i in range(80)]
    want = twin.sketched(rows, labels, weights, 48, DIMENSIONS, 3)
    np.testing.assert_allclose(array(job.out, "vectors").reshape(48, -1), want, rtol=0, atol=1e-6)
    nothing = np.linalg.norm(want, axis=1) == 0
    assert nothing.tolist() == (Y.getnnz(axis=0) == 0).tolist()
    assert nothing[list(unseen)].all()
    for first, last, block_bytes in ((0, 7, 100), (7, 48, 1 << 20)):  # a few labels, and a few rows at a time
        replace(job, first=first, last=last, block_bytes=block_bytes, out=str(tmp_path / f"{first}")).run()
        part = array(tmp_path / f"{first}", "vectors").reshape(last - first, -1)
        assert part.tobytes() == array(job.out, "vectors").reshape(48, -1)[first:last].tobytes()


def some_vectors(n: int, seed: int) -> NDArray[np.float32]:
    """Of length one, about; some are zero, and some the same: they stand at the same place along any direction."""
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(n, DIMENSIONS)) * (rng.random((n, DIMENSIONS)) < 0.05)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
    vectors[rng.random(n) < 0.15] = 0.0
    same = rng.integers(0, n, n)
    return np.where(rng.random((n, 1)) < 0.3, vectors[same], vectors).astype(np.float32)


def in_packs(folder: Path, vectors: NDArray[np.float32], starts: list[int]) -> Vectors:
    folder.mkdir()
    for first, last in itertools.pairwise([*starts, len(vectors)]):
        with new_pack(folder / str(first)) as pack:
            pack.write("vectors", vectors[first:last].ravel())
    return Vectors(tuple(starts), tuple(str(folder / str(first)) for first in starts))


def nodes_of(pack: str | Path) -> list[list[int]]:
    labels, bounds = array(pack, "labels"), array(pack, "bounds")
    assert (bounds[0], bounds[-1]) == (0, len(labels))
    return [labels[low:high].tolist() for low, high in itertools.pairwise(bounds)]


@settings(max_examples=unless_plain(40, 4))
@given(st.data())
def test_splits_are_balanced_two_means(tmp_path_factory: Any, data: st.DataObject) -> None:
    """As the twin's, whether vectors are held or stream by, and whether some depths are split by jobs of their own."""
    n, seed = data.draw(st.integers(1, 60)), data.draw(st.integers(0, 99))
    end = data.draw(st.integers(0, n.bit_length() - 1))
    tree, middle = data.draw(st.sampled_from([0, 3, 130])), data.draw(st.integers(0, end))
    held, window = data.draw(st.sampled_from([0, n // 2, n])), data.draw(st.integers(1, 20))
    folder: Path = tmp_path_factory.mktemp("split")
    vectors = some_vectors(n, seed)
    packs = in_packs(folder / "vectors", vectors, [0, *([n // 3] if n > 3 else [])])
    sample = data.draw(st.sampled_from([2, 3, 7, clustering.SAMPLE]))

    def job(node: int, begin: int, end: int, before: str, held: int) -> SplitJob:
        out = str(folder / f"{begin}-{end}-{node}-{held}")
        return SplitJob(packs, n, seed, tree, node, begin, end, before, held, out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clustering, "WINDOW", window)
        for module in (clustering, twin):
            patch.setattr(module, "SAMPLE", sample)
        want = twin.split(vectors, seed, tree, 0, 0, end)
        whole, top = job(0, 0, end, "", n), job(0, 0, middle, "", held)
        for one in (whole, top):
            one.run()
        below = [job(node, middle, end, top.out, held) for node in range(1 << middle)]
        for one in below:
            one.run()
        of_depths = [twin.split(vectors, seed, tree, 0, 0, depth) for depth in range(end + 1)]
    assert sorted(flat(want)) == list(range(n))
    assert nodes_of(whole.out) == want
    assert [node for one in below for node in nodes_of(one.out)] == want
    for depth in range(end):  # siblings' sizes differ by one at most at every split
        sizes = [len(node) for node in of_depths[depth + 1]]
        assert all(abs(a - b) <= 1 for a, b in zip(sizes[::2], sizes[1::2], strict=True))
    depths = tuple(sorted(data.draw(st.sets(st.integers(1, end), max_size=3)))) if end else ()
    StructureJob(tree, depths, tuple(one.out for one in below), str(folder / "tree")).run()
    made = Structure.read(folder / "tree", n)
    assert made.order.tolist() == flat(want)
    for depth, level in zip(depths, made.levels, strict=False):
        mine = [sorted(made.order[low:high].tolist()) for low, high in itertools.pairwise(level.children)]
        assert mine == [sorted(node) for node in of_depths[depth]]


@pytest.mark.parametrize("seed", [0, 7])
def test_a_training_splits_labels_so_and_its_trees_are_different(tmp_path: Path, seed: int) -> None:
    X, Y = topics(k=50, unseen=(3, 4))
    p = TreeParameters(max_leaf=4, root=4, branching=2, n_trees=2, C=1.0, epochs=1)
    run = run_tree(stored(tmp_path, X, Y), tmp_path, p, seed)
    vectors = np.concatenate([array(job.out, "vectors") for job in run.of(VectorsJob)]).reshape(50, -1)
    for tree in (0, 1):
        structure = run.structure(tree)
        assert [len(level.parents) - 1 for level in structure.levels] == [1, 4, 8, 16]
        for depth, level in zip((2, 3, 4), structure.levels, strict=False):
            labels = [structure.order[low:high].tolist() for low, high in itertools.pairwise(level.children)]
            assert list(map(sorted, labels)) == list(map(sorted, twin.split(vectors, seed, tree, 0, 0, depth)))
    assert run.structure(0).order.tolist() != run.structure(1).order.tolist()


@given(st.integers(1, 10**6), st.integers(2, 300), st.integers(2, 1000), st.integers(2, 100))
def test_no_node_has_too_many_children(k: int, max_leaf: int, root: int, branching: int) -> None:
    depths = [0, *depths_of(k, max_leaf, root, branching)]
    steps = [1 << (below - above) for above, below in itertools.pairwise(depths)]
    assert all(step > 1 for step in steps)
    assert all(step <= most for step, most in zip(steps, [root] + [branching] * len(steps), strict=False))
    leaves = 1 << depths[-1]
    assert -(-k // leaves) <= max_leaf
    assert leaves == 1 or -(-k // (leaves // 2)) > max_leaf  # as few leaves as that takes
    # as few levels as that takes
    most = root.bit_length() - 1 + (len(steps) - 2) * (branching.bit_length() - 1)
    assert len(steps) < 2 or depths[-1] > most


def test_a_leaf_of_one_label(tmp_path: Path) -> None:
    assert depths_of(1, 1, 2, 2) == []
    assert depths_of(8, 1, 2, 2) == [1, 2, 3]


SHAPE = Structure(np.array([2, 0, 1, 4, 3, 5]), [np.array([0, 3, 6]), np.array([0, 2, 3, 4, 6])])


def test_a_shape_is_read_as_it_was_written(tmp_path: Path) -> None:
    SHAPE.write(tmp_path / "s")
    made = Structure.read(tmp_path / "s", 6)
    assert [level.last for level in made.levels] == [False, False, True]
    for level in (0, 1):
        of_labels, edges = made.nodes_of_labels(level), made.levels[level].children
        for place, label in enumerate(made.order):
            assert edges[of_labels[label]] <= place < edges[of_labels[label] + 1]
    assert made.levels[1].ptr.tolist() == [0, 2, 4]
    assert made.levels[2].ptr.tolist() == [0, 2, 3, 4, 6]


@pytest.mark.parametrize(
    ("order", "bounds"),
    [
        ([2, 0, 1, 4, 3, 3], [[0, 3, 6]]),  # a label twice
        ([2, 0, 1, 4, 3, 6], [[0, 3, 6]]),
        ([2, 0, 1, 4, 3, -1], [[0, 3, 6]]),
        ([2, 0, 1, 4, 3, 2**40], [[0, 3, 6]]),
        ([2, 0, 1, 4, 3], [[0, 3, 5]]),
        ([2, 0, 1, 4, 3, 5, 6], [[0, 3, 7]]),
        ([], []),
        ([2, 0, 1, 4, 3, 5], [[0, 3, 3, 6]]),  # a node without labels
        ([2, 0, 1, 4, 3, 5], [[0, 4, 2, 6]]),
        ([2, 0, 1, 4, 3, 5], [[0, 3]]),
        ([2, 0, 1, 4, 3, 5], [[1, 3, 6]]),
        ([2, 0, 1, 4, 3, 5], [[-1, 0, 3, 6]]),
        ([2, 0, 1, 4, 3, 5], [[0, 3, 6, 9]]),
        ([2, 0, 1, 4, 3, 5], [[]]),
        ([2, 0, 1, 4, 3, 5], [[0, 3, 6], [0, 2, 4, 6]]),  # a node of two parents
        ([2, 0, 1, 4, 3, 5], [[0.0, 2.5, 6.0]]),
    ],
)
def test_what_is_no_shape_is_refused(tmp_path: Path, order: list[int], bounds: list[list[float]]) -> None:
    SHAPE.write(tmp_path / "s")
    group = Group(tmp_path / "s")
    for name, values in {"order": order, **{f"bounds-{i}": some for i, some in enumerate(bounds)}}.items():
        kind = np.float64 if any(isinstance(value, float) for value in values) else np.int64
        writer = ArrayWriter(group, name, kind)
        writer.append(np.array(values, kind))
        writer.close()
    with pytest.raises(StoreError, match="is no tree of 6 labels: it is damaged; train the model again"):
        Structure.read(tmp_path / "s", 6)


# ----------------------------------------------------------------------------------------------------------------------
# records


def level_of(sizes: list[int]) -> Level:
    """Parents with so many children, each of one label."""
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Level(1, ends, np.arange(ends[-1] + 1), True)


def source_of(W: NDArray[np.float32], features: NDArray[np.int64], window: int) -> Source:
    """Of a parent: what is not 0, feature by feature, in windows. features: what the lines of W are."""
    at, children = np.nonzero(W)
    arrays = features[at].astype(np.int32), children.astype(np.int32), W[at, children]

    def windows() -> Iterator[Weights]:
        for begin in range(0, len(at), window):
            yield Weights(*(array[begin : begin + window] for array in arrays))

    return Source(len(at), windows)


@st.composite
def weights_of_parents(draw: st.DrawFn) -> tuple[int, NDArray[np.int64], list[NDArray[np.float32]]]:
    """D, some features, and the weights of each parent's children for these: any pattern, many or few, large and small."""
    d = draw(st.sampled_from([1, 2, 3, 60, 1 << 16, (1 << 16) + 1, 3_000_000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    features = np.sort(rng.choice(d, min(d, draw(st.integers(1, 40))), replace=False))
    sizes = st.one_of(st.integers(1, 40), st.sampled_from([15, 16, 17, 255, 256, 257, 600]))
    of_parents = []
    for m in draw(st.lists(sizes, min_size=1, max_size=4)):
        share = draw(st.sampled_from([0.0, 0.02, 0.25, 0.5, 0.9, 1.0]))
        W = rng.normal(size=(len(features), m)) * 10.0 ** rng.integers(-3, 3, (1, m))
        tiny = draw(st.sampled_from([0.0, 0.1]))
        W *= (rng.random(W.shape) < share) * np.where(rng.random(W.shape) < tiny, 1e-4, 1.0)
        of_parents.append(W.astype(np.float32))
    return d, features, of_parents


@settings(max_examples=unless_plain(60, 5))
@given(weights_of_parents(), st.data())
def test_records_have_the_rounded_weights(
    tmp_path_factory: Any, drawn: tuple[int, NDArray[np.int64], list[NDArray[np.float32]]], data: st.DataObject
) -> None:
    (d, features, of_parents), model = drawn, tmp_path_factory.mktemp("unit")
    level, rng = level_of([W.shape[1] for W in of_parents]), np.random.default_rng(0)
    first = data.draw(st.integers(0, len(of_parents) - 1))
    unit, mine = Unit(0, 1, first, len(of_parents)), of_parents[first:]
    low, W = int(level.ptr[first]), np.concatenate(mine, axis=1)
    bias = rng.normal(size=W.shape[1]).astype(np.float32)
    window, most = data.draw(st.sampled_from([5, 1000])), data.draw(st.sampled_from([1, 50, 10**6]))
    sources = [source_of(some, features, window) for some in mine]
    made = write_unit(unit.path(model), unit, level, d, bias, sources, most)
    panels = read_unit(model, unit, level, d)

    whole, scale = twin.rounded(W)
    assert made["nnz"] == np.count_nonzero(whole)
    assert panels.scale.tobytes() == scale.tobytes()
    assert (np.abs(whole * scale - W) <= scale * np.float32(0.5 + 1e-4)).all()
    assert np.diff(panels.children).max() <= 256
    got, seen = np.zeros_like(W), 0
    for of_features, children, values in unpacked(panels):
        got[np.searchsorted(features, of_features), children - low] = values
        assert np.isin(of_features, features).all()
        seen += len(values)
    assert seen == np.count_nonzero(whole)
    for (begin, end), size in zip(itertools.pairwise(panels.children - low), np.diff(panels.starts), strict=True):
        counts, m = np.count_nonzero(whole[:, begin:end], axis=1), end - begin
        full = (4 * counts >= m) & (m >= 16)
        assert size == (np.where(full, m, 2 * counts) + 3)[counts > 0].sum()
    assert got.tobytes() == (whole * scale + np.float32(0)).tobytes()

    z, signed, at = np.empty(256, np.float32), panels.records.view(np.int8), {int(j): t for t, j in enumerate(features)}
    for _ in range(5):
        some = {*rng.choice(features, len(features) // 2).tolist(), *rng.integers(0, d, 8).tolist()}
        x = rng.normal(size=len(some)).astype(np.float32)
        block = CSR(np.array([0, len(some)]), np.array(list(some), np.int32), x)
        known = [(at[j], value) for j, value in zip(some, x.tolist(), strict=True) if j in at]
        want = twin.LevelTwin((), whole, scale, bias).margins(known)
        for panel, (begin, end) in enumerate(itertools.pairwise(panels.children - low)):
            assert margins(0, block, panel, panels, signed, z) == end - begin
            assert z[: end - begin].tobytes() == want[begin:end].tobytes()


@pytest.fixture(scope="module")
def unit(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Unit, Level]:
    """A unit of three parents, in five panels."""
    model, level = tmp_path_factory.mktemp("unit"), level_of([20, 300, 300])
    unit, rng = Unit(0, 1, 0, 3), np.random.default_rng(0)
    parts = [source_of(sp_weights(rng, 30, m), np.arange(30), 100) for m in (20, 300, 300)]
    write_unit(unit.path(model), unit, level, 30, np.zeros(620, np.float32), parts, 1000)
    return model, unit, level


def sp_weights(rng: np.random.Generator, d: int, m: int) -> NDArray[np.float32]:
    return (rng.normal(size=(d, m)) * (rng.random((d, m)) < 0.1)).astype(np.float32)


def at(place: int, value: float) -> Any:
    """A change of an array: another value at a place."""

    def change(values: NDArray[Any]) -> NDArray[Any]:
        values[place] = value
        return values

    return change


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, lambda values: values[:-1]) for name in ("bits", "offsets", "starts", "records", "bias", "scale")),
        *((name, lambda values: np.append(values, values[-1:])) for name in ("bits", "offsets", "starts", "bias", "scale")),
        *((name, lambda values: values.astype(np.float64)) for name in ("bits", "offsets", "starts", "bias", "scale")),
        ("records", lambda values: values.astype(np.int8)),
        ("bits", at(1, 9)), ("bits", at(1, 255)), ("bits", at(0, 0)),
        ("offsets", at(0, 3)), ("offsets", at(2, 2**32 - 1)), ("offsets", at(-1, 0)),
        ("starts", at(0, 4)), ("starts", at(1, 10**6)), ("starts", at(2, -5)), ("starts", at(-1, 2**40)),
    ],
)  # fmt: skip
def test_what_is_no_unit_is_refused(unit: tuple[Path, Unit, Level], tmp_path: Path, name: str, change: Any) -> None:
    model, one, level = unit
    assert len(read_unit(model, one, level, 30).bits) == 5
    spoil(model / "units", tmp_path / "units", one, name, change)
    with pytest.raises(StoreError, match="is no unit of the tree: it is damaged; train the model again"):
        read_unit(tmp_path, one, level, 30)


def spoil(source: Path, target: Path, unit: Unit, name: str, change: Any) -> None:
    """Copy a unit, one of its arrays changed, with checksums that are right."""
    shutil.copytree(source, target)
    group = Group(target / unit.name)
    values = change(array(target / unit.name, name).copy())
    writer = ArrayWriter(group, name, values.dtype)
    writer.append(values)
    writer.close()


def test_panels_that_begin_before_the_records_are_refused(unit: tuple[Path, Unit, Level], tmp_path: Path) -> None:
    model, one, level = unit
    spoil(model / "units", tmp_path / "a", one, "starts", lambda values: values - 4)
    spoil(tmp_path / "a", tmp_path / "units", one, "records", lambda values: values[:-4])
    with pytest.raises(StoreError, match="is no unit of the tree"):
        read_unit(tmp_path, one, level, 30)


def test_records_that_reach_beyond_their_bucket_are_refused(unit: tuple[Path, Unit, Level], tmp_path: Path) -> None:
    """They would be read beyond the array."""
    model, one, level = unit
    panels = read_unit(model, one, level, 30)
    offsets = panels.offsets[panels.buckets[-2] :]
    last = int(panels.starts[-2]) + int(offsets[offsets < offsets[-1]].max())
    spoil(model / "units", tmp_path / "units", one, "records", at(last + 2, 200))
    with pytest.raises(StoreError, match="it is damaged"):
        read_unit(tmp_path, one, level, 30)
