"""Matrices in memory and in binary files: what goes in comes back, what is wrong ends in one line, memory is kept."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.compiler import needs_compiler
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import sparse

import xmc_stream
from xmc_stream.convert import convert
from xmc_stream.convert.formats import matrix_files, memory, npz, numpy_arrays
from xmc_stream.convert.formats.registry import FORMATS
from xmc_stream.convert.matrices import sides
from xmc_stream.convert.options import ConvertOptions, Like, TextOptions
from xmc_stream.convert.pieces import new_piece
from xmc_stream.convert.source import PartRead, Settled
from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.store.dataset import open_dataset
from xmc_stream.system.memory import resident

ONES = sparse.csr_array(np.ones((2, 2)))


def read(source: Any, folder: Path, room: int = 10**8) -> tuple[Any, Any, Settled]:
    """X and Y as CSR, and what was settled, of a source read as a conversion reads it: parts out of order, pickled."""
    source.load_kernels()
    source.fit(room)
    parts = source.parts()
    done = {}
    for i in reversed(range(len(parts))):
        part = parts[i] if source.alone else pickle.loads(pickle.dumps(parts[i]))
        (side,) = part.sides
        notes: dict[str, Any] = {}
        with new_piece(folder / f"{i}{side}", valued=side == "X") as writer:
            for ((indptr, indices, data),) in part.blocks(notes):
                assert indptr[0] == 0
                assert indptr.dtype == np.int64
                assert data is None or data.dtype == np.float32
                writer.append(indptr, indices, data)
        done[i] = PartRead({side: writer.piece()}, notes)
    loop = source.settle(folder, [done[i] for i in range(len(parts))])
    with pytest.raises(StopIteration) as end:
        next(loop)
    settled: Settled = end.value.value
    source.close()
    return matrix(settled.x, settled.n_features), matrix(settled.y, settled.n_labels), settled


def matrix(pieces: list[Any], n_columns: int) -> Any:
    """Pieces as one CSR matrix, whose rows must be sorted and unique."""
    lengths = np.concatenate([np.empty(0, np.int64), *(w.copy() for p in pieces for w in p.lengths())])
    indices = np.concatenate([np.empty(0, np.int64), *(w.copy() for p in pieces for w in p.indices())])
    ones = np.ones(len(indices), np.float32)
    values = [w.copy() for p in pieces if p.valued for _, w in p.values()]
    data = np.concatenate(values) if values else ones[: len(indices)]
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    result = sparse.csr_array((data, indices, indptr), shape=(len(lengths), n_columns))
    assert result.has_canonical_format
    return result


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit, stored zeros included."""
    return (
        a.shape == b.shape
        and np.array_equal(a.indptr, b.indptr)
        and np.array_equal(a.indices, b.indices)
        and a.data.astype(np.float32).tobytes() == b.data.astype(np.float32).tobytes()
    )


def refused(make: Callable[[], Any], folder: Path, kind: type[Exception] = InputError, room: int = 10**8) -> str:
    """The one line in which opening or reading a source ends."""
    with pytest.raises(kind) as caught:
        read(make(), folder, room)
    message = str(caught.value)
    assert message.isprintable(), "more than one line"
    assert len(message) < 600
    return message


def no_zeros(Y: Any) -> Any:
    """Y as CSR of ones."""
    ones = sparse.csr_array((Y != 0).astype(np.float32))
    ones.eliminate_zeros()
    return ones


def triple(folder: Path, m: Any, data: bool = True, shape: bool = True, prefix: str = "") -> Path:
    """A CSR matrix as .npy files."""
    folder.mkdir(exist_ok=True)
    arrays = {"indptr": m.indptr, "indices": m.indices}
    arrays |= {"data": m.data} if data else {}
    arrays |= {"shape": np.array(m.shape)} if shape else {}
    for name, array in arrays.items():
        np.save(folder / f"{prefix}{name}.npy", array)
    return folder / f"{prefix}indptr.npy" if prefix else folder


def saved(folder: Path, m: Any, how: str, name: str) -> Path:
    """A CSR matrix in a file of one of the kinds."""
    path = folder / name
    if how.startswith("npz"):
        path = path.with_suffix(".npz")
        sparse.save_npz(path, m.asformat(how[4:] or "csr"), compressed="+" not in how)
    elif how == "dense":
        path = path.with_suffix(".npy")
        full = np.zeros(m.shape, m.data.dtype)
        full[np.repeat(np.arange(m.shape[0]), np.diff(m.indptr)), m.indices.astype(int)] = m.data
        np.save(path, full)
    elif how == "triple":
        triple(path, m)
    else:
        path = triple(path, m, prefix="a.")
    return path


