"""Nothing that a store holds gets to a kernel unless it is within bounds; and no description of it breaks the reader."""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import xmc_stream as xs
from xmc_stream.errors import StoreError
from xmc_stream.factors.factors import Factor, new_factors, take
from xmc_stream.linear.model import LinearModel
from xmc_stream.linear.weights import LinearWeights
from xmc_stream.models.model import load_model
from xmc_stream.pdsparse.kernels.frank_wolfe import ActiveLabels
from xmc_stream.pdsparse.state import PassState, begin_with, new_segment, stored_tables
from xmc_stream.ppdsparse.candidates import CandidateRows, new_candidates, read_candidates
from xmc_stream.ppdsparse.state import UnitState, new_unit_state
from xmc_stream.store import matrix as matrix_file
from xmc_stream.store.chunks import are_apart
from xmc_stream.store.dataset import Dataset, open_dataset
from xmc_stream.store.encoding import ArrayWriter, MatrixWriter, new_store
from xmc_stream.store.inventory import BLANK, SEAL, fill_seal, seal
from xmc_stream.store.matrix import Buffer, SparseMatrix, stream
from xmc_stream.store.names import Names
from xmc_stream.store.nodes import Group
from xmc_stream.store.predictions import Predictions
from xmc_stream.store.transpose import transpose

BOUND = 9
LIMIT = "3GB"  # the process runs many tests


def write(path: Path, indptr: list[int], indices: list[int], data: Any = None) -> SparseMatrix:
    """A matrix of any arrays, true or not, as whoever means harm would write it."""
    writer = MatrixWriter(Group(path, {}), "csr_matrix", (None, BOUND), None if data is None else np.float32)
    writer.append(np.zeros(len(indptr) - 1, np.int64), np.array(indices, np.int32), data)
    writer.close()
    array(path, "indptr", np.array(indptr, np.int64))
    return SparseMatrix(path)


def array(folder: Path, name: str, values: NDArray[Any]) -> None:
    writer = ArrayWriter(Group(folder), name, values.dtype)
    writer.append(values)
    writer.close()


@st.composite
def spoilt(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """indptr and indices of a few lines, sound or with one or two numbers changed."""
    lines = draw(st.lists(st.sets(st.integers(0, BOUND - 1), max_size=BOUND), min_size=1, max_size=8))
    indptr = [0, *np.cumsum([len(line) for line in lines]).tolist()]
    indices = [j for line in lines for j in sorted(line)]
    for _ in range(draw(st.integers(0, 2))):
        values = draw(st.sampled_from([indptr, indices])) or indptr
        values[draw(st.integers(0, len(values) - 1))] = draw(
            st.sampled_from([-(2**31), -1, 0, 1, 2, 3, 5, 8, 9, 10, len(indices), len(indices) + 1, 2**31 - 1])
        )
    return indptr, indices


def in_order(indices: list[int]) -> bool:
    return all(0 <= j < BOUND for j in indices) and all(a < b for a, b in itertools.pairwise(indices))


def expected(indptr: list[int], indices: list[int], start: int, stop: int) -> list[list[int]] | None:
    """The lines [start, stop), None where they cannot be."""
    ends = indptr[start : stop + 1]
    whole = (start or ends[0] == 0) and (stop < len(indptr) - 1 or ends[-1] == len(indices))
    if not whole or ends != sorted(ends) or ends[0] < 0 or ends[-1] > len(indices):
        return None
    lines = [indices[a:b] for a, b in itertools.pairwise(ends)]
    return lines if all(map(in_order, lines)) else None


def got(read: Callable[[], Any]) -> list[list[int]] | None:
    try:
        block = read()
    except StoreError:
        return None
    return [block.indices[a:b].tolist() for a, b in itertools.pairwise(block.indptr)]


@settings(max_examples=150, deadline=None)
@given(spoilt(), st.data())
def test_lines_come_as_they_are_or_not_at_all(arrays: tuple[list[int], list[int]], data: st.DataObject) -> None:
    indptr, indices = arrays
    n = len(indptr) - 1
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    chosen = np.array(sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1))))
    size = data.draw(st.integers(1, 12))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix_file, "_CHECKED", data.draw(st.integers(1, 12)))
        matrix = write(Path(folder) / "m", indptr, indices, np.ones(len(indices), np.float32))
        want = expected(indptr, indices, start, stop)
        assert got(lambda: matrix.block(start, stop)) == want
        assert got(lambda: matrix.block(start, stop, Buffer(matrix, len(indices)))) == want
        try:
            flat = [j for some, _ in matrix.windows(start, stop, size) for j in some.tolist()]
            assert flat == [j for line in want or [] for j in line]
        except StoreError:
            assert want is None
        try:
            assert np.diff(matrix.ends(start, stop)).min(initial=0) >= 0
        except StoreError:
            assert want is None
        try:
            lines = [b.indices.tolist() for (b,) in stream((matrix,), 1 << 20, 0, n, 1)]
            assert lines == expected(indptr, indices, 0, n)
        except StoreError:
            assert expected(indptr, indices, 0, n) is None
        firsts, lasts = np.array(indptr)[chosen], np.array(indptr)[chosen + 1]
        mine = [indices[a:b] for a, b in zip(firsts, lasts, strict=True)]
        apart = are_apart(firsts, lasts - firsts, len(indices))
        flat_ends = np.stack([firsts, lasts], axis=1).ravel()
        assert apart == (0 <= firsts[0] <= lasts[-1] <= len(indices) and (flat_ends[1:] >= flat_ends[:-1]).all())
        assert got(lambda: matrix.gather(chosen)) == (mine if apart and all(map(in_order, mine)) else None)
        if want is not None:
            assert got(lambda: SparseMatrix(matrix.path, ordered=False).block(start, stop)) == want