def opened(path: Path, labels: Path | None, like: Like | None = None, **options: Any) -> Any:
    """A source of the format that recognises a file."""
    head = b"" if path.is_dir() else path.read_bytes()[: 2**16]
    found = [module for name, module in (("npz", npz), ("npy", numpy_arrays)) if FORMATS[name].recognises(path, head)]
    assert len(found) == 1
    named = (labels,) if labels else ()
    return matrix_files.open_source(found[0].open_side, [path], ConvertOptions(named, **options), like)


def opened_as(module: Any, path: Path, labels: Path) -> Any:
    """A source of a format that may not recognise the file."""
    return matrix_files.open_source(module.open_side, [path], ConvertOptions((labels,)), None)


def random_csr(rng: np.random.Generator, n: int, d: int, dtype: Any = np.float32, density: float = 0.2) -> Any:
    m = sparse.csr_array(np.where(rng.random((n, d)) < density, rng.normal(size=(n, d)), 0).astype(np.float32))
    m.data[rng.random(m.nnz) < 0.1] = 7
    return m.astype(dtype)


KINDS = ["npz", "npz+", "triple", "prefixed", "dense"]


@pytest.mark.parametrize("x_kind", KINDS)
@pytest.mark.parametrize("y_kind", KINDS)
def test_any_kind_of_features_goes_with_any_kind_of_labels(tmp_path: Path, x_kind: str, y_kind: str) -> None:
    rng = np.random.default_rng(5)
    X, Y = random_csr(rng, 50, 11), random_csr(rng, 50, 6, np.int8)
    Y.data[Y.data == -1] = -2  # -1 would say that a label is not there
    Y.eliminate_zeros()
    x, y = saved(tmp_path, X, x_kind, "x"), saved(tmp_path, Y, y_kind, "y")
    source = opened(x, y)
    assert (source.n_samples, source.n_features, source.n_labels) == (50, 11, 6)
    assert source.x_entries >= X.nnz
    assert source.y_entries >= Y.nnz
    got_x, got_y, settled = read(source, tmp_path / "work")
    assert same(got_x, X)
    assert same(got_y, no_zeros(Y))
    assert (settled.n_features, settled.n_labels) == (11, 6)
    assert "50 rows" in settled.said
    assert not settled.attributes
    files = [file for path in (x, y) for file in (path.rglob("*") if path.is_dir() else path.parent.glob(path.name))]
    assert source.bytes_in >= sum(file.stat().st_size for file in files)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 2**32), st.integers(0, 30), st.integers(1, 12), st.sampled_from(KINDS), st.sampled_from(KINDS),
    st.sampled_from(["f2", "f4", "f8", ">f8", "i1", ">i2", "u8", "?"]), st.sampled_from(["i4", "i8", ">i4", "u2", "u8"]),
    st.integers(1, 40), st.integers(1, 60),
)  # fmt: skip
def test_random_matrices_come_back(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    n: int,
    d: int,
    x_kind: str,
    y_kind: str,
    dtype: str,
    itype: str,
    block: int,
    part: int,
) -> None:
    tmp_path = tmp_path_factory.mktemp("random")
    rng = np.random.default_rng(seed)
    X, Y = random_csr(rng, n, d, density=rng.random()), random_csr(rng, n, 4, density=rng.random())
    X.data = (X.data if "f" in dtype else abs(X.data) * 10).astype(dtype)
    positive = no_zeros(Y)
    expected = sparse.csr_array((X.data.astype(np.float32), X.indices, X.indptr), shape=X.shape, copy=True)
    if x_kind == "dense":
        expected.eliminate_zeros()
    for m in (X, Y):
        order = np.concatenate(
            [np.empty(0, int), *(rng.permutation(np.arange(*m.indptr[i : i + 2])) for i in range(n))]
        )
        m.indices, m.data = m.indices[order].astype(itype), m.data[order]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sides, "PART", part)
        patch.setattr(sides, "BLOCK", block)
        source = opened(saved(tmp_path, X, x_kind, "x"), saved(tmp_path, Y, y_kind, "y"))
        got_x, got_y, _ = read(source, tmp_path / "work")
    assert same(got_x, expected)
    assert same(got_y, positive)


@pytest.mark.parametrize("kind", ["csr", "csc", "coo", "lil", "dok", "bsr", "dia"])
@pytest.mark.parametrize("how", ["array", "matrix", "npz", "npz+"])
def test_scipy_matrices_of_every_format_come_back(tmp_path: Path, kind: str, how: str) -> None:
    rng = np.random.default_rng(3)
    dense_x = rng.normal(size=(40, 12)) * (rng.random((40, 12)) < 0.3)
    dense_y = (rng.random((40, 6)) < 0.3) * rng.choice([1, -2, 7], size=(40, 6))
    make = sparse.csr_matrix if how == "matrix" else sparse.csr_array
    x, y = make(dense_x).asformat(kind), make(dense_y).asformat(kind)
    before = [m.copy() for m in (x, y)]
    if how.startswith("npz"):
        if kind in ("lil", "dok"):
            pytest.skip("save_npz does not take it")
        for name, m in (("x", x), ("y", y)):
            sparse.save_npz(tmp_path / f"{name}.npz", m, compressed=how == "npz")
        source = opened(tmp_path / "x.npz", tmp_path / "y.npz")
        assert source.attributes["source"] == "x.npz"
        assert source.attributes["source_labels"] == "y.npz"
    else:
        source = memory.open_memory(x, ConvertOptions(y), None)
        assert source.alone
        assert source.attributes["source"] == "scipy matrices"
        assert source.identity != memory.open_memory(x, ConvertOptions(y), None).identity
    got_x, got_y, _ = read(source, tmp_path / "work")
    assert (got_x.toarray() == dense_x.astype(np.float32)).all()
    assert (got_y.toarray() == (dense_y != 0)).all()
    for m, copy in zip((x, y), before, strict=True):
        assert (m != copy).nnz == 0