def test_order_of_no_matter_is_not_looked_at(tmp_path: Path) -> None:
    write(tmp_path / "m", [0, 3, 4], [5, 2, 2, 0])
    block = SparseMatrix(tmp_path / "m", ordered=False).block(0, 2)
    assert block.indices.tolist() == [5, 2, 2, 0]
    write(tmp_path / "m", [0, 3, 4], [5, BOUND, 2, 0])
    with pytest.raises(StoreError, match="indices of lines from 0"):
        SparseMatrix(tmp_path / "m", ordered=False).block(0, 2)


def test_asking_ahead_of_where_there_is_nothing(tmp_path: Path) -> None:
    for indptr in ([0, 2**62, 2], [0, -5, 2], [2, 1, 2]):
        matrix = write(tmp_path / "m", indptr, [1, 2])
        with pytest.raises(StoreError):
            matrix.will_need(0, 1)


def test_values_that_are_not_finite_are_refused_where_they_must_be(tmp_path: Path) -> None:
    for value in (np.nan, np.inf, -np.inf):
        write(tmp_path / "m", [0, 2], [1, 2], np.array([3e38, value], np.float32))
        assert SparseMatrix(tmp_path / "m").block(0, 1).n == 1
        with pytest.raises(StoreError, match="not finite"):
            SparseMatrix(tmp_path / "m", finite=True).block(0, 1)
    write(tmp_path / "m", [0, 2], [1, 2], np.array([3e38, 3e38], np.float32))
    assert SparseMatrix(tmp_path / "m", finite=True).block(0, 1).n == 1


@pytest.mark.parametrize("counts", [[-1, 3, 0], [2**62, 2**62, 2], [2, 1], [2, 0, 0, 0], [1, 0, 1]])
def test_counts_that_lie_do_not_scatter_beyond_arrays(tmp_path: Path, counts: list[int]) -> None:
    writer = MatrixWriter(Group(tmp_path / "m", {}), "csr_matrix", (None, 3))
    writer.append(np.array([2]), np.array([0, 1]), np.ones(2, np.float32))
    writer.close()
    rows = SparseMatrix(tmp_path / "m")
    with pytest.raises(StoreError, match="counts"):
        transpose(rows, np.array(counts), Group(tmp_path / "t", {}), 1 << 20)


# --- what is not a matrix


def test_names_that_end_where_they_cannot(tmp_path: Path) -> None:
    for ends in ([2, 1, 3], [-1, 2, 3], [1, 2, 99]):
        Group(tmp_path, {})
        array(tmp_path, "ends", np.array(ends))
        array(tmp_path, "bytes", np.frombuffer(b"abc", np.uint8))
        with pytest.raises(StoreError, match="names end"):
            Names(tmp_path).read(0, 3)
        with pytest.raises(StoreError, match="names end"):
            list(Names(tmp_path).windows())
        with pytest.raises(StoreError, match="names end"):
            Names(tmp_path).take(np.arange(3))
    array(tmp_path, "ends", np.array([1, 2, 3]))
    array(tmp_path, "bytes", np.frombuffer(b"a\xffc", np.uint8))
    with pytest.raises(StoreError, match="UnicodeDecodeError"):
        Names(tmp_path).read(0, 3)
    array(tmp_path, "ends", np.array([1.0, 2.0]))
    with pytest.raises(StoreError):
        Names(tmp_path)


def test_a_factor_of_other_lines(tmp_path: Path) -> None:
    with new_factors(tmp_path / "f", {"W": 3}) as writers:
        writers["W"].append(np.ones(12, np.float32))
    path = str(tmp_path / "f" / "W")
    assert take(Factor(path, 3, 4), (0, 2)).shape[0] == 4
    for factor in (Factor(path, 3, 5), Factor(path, 3, 3), Factor(path, 2**40, 4)):
        for read in (lambda f=factor: f.read(0, 1), lambda f=factor: take(f, (0, 1))):
            with pytest.raises(StoreError, match=r"not \d lines"):
                read()
    array(tmp_path / "f", "W", np.full(12, np.nan, np.float32))
    with pytest.raises(StoreError, match="not finite"):
        Factor(path, 3, 4).read(0, 1)


def test_findings_that_are_not_as_many_as_counted(tmp_path: Path) -> None:
    def files(rows: list[int], counted: int, n_samples: int = 20) -> list[CandidateRows]:
        with new_candidates(tmp_path / "f", 2, n_samples, np.zeros(0, np.int64)) as writer:
            writer.rows.append(np.array([len(rows), 0]), np.array(rows), np.zeros(len(rows), np.float32))
            writer.counts[0] = counted
        return [CandidateRows(tmp_path / "f", 5, 7, 20)]

    room = np.array([9, 9])
    assert read_candidates(files([1, 4], 2), 5, 7, 20, room)[1].tolist() == [1, 4]
    for rows, counted, n in (
        ([1, 4], 1, 20), ([1, 4], 3, 20), ([1, 4], -1, 20), ([1, 4], 2, 21), ([4, 1], 2, 20), ([1, 20], 2, 20),
    ):  # fmt: skip
        with pytest.raises(StoreError):
            read_candidates(files(rows, counted, n), 5, 7, 20, room)


def test_a_state_of_other_classes_samples_or_features(tmp_path: Path) -> None:
    with new_unit_state(tmp_path / "s", 2, 20, 30) as writer:
        writer.active.append(np.array([1, 1]), np.array([3, 4]), np.ones(2))
        writer.weights.append(np.array([1, 1]), np.array([3, 4]), np.ones(2, np.float32))
    UnitState(tmp_path / "s", 2, 20, 30)
    for shape in ((1, 20, 30), (3, 20, 30), (2, 19, 30), (2, 20, 31)):
        with pytest.raises(StoreError):
            UnitState(tmp_path / "s", *shape)