def test_values_of_other_types_unsorted_rows_and_stored_zeros(tmp_path: Path) -> None:
    x = sparse.csr_array((np.array([1, 0, 3]), np.array([2, 0, 1], np.int64), np.array([0, 2, 3, 3])), shape=(3, 3))
    y = sparse.csr_array((np.array([True, False, True]), np.array([1, 0, 0]), np.array([0, 1, 1, 3])), shape=(3, 2))
    y.indices[1:] = [1, 0]
    got_x, got_y, _ = read(memory.open_memory(x, ConvertOptions(y), None), tmp_path)
    assert got_x.toarray().tolist() == [[0, 0, 1], [0, 3, 0], [0, 0, 0]]
    assert got_y.toarray().tolist() == [[0, 1], [0, 0], [1, 0]]
    assert got_x.nnz == 3  # stored zeros of X are kept
    assert got_y.nnz == 2  # those of Y are not
    assert x.indices.tolist() == [2, 0, 1]


def csr(data: Any, indices: Any, indptr: Any, shape: tuple[int, int]) -> Any:
    """A csr_array that scipy has not looked at."""
    m = sparse.csr_array(shape, dtype=np.asarray(data).dtype)
    m.data, m.indices, m.indptr = np.asarray(data), np.asarray(indices), np.asarray(indptr)
    return m


BAD = [
    (ONES * 1j, ONES, "real numbers"),
    (ONES, sparse.csr_array(np.ones((3, 2))), "has 2 rows and"),
    (csr([1.0, np.nan], [0, 1], [0, 1, 2], (2, 2)), ONES, "value nan in row 1 (from 0)"),
    (csr([1.0, 1e300], [0, 1], [0, 1, 2], (2, 2)), ONES, "value 1e+300 in row 1 (from 0)"),
    (ONES, csr([np.nan, 1.0], [0, 1], [0, 1, 2], (2, 2)), "label in row 0 (from 0) is NaN"),
    (csr([1.0, 1.0], [1, 1], [0, 0, 2], (2, 2)), ONES, "row 1 (from 0) has index 1 twice"),
    (ONES, csr([0.0, 1.0], [1, 1], [0, 0, 2], (2, 2)), "row 1 (from 0) has index 1 twice"),
    (csr([1.0, 1.0], [0, 2], [0, 1, 2], (2, 2)), ONES, "fit its shape"),
    (csr([1.0, 1.0], [0, -1], [0, 1, 2], (2, 2)), ONES, "fit its shape"),
    (csr([1.0, 1.0], [0, 1], [0, 2, 1], (2, 2)), ONES, "fit its shape"),
    (csr([1.0, 1.0], [0, 1], [0, 1, 9], (2, 2)), ONES, "fit its shape"),
    (csr([1.0, 1.0], [0, 1], [1, 1, 2], (2, 2)), ONES, "fit its shape"),
    (csr([1.0, 1.0], [0, 1], [0, -1, 2], (2, 2)), ONES, "fit its shape"),
]


@pytest.mark.parametrize(("x", "y", "what"), BAD)
@pytest.mark.parametrize("how", ["memory", *KINDS[:4]])
def test_bad_matrices_end_in_one_line(tmp_path: Path, x: Any, y: Any, what: str, how: str) -> None:
    if how == "memory":
        message = refused(lambda: memory.open_memory(x, ConvertOptions(y), None), tmp_path / "work")
    else:
        paths = [saved(tmp_path, m, how, name) for m, name in ((x, "x"), (y, "y"))]
        message = refused(lambda: opened(*paths), tmp_path / "work")
        assert message.startswith(str(tmp_path))
    assert what in message