def test_tables_and_dual_variables_that_cannot_be(tmp_path: Path) -> None:
    def tables(counts: list[int], labels: list[int], values: list[float]) -> None:
        with new_store(tmp_path / "t", {SEAL: BLANK}) as group:
            for name, some in (
                ("counts", np.array(counts, np.int32)), ("labels", np.array(labels, np.int32)), ("values", np.array(values)),
            ):  # fmt: skip
                array = ArrayWriter(group, name, some.dtype)
                array.append(some)
                array.close()
            fill_seal(group.path)

    tables([1, 2], [0, 3, 1], [1.0, 2.0, 3.0])
    assert len(list(stored_tables(tmp_path / "t", 2, 4, 1))) == 2
    for counts, labels, values in (
        ([1, 2], [0, 4, 1], [1.0, 2.0, 3.0]), ([1, 2], [0, -1, 1], [1.0, 2.0, 3.0]), ([-1, 4], [0, 3, 1], [1.0, 2.0, 3.0]),
        ([1, 3], [0, 3, 1], [1.0, 2.0, 3.0]), ([1, 2], [0, 3, 1], [1.0, 2.0]), ([1, 2], [0, 3, 1], [1.0, np.nan, 3.0]),
        ([3], [0, 3, 1], [1.0, 2.0, 3.0]),
    ):  # fmt: skip
        tables(counts, labels, values)
        with pytest.raises(StoreError):
            list(stored_tables(tmp_path / "t", 2, 4, 1))

    def segment(sizes: list[int], labels: list[int], strips: list[int]) -> PassState:
        with new_segment(tmp_path / "segment", 4) as (active, visited):
            active.append(np.array(sizes), np.array(labels), np.zeros(len(labels)))
            visited.append(np.array(strips))
        return PassState([tmp_path / "segment"], 3, 4, 1)

    assert segment([2, 0, 1], [3, 1, 0], [0, 1]).read(np.array([0, 1]), np.array([2, 1])).labels.tolist() == [3, 1, 0]
    for sizes, labels, strips in (
        ([2, 0, 1], [3, 1, 0], [0, 2]), ([2, 0, 1], [3, 1, 0], [0, 0]), ([2, 0, 1], [3, 1, 0], [-1, 1]),
        ([2, 0], [3, 1], [0, 1]), ([2, 0], [3, 1], [0]), ([2, 0, 1], [3, 4, 0], [0, 1]),
    ):  # fmt: skip
        with pytest.raises(StoreError):
            segment(sizes, labels, strips).read(np.array([0, 1]), np.array([2, 1]))
    rows = ActiveLabels(np.array([0, 2]), np.array([2, 1]), np.array([3, 1, 0], np.int32), np.zeros(3))
    assert begin_with(rows, np.array([0, 1, 2]), np.array([3, 0], np.int32))
    assert not begin_with(rows, np.array([0, 1, 2]), np.array([1, 0], np.int32))
    assert not begin_with(rows, np.array([0, 1, 3]), np.array([3, 0, 0], np.int32))