def test_arrays_that_are_no_matrix_end_in_one_line(tmp_path: Path) -> None:
    def message(x: Any, y: Any, **options: Any) -> str:
        return refused(lambda: memory.open_memory(x, ConvertOptions(y, **options), None), tmp_path)

    assert "labels must be" in message(ONES, "y.npz")
    assert "fit its shape" in message(csr([1.0, 1.0], [0, 1], [0, 2], (2, 2)), ONES)
    coo = sparse.coo_array((np.ones(2), ([1, 1], [0, 0])), shape=(2, 2))
    assert "X: row 1 (from 0) has index 0 twice" in message(coo, ONES)
    assert "base=1" in message(ONES, ONES, base=1)
    assert "skip=True" in message(ONES, ONES, skip=True)
    assert "n_labels 1" in message(ONES, ONES, n_labels=1)
    assert "label_key are of AnnData" in message(ONES, ONES, label_key="kind")
    assert "options of raw text are of jsonl" in message(ONES, ONES, text=TextOptions())


@pytest.mark.parametrize("how", ["csr", "coo", "npz", "npz+coo"])
def test_duplicates_are_added_up_when_told(tmp_path: Path, how: str) -> None:
    entries = np.array([1, 2, 4, 8, 16, 32, 64]), (np.array([0, 0, 0, 1, 3, 3, 3]), np.array([3, 1, 3, 0, 2, 2, 2]))
    coo = sparse.coo_array(entries, shape=(4, 5))
    order = csr(coo.data, coo.col, [0, 3, 4, 4, 7], (4, 5))
    x = coo if "coo" in how else order
    if how.startswith("npz"):
        path = tmp_path / "x.npz"
        sparse.save_npz(path, x, compressed="+" not in how)
        source = opened(path, path, sum_duplicates=True)
    else:
        source = memory.open_memory(x, ConvertOptions(x, sum_duplicates=True), None)
    got_x, got_y, settled = read(source, tmp_path)
    assert got_x.toarray().tolist() == coo.toarray().tolist()
    assert got_y.toarray().tolist() == (coo.toarray() != 0).tolist()
    assert settled.attributes == {"summed_duplicates": 6}
    assert not coo.has_canonical_format
    huge = csr(np.full(2, 3e38), [1, 1], [0, 2], (1, 2))
    one = sparse.csr_array(np.ones((1, 1)))
    assert "not finite" in refused(
        lambda: memory.open_memory(huge, ConvertOptions(one, sum_duplicates=True), None), tmp_path
    )


def test_a_training_set_fixes_the_sizes(tmp_path: Path) -> None:
    like = Like("train.xmc", tmp_path, n_features=3, n_labels=2, normalize="none")
    x, y = sparse.csr_array(np.diag(np.arange(1.0, 6))), sparse.csr_array(np.eye(5))
    for path, m in (("x.npz", x), ("y.npz", y)):
        sparse.save_npz(tmp_path / path, m)
    paths = tmp_path / "x.npz", tmp_path / "y.npz"
    message = refused(lambda: opened(*paths, like=like), tmp_path)
    assert "y.npz: index 2 in row 2 (from 0) is not below the number of labels K = 2, which comes from like" in message
    got_x, got_y, settled = read(opened(*paths, like=like, drop_unseen=True), tmp_path)
    assert got_x.toarray().tolist() == x.toarray()[:, :3].tolist()
    assert got_y.toarray().tolist() == y.toarray()[:, :2].tolist()
    assert settled.attributes == {"dropped_features": 2, "dropped_labels": 3}
    got_x, got_y, _ = read(opened(*paths, n_features=9, n_labels=7), tmp_path)
    assert (got_x.shape, got_y.shape) == ((5, 9), (5, 7))


def test_several_files_are_one_set(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    X, Y = random_csr(rng, 30, 7), no_zeros(random_csr(rng, 30, 5))
    x = [saved(tmp_path, X[:10], "npz", "x0"), saved(tmp_path, X[10:], "npz+", "x1")]
    y = (saved(tmp_path, Y[:10], "triple", "y0"), saved(tmp_path, Y[10:], "dense", "y1"))
    source = matrix_files.open_source(npz.open_side, x, ConvertOptions(y), None)
    assert source.attributes["source"] == ["x0.npz", "x1.npz"]
    got_x, got_y, _ = read(source, tmp_path / "work")
    assert same(got_x, X)
    assert same(got_y, Y)

    def refusal(labels: tuple[Path, ...]) -> str:
        return refused(lambda: matrix_files.open_source(npz.open_side, x, ConvertOptions(labels), None), tmp_path)

    assert "2 files of features and 1 of labels" in refusal(y[:1])
    assert "name the file of its labels" in refusal(())


def test_bad_npz_files_end_in_one_line(tmp_path: Path) -> None:
    good, plain = tmp_path / "good.npz", tmp_path / "plain.npz"
    sparse.save_npz(good, ONES)
    sparse.save_npz(plain, ONES, compressed=False)
    content = good.read_bytes()

    def write(name: str, content: bytes) -> Path:
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    def made(name: str, **arrays: Any) -> Path:
        np.savez(tmp_path / name, **arrays)
        return tmp_path / f"{name}.npz"

    def zipped(name: str, method: int = zipfile.ZIP_DEFLATED, **members: bytes) -> Path:
        with zipfile.ZipFile(good) as old, zipfile.ZipFile(tmp_path / name, "w") as new:
            for info in old.infolist():
                old_content = old.read(info)
                new.writestr(info.filename, members.get(info.filename[:-4], old_content), method)
        return tmp_path / name

    def header(text: str) -> bytes:
        return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()

    def shaped(shape: Any, descr: str = "'<f8'") -> bytes:
        return header(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}")

    array: dict[str, Any] = {"format": b"csr", "shape": (2, 2), "data": [1.0], "indices": [0], "indptr": [0, 1, 1]}
    ones = np.ones(4).tobytes()
    bad = {
        made("other", a=np.ones((3, 1)), b=np.ones(3)): "it has the arrays a, b",
        made("empty"): "it has the arrays (none)",
        made("kind", **{**array, "format": b"xyz"}): "format 'xyz'",
        made("pickle", **{**array, "data": np.array([{}])}): "Python objects, which are never unpickled",
        made("shape", **{**array, "shape": (-1, 2)}): "shape -1 x 2",
        made("rows", **{**array, "shape": (10**15, 2)}): "3 items of indptr for 1000000000000000 rows",
        made("without", **{key: value for key, value in array.items() if key != "indices"}): "no one-dimensional array",
        made("without2", **{k: v for k, v in array.items() if k != "indices"} | {"format": b"csc"}): "save it again",
        made("floats", **{**array, "indices": [0.0]}): "indices of type float64",
        made("times", **{**array, "data": np.array(["2020"], "M8[s]")}): "real numbers",
        made("outside", **{**array, "indices": [77]}): "fit its shape",
        made("outside2", **{**array, "indices": [77], "indptr": [0, 1, 1], "format": b"csc"}): "fit its shape",
        made("huge", **{**array, "indptr": np.array([0, 2**64 - 1, 1], np.uint64)}): "fit its shape",
        made("huge2", **{**array, "indices": np.array([2**63 + 1], np.uint64)}): "out of range",
        made("unicode", **{**array, "format": b"\xff"}): "save it again",
        zipped("lying", data=shaped("(1000000000000000,)")): "an array of shape (1000000000000000,)",
        zipped("lying2", indptr=shaped("(1000000000000000,)", "'<i8'")): "an array of shape (1000000000000000,)",
        zipped("negative", data=shaped("(-3,)")): "an array of shape (-3,)",
        zipped("long", data=b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b" " * 10**5): "reading array header",
        zipped("deep", data=header("(" * 9000)): "save it again",
        zipped("words", data=header("{'descr': 1 +, ")): "save it again",
        zipped("nothing", data=b""): "magic string",
        zipped("type", data=shaped("(2,)", "'q99'")): "save it again",
        zipped("rest", data=shaped("(2,)") + b"1" * 99): "an array of shape (2,)",
        zipped("bzip2", zipfile.ZIP_BZIP2): "compression 12",
        zipped("lzma", zipfile.ZIP_LZMA): "compression 14",
        write("cut.npz", content[: len(content) // 2]): "save it again",
        write("bits.npz", plain.read_bytes().replace(ones, np.full(4, 3.0).tobytes())): "Bad CRC-32",
        write("bits2.npz", content[:300] + bytes([content[300] ^ 255]) + content[301:]): "save it again",
    }
    for path, what in bad.items():
        for x, y in ((path, good), (good, path)):
            message = refused(lambda x=x, y=y: opened(x, y), tmp_path / "work")  # type: ignore[misc]
            assert message.startswith(str(path)), message
            assert what in message, message
    assert "missing.npz" in refused(lambda: opened(good, tmp_path / "missing.npz"), tmp_path)
    assert "not a file of labels" in refused(lambda: opened(good, write("text", b"\n0:1\n")), tmp_path)


def test_npz_of_many_other_files_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "many.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(10000):
            archive.writestr(f"{i}" + "x" * 100, b"")
    assert "is not a sparse matrix" in refused(lambda: opened(path, path), tmp_path)


def test_npz_with_a_large_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "many.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(10000):
            archive.writestr(f"{i}" + "x" * 100, b"")
    assert "more files in it" in refused(lambda: opened(path, path), tmp_path)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_npz_files_end_in_one_line_or_a_right_result(tmp_path: Path, data: Any) -> None:
    rng = np.random.default_rng(1)
    X = random_csr(rng, 9, 5)
    stored = data.draw(st.booleans())
    sparse.save_npz(tmp_path / "x.npz", X, compressed=not stored)
    content = bytearray((tmp_path / "x.npz").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.sampled_from([len(content), data.draw(st.integers(0, len(content)))]))]
    (tmp_path / "bad.npz").write_bytes(content)
    try:
        source = opened_as(npz, tmp_path / "bad.npz", tmp_path / "x.npz")
        got_x, _, _ = read(source, tmp_path / "work")
    except InputError as error:
        message = str(error)
    else:  # a byte that says nothing of the arrays, or the sizes, which have no other copy
        message = ""
        assert np.array_equal(got_x.indices, X.indices)
        assert np.array_equal(got_x.data, X.data)
    assert not message or message.isprintable()


def test_damaged_npy_files_end_in_one_line_or_a_matrix(tmp_path: Path) -> None:
    x, y = tmp_path / "x.npy", tmp_path / "y.npy"
    np.save(x, np.ones((20, 3), np.float32))
    np.save(y, np.arange(20) % 3)
    content = x.read_bytes()
    read_well = 0
    for seed in range(300):
        rng = random.Random(seed)
        changed = bytearray(content)
        for _ in range(rng.choice([1, 3, 20])):
            changed[rng.randrange(rng.choice([128, len(changed)]))] = rng.randrange(256)
        x.write_bytes(changed)
        try:
            read_well += read(opened_as(numpy_arrays, x, y), tmp_path / "work")[0].shape[0] == 20
        except InputError as error:
            message = str(error)
            if not message.isprintable():
                raise
    assert 0 < read_well < 300


def test_stored_arrays_are_cut_and_their_checksums_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "PART", 90)
    X = random_csr(np.random.default_rng(7), 600, 30)
    sparse.save_npz(tmp_path / "x.npz", X, compressed=False)
    source = opened(tmp_path / "x.npz", tmp_path / "x.npz")
    source.fit(10**8)
    assert len(source.parts()) > 20
    assert same(read(source, tmp_path / "work")[0], X)
    content = (tmp_path / "x.npz").read_bytes()
    at = content.index(X.data.tobytes()) + 9000
    (tmp_path / "bad.npz").write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    message = refused(lambda: opened(tmp_path / "bad.npz", tmp_path / "x.npz"), tmp_path / "work")
    assert "Bad CRC-32 for file 'data.npy'" in message


def test_class_ids_are_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "PART", 3)
    X = np.array([[1, 0], [-0.0, 2], [0, 0], [np.float32(1e-46), 1e-45]], np.float64)
    np.save(tmp_path / "x.npy", X)
    ids = np.array([2, 0, 2, 5])
    for dtype in ("i8", "u2", ">i4", "i1"):
        np.save(tmp_path / "y.npy", ids.astype(dtype))
        source = opened(tmp_path / "x.npy", tmp_path / "y.npy")
        assert source.n_labels is None
        got_x, got_y, settled = read(source, tmp_path / "work")
        assert settled.n_labels == 6
        assert got_y.toarray().tolist() == np.eye(6)[ids].tolist()
        assert got_x.nnz == 3  # neither zero nor -0.0 nor what is zero in float32
        assert same(got_x, sparse.csr_array(X.astype(np.float32)))
    assert read(opened(tmp_path / "x.npy", tmp_path / "y.npy", n_labels=9), tmp_path)[2].n_labels == 9
    np.save(tmp_path / "y.npy", ids + 2**60)
    with pytest.raises(MemoryLimitError, match="labels"):
        convert(tmp_path / "x.npy", tmp_path / "d.xmc", labels=tmp_path / "y.npy")
    np.save(tmp_path / "y.npy", ids)
    assert "is not below the number of labels K = 5" in refused(
        lambda: opened(tmp_path / "x.npy", tmp_path / "y.npy", n_labels=5), tmp_path
    )
    np.save(tmp_path / "y.npy", [0, -1, 0, 0])
    assert "index -1 in row 1 (from 0)" in refused(lambda: opened(tmp_path / "x.npy", tmp_path / "y.npy"), tmp_path)
    np.save(tmp_path / "y.npy", [0.0, 1, 0, 0])
    assert "must be integers" in refused(lambda: opened(tmp_path / "x.npy", tmp_path / "y.npy"), tmp_path)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f4", "i2", "?"])