# --- descriptions


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset, a model of each kind, predictions."""
    folder = tmp_path_factory.mktemp("stores")
    X, Y = sp.random(60, 12, 0.4, "csr", np.float32, random_state=0), sp.csr_matrix(np.eye(6)[np.arange(60) % 6])
    data = xs.convert(X, folder / "data", labels=Y, memory_limit=LIMIT)
    linear = xs.PPDSparse(max_rounds=1, memory_limit=LIMIT).fit(data, model=folder / "linear").model_
    xs.LEML(rank=2, alternations=1, memory_limit=LIMIT).fit(data, model=folder / "lowrank")
    xs.predict(linear, data, folder / "predictions", k=2)
    return folder


def places(about: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(about) if isinstance(about, dict) else range(len(about)) if isinstance(about, list) else ():
        yield about, key
        yield from places(about[key])


def use(path: Path, kind: str) -> None:
    """Open all of it and read all of it."""
    if kind == "data":
        data = open_dataset(path)
        data.fingerprint, data.label_counts(), data.feature_counts(), data.row_norms(0, data.n_samples)
        for matrix in (data.X_rows(), data.Y_rows(), data.Y_columns()):
            matrix.block(0, matrix.n_lines)
    elif kind == "predictions":
        predictions = Predictions(path)
        predictions.rows(0, predictions.n_samples)
    else:
        model = load_model(path)
        model.decision  # noqa: B018
        if isinstance(model, LinearModel):
            model.tiles, model.unit_array(model.units[0])
            model.classes(*model.units[0])
        else:
            model.factors()
        model.digest()


@pytest.mark.parametrize("kind", ["data", "linear", "lowrank", "predictions"])
def test_whatever_a_description_says_it_is_used_or_refused_in_one_line(stores: Path, kind: str, tmp_path: Path) -> None:
    path = tmp_path / kind
    shutil.copytree(stores / kind, path)
    use(path, kind)
    absurd = [None, -1, 2**63, 0.5, "x", [], {}, [-1, 2**62], {"x": 1}]
    said: list[str] = []
    for file in sorted(path.rglob("zarr.json")):
        content = file.read_bytes()
        for number, (_, key) in enumerate(list(places(json.loads(content)))):
            for value in [*absurd[number % 3 :: 3], ...]:
                about = json.loads(content)
                holder, key = list(places(about))[number]
                if value is ...:  # not there
                    del holder[key]
                else:
                    holder[key] = value
                file.write_text(json.dumps(about))
                try:
                    use(path, kind)
                except StoreError as error:
                    said.append(str(error))
        for spoilt_content in (b"", b"[", b"[" * 100_000, b"\xff", content[:-9], b"null", b"[]", b'{"zarr_format": 3}'):
            file.write_bytes(spoilt_content)
            with suppress(StoreError):  # a group of nothing but arrays is not looked at
                use(path, kind)
        file.write_bytes(content)
    assert len(said) > 100
    assert all(line.isprintable() and str(path) in line for line in said)
    use(path, kind)


def test_a_description_without_end_is_not_read(stores: Path, tmp_path: Path) -> None:
    shutil.copytree(stores / "data", tmp_path / "data")
    with open(tmp_path / "data" / "X" / "rows" / "zarr.json", "ab") as file:
        file.truncate(1 << 34)
    with pytest.raises(StoreError, match="more than 16777216 bytes"):
        Dataset(tmp_path / "data").X_rows()


def test_counts_of_labels_are_those_of_columns(stores: Path, tmp_path: Path) -> None:
    shutil.copytree(stores / "data", tmp_path / "data")
    data = Dataset(tmp_path / "data")
    assert data.label_counts().tolist() == [10] * 6
    assert data.most_positives() == 10
    for counts in ([11, 9, 10, 10, 10, 10], [60, 0, 0, 0, 0, 0], [-10, 30, 10, 10, 10, 10]):
        array(data.path / "statistics", "label_counts", np.array(counts))
        seal(data.path)
        with pytest.raises(StoreError, match="label_counts has counts that cannot be"):
            data.label_counts()
        assert data.most_positives() == 10
    array(data.path / "statistics", "feature_counts", np.array([61] + [0] * 11))
    with pytest.raises(StoreError, match="feature_counts has counts"):
        data.feature_counts()


@pytest.mark.parametrize(
    "tiles",
    [
        [[[0, 5, 100, 10]]], [[[0, 6, 100, 10], [3, 7, 1, 1]]], [[[0, 6, -1, 10]]], [[[0, 6, 100]]], [[[1, 6, 100, 10]]], [],
        [[[0, 6, 100, 10]]] * 2, [[[0, 2, 1, 1], [4, 6, 1, 1]]], [[[0, 6, 100.0, 10]]], [0], 5,
    ],
)  # fmt: skip
def test_tiles_hold_every_class(stores: Path, tmp_path: Path, tiles: Any) -> None:
    shutil.copytree(stores / "linear", tmp_path / "m")
    Group(tmp_path / "m").update_attributes({"tiles": tiles})
    with pytest.raises(StoreError, match=r"zarr\.json is not what it must be"):
        LinearWeights(tmp_path / "m").tiles  # noqa: B018


def test_tiles_that_are_larger_than_they_say_are_not_made(stores: Path, tmp_path: Path) -> None:
    data = Dataset(stores / "data")
    for change, said in (
        (lambda span: span.__setitem__(2, 1), "takes"),
        (lambda span: span.__setitem__(3, 1), "weights"),
    ):
        shutil.copytree(stores / "linear", tmp_path / "m", dirs_exist_ok=True)
        spans = json.loads((tmp_path / "m" / "zarr.json").read_bytes())["attributes"]["tiles"]
        for span in spans[0]:
            change(span)
        Group(tmp_path / "m").update_attributes({"tiles": spans})
        seal(tmp_path / "m")
        with pytest.raises(StoreError, match=said):
            xs.predict(xs.load_model(tmp_path / "m"), data, tmp_path / "p", k=2)