def test_dense_features(tmp_path: Path, dtype: str) -> None:
    rng = np.random.default_rng(8)
    X = np.where(rng.random((40, 9)) < 0.7, rng.normal(size=(40, 9)) * 3, 0).astype(dtype)
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", np.arange(40) % 3)
    expected = sparse.csr_array(X.astype(np.float32))
    for room in (1, 10**4, 10**8):
        assert same(read(opened(tmp_path / "x.npy", tmp_path / "y.npy"), tmp_path, room)[0], expected)


def test_bad_npy_files_end_in_one_line(tmp_path: Path) -> None:
    def npy(name: str, array: Any) -> Path:
        np.save(tmp_path / name, array, allow_pickle=True)
        return tmp_path / f"{name}.npy"

    x, y = npy("x", np.ones((3, 2))), npy("y", np.arange(3))
    cut = tmp_path / "cut.npy"
    cut.write_bytes(x.read_bytes()[:-1])
    long = tmp_path / "long.npy"
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"shape": (10**15, 4), "fortran_order": False, "descr": "<f4"})
    long.write_bytes(file.getvalue())
    wide = tmp_path / "wide.npy"
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"shape": (10**15, 0), "fortran_order": False, "descr": "<f4"})
    wide.write_bytes(file.getvalue())
    bad = {
        cut: "an array of shape (3, 2)",
        long: "an array of shape (1000000000000000, 4)",
        wide: "without columns",
        npy("fortran", np.ones((3, 2), order="F")): "Fortran order",
        npy("three", np.ones((3, 2, 2))): "shape (3, 2, 2)",
        npy("objects", np.array([[{}]])): "never unpickled",
        npy("complex", np.ones((3, 2)) * 1j): "real numbers",
        npy("text", np.array([["a", "b"]])): "real numbers",
        npy("nan", np.array([[1, 1], [1, np.nan], [0, 0]])): "value nan in row 1 (from 0)",
        npy("inf", np.array([[1, 1], [1, 1], [0, 1e39]])): "value 1e+39 in row 2 (from 0)",
        npy("ids", np.arange(3)): "features must be a matrix",
    }
    for path, what in bad.items():
        message = refused(lambda path=path: opened(path, y), tmp_path / "work")  # type: ignore[misc]
        assert message.startswith(str(path))
        assert what in message
    assert "has 3 rows and" in refused(lambda: opened(x, npy("four", np.arange(4))), tmp_path)
    row = npy("row", np.ones((1, 10**5)))
    assert "takes" in refused(lambda: opened(row, npy("one", [0])), tmp_path, MemoryLimitError, room=10**6)


@pytest.mark.parametrize("packed", [False, True])
def test_text_of_labels_goes_with_matrices(tmp_path: Path, packed: bool) -> None:
    Y = no_zeros(random_csr(np.random.default_rng(13), 30, 8))
    rows = [" ".join(f"{j}:1" for j in Y.indices[slice(*Y.indptr[i : i + 2])]) for i in range(30)]
    x, y = tmp_path / "x.npy", tmp_path / "y.txt"
    np.save(x, np.ones((30, 2)))

    def write(lines: list[str], header: str = "30 8") -> None:
        text = "\n".join([header, *lines, ""]).encode()
        y.write_bytes(gzip.compress(text) if packed else text)

    write(rows)
    got_x, got_y, settled = read(opened(x, y), tmp_path / "work")
    assert got_x.nnz == 60
    assert same(got_y, Y)
    assert "XMLRepo text" in settled.said
    write([*rows[:-1], "3:1 3:1 5:0"])
    assert "y.txt:31: label 3 stands twice" in refused(lambda: opened(x, y), tmp_path / "work")
    got_x, got_y, settled = read(opened(x, y, sum_duplicates=True), tmp_path / "work")
    assert got_y[[29]].indices.tolist() == [3]
    assert settled.attributes == {"summed_duplicates": 1}
    write(rows[:-1])
    assert "promises 30 rows and 29 follow" in refused(lambda: opened(x, y), tmp_path / "work")
    write([*rows, ""])
    assert "promises 30 rows and more follow" in refused(lambda: opened(x, y), tmp_path / "work")
    write([*rows[:-1], "8:1"])
    assert "y.txt:31: label id 8 is not below K = 8" in refused(lambda: opened(x, y), tmp_path / "work")
    write(rows, "30 8 9")
    assert "y.txt:1: the first line must be the header 'N K'" in refused(lambda: opened(x, y), tmp_path / "work")


def test_triples_without_data_or_shape(tmp_path: Path) -> None:
    X, Y = random_csr(np.random.default_rng(9), 20, 6), no_zeros(random_csr(np.random.default_rng(10), 20, 4))
    y = triple(tmp_path / "y", Y, data=False, shape=False)
    x = triple(tmp_path / "x", X, shape=False)
    source = opened(x, y)
    assert (source.n_samples, source.n_features, source.n_labels) == (20, None, None)
    got_x, got_y, settled = read(source, tmp_path / "work")
    assert settled.n_features == int(X.indices.max()) + 1
    assert got_x.data.tobytes() == X.data.tobytes()
    assert got_y.indices.tolist() == Y.indices.tolist()
    assert "features need values" in refused(lambda: opened(y, y), tmp_path)
    np.save(x / "indptr.npy", X.indptr[:-1])
    assert "has 19 rows and" in refused(lambda: opened(x, y), tmp_path)
    np.save(x / "shape.npy", [20, 6])
    assert "20 items of indptr for 20 rows" in refused(lambda: opened(x, y), tmp_path)
    (x / "indices.npy").unlink()
    assert "indices.npy cannot be read" in refused(lambda: opened(x, y), tmp_path)


def test_a_row_that_no_memory_holds_is_refused(tmp_path: Path) -> None:
    x = csr(np.ones(10**5), np.arange(10**5), [0, 0, 10**5], (2, 10**5))
    for how in KINDS[:4]:
        path = saved(tmp_path, x, how, "x")
        message = refused(lambda path=path: opened(path, path), tmp_path, MemoryLimitError, room=10**6)  # type: ignore[misc]
        assert "row 1 (from 0) takes 11.2 MB" in message
    message = refused(lambda: memory.open_memory(x, ConvertOptions(x), None), tmp_path, MemoryLimitError, room=10**6)
    assert "row 1 (from 0) takes 11.2 MB" in message


def stored(dataset: Any) -> tuple[Any, Any]:
    """X and Y of a dataset as CSR."""
    matrices = []
    for m, n_columns in ((dataset.X_rows(), dataset.n_features), (dataset.Y_rows(), dataset.n_labels)):
        block = m.block(0, dataset.n_samples)
        data = np.ones(len(block.indices), np.float32) if block.data is None else block.data
        matrices.append(sparse.csr_array((data, block.indices, block.indptr), shape=(dataset.n_samples, n_columns)))
    return matrices[0], matrices[1]


@pytest.mark.parametrize("kind", KINDS)
def test_whole_conversions(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(11)
    X, Y = random_csr(rng, 60, 12), no_zeros(random_csr(rng, 60, 7))
    x, y = saved(tmp_path, X, kind, "x"), saved(tmp_path, Y, kind, "y")
    got_x, got_y = stored(convert(x, tmp_path / "d.xmc", labels=y))
    assert same(got_x, X)
    assert same(got_y, Y)
    memory = convert(X, tmp_path / "m.xmc", labels=Y)
    assert memory.fingerprint == open_dataset(tmp_path / "d.xmc").fingerprint
    test = convert(X[:5, :9].tocsc(), tmp_path / "t.xmc", labels=sparse.csr_array((5, 2)), like=memory)
    assert (test.n_features, test.n_labels) == (12, 7)
    assert stored(test)[0].nnz == X[:5, :9].nnz
    with pytest.raises(InputError, match="labels were not"):
        convert(X, tmp_path / "n.xmc")
    assert sorted(path.suffix for path in tmp_path.glob("*.xmc*")) == [".xmc"] * 3


def test_normalised_rows(tmp_path: Path) -> None:
    X = np.random.default_rng(12).normal(size=(50, 8)).astype(np.float32)
    X[3] = 0
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", np.arange(50) % 7)
    got_x, got_y = stored(convert(tmp_path / "x.npy", tmp_path / "d.xmc", labels=tmp_path / "y.npy", normalize="l2"))
    norms = np.linalg.norm(X.astype(np.float64), axis=1, keepdims=True)
    np.testing.assert_array_max_ulp(got_x.toarray(), (X / np.where(norms == 0, 1, norms)).astype(np.float32), 1)
    assert got_y.toarray().tolist() == np.eye(7)[np.arange(50) % 7].tolist()


def test_a_matrix_that_cannot_fit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    x = sparse.csc_array(
        (np.zeros(4 * 10**6), np.zeros(4 * 10**6, int), np.arange(4 * 10**6 + 1)), shape=(5, 4 * 10**6)
    )
    sparse.save_npz(tmp_path / "x.npz", x)
    np.save(tmp_path / "y.npy", np.zeros(5, int))
    with pytest.raises(MemoryLimitError, match=r"parts of the input.*memory_limit"):
        convert(
            tmp_path / "x.npz", tmp_path / "d.xmc", labels=tmp_path / "y.npy", memory_limit=resident() + 100 * 10**6
        )
    assert not (tmp_path / "d.xmc").exists()


CHILD = """
import sys
from xmc_stream.convert import convert
convert(sys.argv[1], sys.argv[2], labels=sys.argv[3], memory_limit="512MB", threads=2)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
@needs_compiler
@pytest.mark.parametrize("kind", ["npz+", "npz"])
def test_memory_keeps_the_limit(tmp_path: Path, kind: str) -> None:
    n, d = 160_000, 250  # 320 MB of indices and values
    values = np.arange(n * d, dtype=np.float32)
    values %= 9
    values += 1
    indices = np.tile(np.arange(d, dtype=np.int32), n)
    X = csr(values, indices, np.arange(0, n * d + 1, d), (n, d))
    x = saved(tmp_path, X, kind, "x")
    np.save(tmp_path / "y.npy", np.arange(n) % 1000)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, x, tmp_path / "d.xmc", tmp_path / "y.npy"],
        env={**os.environ, "PYTHONPATH": str(Path(xmc_stream.__file__).parents[1])},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert int(done.stdout) * 1024 < 512 * 10**6
    dataset = open_dataset(tmp_path / "d.xmc")
    last = dataset.X_rows().block(n - 1, n)
    assert dataset.X_rows().nnz == n * d
    assert last.indices.tolist() == list(range(d))
    assert last.values.tolist() == values[-d:].tolist()
