"""Matrices on disk: what is written is read back, by every way of reading, from the ranges asked for and no others."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import ZstdCodec

from xmc_stream.errors import StoreError
from xmc_stream.store.encoding import new_matrix
from xmc_stream.store.matrix import Block, Buffer, SparseMatrix, stream, stream_bytes

STEP = 64 * 1024
FEW = settings(max_examples=10, deadline=None)


@dataclass(frozen=True)
class Lines:
    """A matrix in memory: what the store must give back. data None: every value is one."""

    encoding: str
    bound: int
    indptr: Any
    indices: Any
    data: Any

    @property
    def n(self) -> int:
        return len(self.indptr) - 1

    @property
    def shape(self) -> tuple[int, int]:
        return (self.n, self.bound) if self.encoding == "csr_matrix" else (self.bound, self.n)

    @property
    def entry_bytes(self) -> int:
        return self.indices.itemsize + (0 if self.data is None else self.data.itemsize)

    def pick(self, lines: Any) -> tuple[Any, Any, Any]:
        """The CSR triple of some lines."""
        counts = np.diff(self.indptr)[lines]
        indptr = np.concatenate([[0], np.cumsum(counts)])
        take = np.arange(indptr[-1]) + np.repeat(self.indptr[lines] - indptr[:-1], counts)
        return indptr, self.indices[take], None if self.data is None else self.data[take]

    def to_scipy(self) -> Any:
        kind = sp.csr_matrix if self.encoding == "csr_matrix" else sp.csc_matrix
        data = np.ones(len(self.indices), np.float32) if self.data is None else self.data
        return kind((data, self.indices, self.indptr), shape=self.shape)


def make_lines(lengths: Any, bound: int = 50_000, dtype: Any = np.float32, encoding: str = "csr_matrix") -> Lines:
    """Lines of these lengths, each with sorted and unique indices, and random values."""
    lengths = np.asarray(lengths, np.int64)
    rng = np.random.default_rng(len(lengths))
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    stride = bound // max(1, int(lengths.max(initial=0)))
    position = np.arange(indptr[-1]) - np.repeat(indptr[:-1], lengths)
    indices = position * stride + np.repeat(rng.integers(0, stride, len(lengths)), lengths)
    index_type = np.int32 if bound < 2**31 else np.int64
    data = None if dtype is None else rng.standard_normal(indptr[-1]).astype(dtype)
    return Lines(encoding, bound, indptr, indices.astype(index_type), data)


def runs(lengths: list[int], repeats: list[int]) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.sampled_from(lengths), st.sampled_from(repeats))


@st.composite
def matrices(draw: st.DrawFn, dtypes: tuple[Any, ...] = (np.float32, np.float64, None)) -> Lines:
    """ranges of lines of one length: many short ones, so that indptr has chunks too, and some that fill whole chunks."""
    short, middle = runs([0, 1, 3], [1, 40, 3000, 8192]), runs([17, 64, 250], [1, 10, 100])
    long = runs([2048, 4096, 16_384, 20_000, 40_000], [1, 2, 3])
    drawn = draw(st.lists(st.one_of(short, middle, long), max_size=5))
    lengths = np.repeat([length for length, _ in drawn], [n for _, n in drawn]).astype(np.int64)
    encoding = draw(st.sampled_from(["csr_matrix", "csc_matrix"]))
    return make_lines(lengths, draw(st.sampled_from([50_000, 2**31 + 9])), draw(st.sampled_from(dtypes)), encoding)


Pick = Callable[[int], Any]
fractions = st.sampled_from([(0.0, 1.0), (0.0, 0.3), (0.01, 0.5), (0.33, 0.77), (0.7, 1.0), (0.5, 0.5)])


def run(lines: Lines, fraction: tuple[float, float]) -> tuple[int, int]:
    """A run [start, stop) of lines."""
    return round(fraction[0] * lines.n), round(fraction[1] * lines.n)


@st.composite
def picks(draw: st.DrawFn) -> Pick:
    """A way to choose lines of a matrix, ascending: none, all, a run, and parts with small and with large gaps."""
    share, seed = draw(st.sampled_from([0.5, 0.0, 0.002, 0.05, 1.0])), draw(st.integers(0, 99))
    low, high = draw(fractions)

    def pick(n: int) -> Any:
        chosen = np.arange(round(low * n), round(high * n))
        return chosen[np.random.default_rng(seed).random(len(chosen)) < share]

    return pick


chunk_sizes = st.sampled_from([STEP, 2 * STEP, 16 * STEP])


def write(path: Path, lines: Lines, chunk_bytes: int = STEP, step: int = 5000) -> SparseMatrix:
    """Write by `step` lines at a time, and open."""
    kind = None if lines.data is None else lines.data.dtype
    with new_matrix(path, lines.encoding, lines.shape, kind, chunk_bytes=chunk_bytes) as writer:  # type: ignore[arg-type]
        for start in range(0, lines.n, step):
            some = np.arange(start, min(start + step, lines.n))
            indptr, indices, data = lines.pick(some)
            writer.append(np.diff(indptr), indices, data)
    return SparseMatrix(path)


@contextmanager
def stored(lines: Lines, chunk_bytes: int = STEP) -> Iterator[SparseMatrix]:
    with tempfile.TemporaryDirectory() as folder:
        yield write(Path(folder) / "matrix", lines, chunk_bytes)


def check(block: Block, lines: Lines, chosen: Any) -> None:
    """The block holds the chosen lines, in the types that are promised."""
    indptr, indices, data = lines.pick(chosen)
    assert block.indptr.dtype == np.int64
    assert block.indices.dtype == lines.indices.dtype
    np.testing.assert_array_equal(block.indptr, indptr)
    np.testing.assert_array_equal(block.indices, indices)
    assert (block.data is None) == (data is None)
    if data is not None:
        assert block.values.dtype == data.dtype
        np.testing.assert_array_equal(block.values, data)


@FEW
@given(matrices(), chunk_sizes, st.lists(fractions, min_size=1))
def test_block_gives_any_run_of_lines_and_counts_its_bytes(lines: Lines, chunk: int, fractions: list[Any]) -> None:
    with stored(lines, chunk) as matrix:
        assert (matrix.shape, matrix.n_lines, matrix.nnz) == (lines.shape, lines.n, len(lines.indices))
        assert matrix.entry_bytes == lines.entry_bytes
        check(matrix.block(0, lines.n, Buffer(matrix, matrix.nnz)), lines, np.arange(lines.n))
        for fraction in fractions:
            start, stop = run(lines, fraction)
            before = matrix.bytes_read
            block = matrix.block(start, stop)
            nnz = int(lines.indptr[stop] - lines.indptr[start])
            assert matrix.bytes_read - before == 8 * (stop - start + 1) + nnz * lines.entry_bytes
            assert (block.start, block.n) == (start, stop - start)
            check(block, lines, np.arange(start, stop))


@FEW
@given(matrices(), chunk_sizes, fractions, st.sampled_from([1.0, 1.5, 9.0]))
def test_blocks_cover_each_line_once_as_cut_within_max_bytes_in_one_buffer(
    lines: Lines, chunk: int, fraction: tuple[float, float], room: float
) -> None:
    start, stop = run(lines, fraction)
    cost = np.concatenate([[0], np.cumsum(np.diff(lines.indptr) * lines.entry_bytes + 8)])
    max_bytes = int(room * max(np.diff(cost), default=8))
    with stored(lines, chunk) as matrix:
        at, buffers = start, []
        for block in matrix.blocks(max_bytes, start, stop):
            assert block.start == at
            at += block.n
            assert block.n > 0
            assert cost[at] - cost[block.start] <= max_bytes
            assert at == stop or cost[at + 1] - cost[block.start] > max_bytes  # no block is smaller than it must be
            check(block, lines, np.arange(block.start, at))
            buffers += [(block.indices.base, None if block.data is None else block.values.base)]
        assert at == stop
        assert len({(id(indices), id(data)) for indices, data in buffers}) <= 1
        if start == 0 and stop == lines.n:
            assert matrix.bytes_read == stream_bytes([matrix], [(0, stop)])


def test_two_matrices_are_streamed_in_the_same_blocks_and_read_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    n = 150_000  # more lines than a window of indptr
    wide, narrow = (make_lines(rng.integers(0, high, n)) for high in (9, 3))
    both = [write(tmp_path / name, lines, step=50_000) for name, lines in (("wide", wide), ("narrow", narrow))]
    ranges = [(0, 70_000), (70_000, n)]
    for start, stop in ranges:
        at = start
        for x, y in stream(both, (100_000, 25_000), start, stop, max_lines=3000):
            assert x.start == y.start == at
            assert 0 < x.n == y.n <= 3000
            assert 8 * x.n + wide.entry_bytes * len(x.indices) <= 100_000
            assert 8 * y.n + narrow.entry_bytes * len(y.indices) <= 25_000
            at += x.n
            check(x, wide, np.arange(x.start, at))
            check(y, narrow, np.arange(x.start, at))
        assert at == stop
    assert sum(matrix.bytes_read for matrix in both) == stream_bytes(both, ranges)


@FEW
@given(matrices(), chunk_sizes, st.lists(picks(), min_size=1))
def test_gather_gives_any_ascending_lines_and_counts_their_bytes(lines: Lines, chunk: int, picks: list[Pick]) -> None:
    with stored(lines, chunk) as matrix:
        for pick in picks:
            chosen = pick(lines.n)
            before = matrix.bytes_read
            check(matrix.gather(chosen), lines, chosen)
            nnz = int(np.diff(lines.indptr)[chosen].sum())
            ends = 8 * len(np.union1d(chosen, chosen + 1))
            assert matrix.bytes_read - before == ends + nnz * lines.entry_bytes


@FEW
@given(matrices(), picks())
def test_gather_fills_the_buffer_it_is_given_at_the_lengths_it_is_given(lines: Lines, pick: Pick) -> None:
    chosen = pick(lines.n)
    with stored(lines) as matrix:
        firsts, counts = matrix.lengths(chosen)
        np.testing.assert_array_equal(firsts, lines.indptr[chosen])
        np.testing.assert_array_equal(counts, np.diff(lines.indptr)[chosen])
        buffer, before = Buffer(matrix, int(counts.sum()) + 7), matrix.bytes_read
        block = matrix.gather(chosen, buffer, (firsts, counts))
        check(block, lines, chosen)
        assert block.indices.base is buffer.indices
        assert matrix.bytes_read - before == counts.sum() * lines.entry_bytes  # indptr is not read again
        with ThreadPoolExecutor(1) as other:
            check(matrix.gather(chosen, beside=other), lines, chosen)


@pytest.mark.parametrize("which", ["indices", "data"])
def test_a_gather_by_two_threads_ends_with_the_error_of_either(tmp_path: Path, which: str) -> None:
    lines = make_lines([20_000, 20_000])
    matrix = write(tmp_path / "m", lines)
    getattr(matrix, which).chunk_file(1).unlink()
    with ThreadPoolExecutor(1) as other, pytest.raises(StoreError, match="is missing"):
        matrix.gather(np.array([0, 1]), beside=other)


@FEW
@given(matrices(), chunk_sizes)
def test_read_gives_what_was_written_and_every_chunk_passes_its_checksum(lines: Lines, chunk: int) -> None:
    with stored(lines, chunk) as matrix:
        expected = [lines.indptr, lines.indices] + ([] if lines.data is None else [lines.data])
        for array, values in zip(matrix.arrays(), expected, strict=True):
            read = array.read(0, array.size)
            assert read.dtype == values.dtype
            np.testing.assert_array_equal(read, values)
            for k in range(array.n_chunks):
                array.verify_chunk(k)


@FEW
@given(matrices(), picks(), fractions)
def test_a_range_is_read_with_every_chunk_file_outside_of_it_removed(
    lines: Lines, pick: Pick, fraction: tuple[float, float]
) -> None:
    start, stop = run(lines, fraction)
    first, last = int(lines.indptr[start]), int(lines.indptr[stop])
    with stored(lines) as matrix:
        ranges = [(start, stop + 1), (first, last), (first, last)]
        for array, (low, high) in zip(matrix.arrays(), ranges, strict=False):
            needed = range(low // array.chunk, (high - 1) // array.chunk + 1) if high > low else range(0)
            for k in set(range(array.n_chunks)) - set(needed):
                array.chunk_file(k).unlink()
        check(matrix.block(start, stop), lines, np.arange(start, stop))
        for block in matrix.blocks(1 << 20, start, stop):
            check(block, lines, np.arange(block.start, block.start + block.n))
        chosen = start + pick(stop - start)
        check(matrix.gather(chosen), lines, chosen)


@settings(max_examples=8, deadline=None)
@given(matrices(dtypes=(np.float32, np.float64)), picks(), fractions)
def test_a_compressed_copy_reads_the_same_through_zarr(lines: Lines, pick: Pick, fraction: tuple[float, float]) -> None:
    start, stop = run(lines, fraction)
    with tempfile.TemporaryDirectory() as folder:
        plain = write(Path(folder) / "plain", lines)
        copy = zarr.create_group(Path(folder) / "copy", attributes=plain.attributes)
        for name in ("indptr", "indices", "data"):
            values = zarr.open_group(plain.path, mode="r")[name][:]
            copy.create_array(name, data=values, chunks=(9000,), compressors=[ZstdCodec()])
        matrix = SparseMatrix(Path(folder) / "copy")
        assert all(array.path is None for array in matrix.arrays())
        check(matrix.block(start, stop), lines, np.arange(start, stop))
        for block in matrix.blocks(1 << 20):
            check(block, lines, np.arange(block.start, block.start + block.n))
        chosen = pick(lines.n)
        check(matrix.gather(chosen), lines, chosen)
        np.testing.assert_array_equal(matrix.indices.read(0, lines.indices.size), lines.indices)
        plain.block(start, stop)
        assert plain.bytes_read == 8 * (stop - start + 1) + int(np.ptp(lines.indptr[[start, stop]])) * lines.entry_bytes


@settings(max_examples=4, deadline=None)
@given(matrices(), chunk_sizes, st.sampled_from([1, 700, 20_000]))
def test_a_fingerprint_depends_on_the_matrix_and_not_on_chunks_or_appends(lines: Lines, chunk: int, step: int) -> None:
    with tempfile.TemporaryDirectory() as folder:

        def fingerprint(name: str, some: Lines, chunk_bytes: int = STEP, step: int = 5000) -> Any:
            return write(Path(folder) / name, some, chunk_bytes, step).attributes["fingerprint"]

        expected = fingerprint("a", lines)
        assert fingerprint("b", lines, chunk, max(step, lines.n // 50)) == expected
        assert fingerprint("c", replace(lines, bound=lines.bound + 1)) != expected
        assert fingerprint("d", replace(lines, indptr=np.append(lines.indptr, lines.indptr[-1]))) != expected
        if len(lines.indices):
            moved = lines.indices.copy()
            moved[-1] += 1
            assert fingerprint("e", replace(lines, indices=moved)) != expected
        if lines.data is not None and len(lines.data):
            data = lines.data.copy()
            data.view(np.uint8)[-4] ^= 1
            assert fingerprint("f", replace(lines, data=data)) != expected


def test_gather_gives_empty_lines_that_end_on_a_chunk_boundary(tmp_path: Path) -> None:
    lines = make_lines([16_384, 0, 16_384, 0, 0])  # two full chunks of indices, and of values
    matrix = write(tmp_path / "m", lines)
    assert (matrix.indices.chunk, matrix.indices.n_chunks) == (16_384, 2)
    for chosen in ([1], [3, 4], [0, 1, 4], [2, 3]):
        check(matrix.gather(np.array(chosen)), lines, np.array(chosen))


def test_gather_gives_the_lines_of_a_matrix_without_entries(tmp_path: Path) -> None:
    for dtype in (np.float32, None):
        lines = make_lines([0, 0, 0], dtype=dtype)
        check(write(tmp_path / str(dtype), lines).gather(np.array([0, 2])), lines, np.array([0, 2]))


def test_gather_does_not_open_a_chunk_in_which_only_empty_lines_begin(tmp_path: Path) -> None:
    lines = make_lines([16_384, 0, 16_384])
    matrix = write(tmp_path / "m", lines)
    matrix.indices.chunk_file(1).unlink()
    check(matrix.gather(np.array([0, 1])), lines, np.array([0, 1]))


def io(what: str) -> int:
    """A figure of /proc/self/io: `syscr` (calls) or `rchar` (bytes) read by this process so far."""
    text = Path("/proc/self/io").read_text()
    return int(text.partition(f"{what}:")[2].split()[0])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts what the Linux kernel counts")
def test_gather_reads_over_small_holes_and_jumps_large_ones(tmp_path: Path) -> None:
    lines = make_lines(np.full(20_000, 64))  # 256 bytes of indices each
    matrix = write(tmp_path / "m", lines, 16 * STEP)
    matrix.gather(np.arange(3))
    near, far, alternate = np.arange(0, 20_000, 5), np.arange(0, 20_000, 400), np.arange(20_000)
    alternate = alternate[(alternate % 800 < 100) & (alternate % 800 % 3 != 1)]  # small holes in parts with large ones
    for chosen in (near, far, alternate):
        check(matrix.gather(chosen), lines, chosen)
    before = io("syscr")
    matrix.gather(near)
    assert io("syscr") - before < len(near) / 5  # far fewer calls than lines
    before = io("rchar")
    matrix.gather(far)
    needed = len(far) * 64 * 8 + 8 * (lines.n + 1)
    assert io("rchar") - before < 1.2 * needed + 20_000  # far less than the 10 MB that they lie in


def test_lines_far_apart_are_looked_up_without_reading_indptr_between_them(tmp_path: Path) -> None:
    lines = make_lines(np.arange(400_000) % 3 % 2)
    matrix = write(tmp_path / "m", lines, step=100_000)
    chosen = np.array([1, 4, 399_999])
    matrix.lengths(chosen)
    assert matrix.bytes_read == 8 * 3 * 2
    check(matrix.gather(chosen), lines, chosen)
    check(matrix.gather(np.arange(0, 400_000, 7)), lines, np.arange(0, 400_000, 7))
    for block in matrix.blocks(1 << 22):
        check(block, lines, np.arange(block.start, block.start + block.n))


def test_ones_cost_no_bytes_and_are_refused_where_values_are_needed(tmp_path: Path) -> None:
    lines = make_lines(np.full(300, 100), dtype=None)
    matrix = write(tmp_path / "m", lines)
    assert [p.name for p in (tmp_path / "m" / "data").iterdir()] == ["zarr.json"]
    assert matrix.data is None
    assert matrix.entry_bytes == 4
    with pytest.raises(StoreError, match="X and Y are mixed up"):
        _ = matrix.block(0, 1).values


def test_values_that_are_all_one_or_all_zero_are_kept_as_values(tmp_path: Path) -> None:
    for value in (0.0, 1.0):
        lines = make_lines(np.full(300, 100))
        lines = replace(lines, data=np.full_like(lines.data, value))
        matrix = write(tmp_path / f"{value}", lines)
        assert matrix.data is not None
        assert matrix.data.n_chunks == 2
        check(matrix.block(0, 300), lines, np.arange(300))


def test_indices_beyond_two_to_the_31_are_kept_in_64_bits(tmp_path: Path) -> None:
    lines = make_lines([3, 0, 5], bound=2**40)
    assert lines.indices.max() > 2**31
    matrix = write(tmp_path / "wide", lines)
    assert matrix.indices.dtype == np.int64
    check(matrix.gather(np.array([0, 2])), lines, np.array([0, 2]))
    assert write(tmp_path / "last", make_lines([1], bound=2**31 - 1)).indices.dtype == np.int32


@pytest.mark.parametrize("encoding", ["csr_matrix", "csc_matrix"])
@pytest.mark.parametrize("dtype", [np.float32, None])
def test_anndata_reads_the_matrix_as_scipy_has_it(tmp_path: Path, encoding: str, dtype: Any) -> None:
    from anndata.io import read_elem, sparse_dataset

    lines = make_lines(np.arange(3000) % 40, dtype=dtype, encoding=encoding)
    write(tmp_path / "m", lines)
    expected = lines.to_scipy()
    group = zarr.open_group(tmp_path / "m", mode="r")
    whole, lazy = read_elem(group), sparse_dataset(group)
    assert (whole.format, lazy.format) == (encoding[:3], encoding[:3])
    assert lazy.shape == whole.shape == expected.shape
    part = slice(100, 1700)
    pairs = [(whole, expected)]
    pairs += [(lazy[part], expected[part])] if encoding == "csr_matrix" else [(lazy[:, part], expected[:, part])]
    for got, wanted in pairs:
        assert got.dtype == wanted.dtype
        for name in ("indptr", "indices", "data"):
            np.testing.assert_array_equal(getattr(got, name), getattr(wanted, name))


def damage(file: Path, how: str) -> None:
    content = file.read_bytes()
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes({"short": content[:-1], "empty": b"", "long": content + b"\0"}[how])


@pytest.mark.parametrize("how", ["missing", "short", "empty", "long"])
def test_the_chunk_that_is_missing_or_of_the_wrong_size_is_named(tmp_path: Path, how: str) -> None:
    lines = make_lines(np.full(9000, 4))
    good = write(tmp_path / "good", lines)
    for name in ("indptr", "indices", "data"):
        for k in range(getattr(good, name).n_chunks):
            shutil.copytree(tmp_path / "good", tmp_path / "bad")
            file = tmp_path / "bad" / name / "c" / str(k)
            damage(file, how)
            for look in (lambda m: m.check_sizes(), lambda m: m.block(0, 9000), lambda m: m.gather(np.arange(9000))):
                with pytest.raises(StoreError) as caught:
                    look(SparseMatrix(tmp_path / "bad"))
                assert str(file) in str(caught.value)
                assert str(caught.value).isprintable()  # hence one line
            shutil.rmtree(tmp_path / "bad")


@pytest.mark.parametrize("how", ["missing", "empty"])
def test_a_chunk_lost_after_opening_is_named_by_the_read_that_needs_it(tmp_path: Path, how: str) -> None:
    lines = make_lines(np.full(9000, 4))
    for read in (lambda m: m.block(8000, 9000), lambda m: m.gather(np.arange(0, 9000, 2))):
        matrix = write(tmp_path / "m", lines)
        file = matrix.indices.chunk_file(matrix.indices.n_chunks - 1)
        damage(file, how)
        with pytest.raises(StoreError) as caught:
            read(matrix)
        assert str(file) in str(caught.value)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> SparseMatrix:
    """A matrix of several chunks, for tests that leave it as they found it."""
    return write(tmp_path_factory.mktemp("shared") / "m", make_lines(np.full(9000, 4)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_flipped_bit_of_a_chunk_fails_its_checksum_and_only_that_chunk(
    shared: SparseMatrix, data: st.DataObject
) -> None:
    array = data.draw(st.sampled_from(shared.arrays()))
    file = array.chunk_file(data.draw(st.integers(0, array.n_chunks - 1)))
    content = file.read_bytes()
    damaged = bytearray(content)
    last = len(content) - 1  # the checksum itself is in the last four bytes
    damaged[data.draw(st.integers(0, last) | st.integers(last - 3, last))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(damaged)
    failed = []
    for each in SparseMatrix(shared.path).arrays():
        for k in range(each.n_chunks):
            try:
                each.verify_chunk(k)
            except StoreError as error:
                failed.append(str(error))
    file.write_bytes(content)
    assert len(failed) == 1
    assert str(file) in failed[0]


def test_blocks_are_as_large_as_the_longest_line(tmp_path: Path) -> None:
    lines = make_lines([2, 3, 1000, 2])
    matrix = write(tmp_path / "m", lines)
    assert matrix.block_bytes(1000) == 8 + 8 * 1000
    assert matrix.beyond(10_000) == 0
    blocks = [(block.start, block.n, block.indices.copy()) for block in matrix.blocks(1000)]
    assert [block[:2] for block in blocks] == [(0, 2), (2, 1), (3, 1)]
    assert np.array_equal(np.concatenate([indices for *_, indices in blocks]), lines.indices)


def test_what_is_not_a_matrix_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("1 2 3\n")
    zarr.create_group(tmp_path / "group")
    zarr.create_group(tmp_path / "frame", attributes={"encoding-type": "dataframe", "shape": [1, 1]})
    for name in ("indptr", "indices", "data"):
        zarr.open_group(tmp_path / "frame").create_array(name, data=np.zeros(2))
    write(tmp_path / "promised", make_lines([1, 2]))
    zarr.open_group(tmp_path / "promised").update_attributes({"shape": [3, 50_000]})
    for name in ("nothing", "folder", "file", "group", "frame", "promised"):
        with pytest.raises(StoreError) as caught:
            SparseMatrix(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
        assert str(caught.value).isprintable()


def test_fewer_lines_than_promised_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(StoreError, match="1 lines were written where 2 were promised"),
        new_matrix(tmp_path / "m", "csr_matrix", (2, 9)) as writer,
    ):
        writer.append(np.array([1]), np.array([4]), np.array([0.5]))
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------------------------------------------------
# asking ahead

PAGE = mmap.PAGESIZE


def cached_pages(path: Path) -> set[int]:
    """Numbers of a file's pages that are in the page cache."""
    size = path.stat().st_size
    pages = np.zeros(-(-size // PAGE), np.uint8)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped:
        address = np.frombuffer(mapped, np.uint8)
        libc = ctypes.CDLL(None)
        done = libc.mincore(
            ctypes.c_void_p(address.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)
        )
        del address
    assert done == 0
    return set(np.flatnonzero(pages & 1).tolist())


def forget(matrix: SparseMatrix) -> None:
    """Drop a matrix from the page cache, and let its files be read without the kernel's own reading ahead."""
    for array in matrix.arrays():
        for k in range(array.n_chunks):
            fd = array._open(k)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    if any(cached_pages(array.chunk_file(0)) for array in matrix.arrays()):
        pytest.skip("this file system keeps its files in memory")


def until(holds: Callable[[], bool], seconds: float = 20) -> bool:
    """Whether it holds within so many seconds."""
    end = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < end:
        time.sleep(0.01)
    return held


def pages_of(first: int, last: int) -> set[int]:
    """Pages of items [first, last) of four bytes."""
    return set(range(first * 4 // PAGE, -(-last * 4 // PAGE)))


advised = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no advice")


@advised
def test_lines_that_will_be_needed_come_into_the_page_cache_and_no_others(disk_path: Path) -> None:
    matrix = write(disk_path / "matrix", make_lines(np.full(3000, 250)), 16 * STEP)
    forget(matrix)
    entries = matrix.arrays()[1:]
    assert len(entries) == 2
    per_chunk = matrix.indices.chunk
    first, last = 400 * 250, 2050 * 250  # 1.7 MB of either array, over the end of a chunk
    assert first < per_chunk < last < 2 * per_chunk

    def arrived() -> bool:
        return all(
            cached_pages(array.chunk_file(0)) == pages_of(first, per_chunk)
            and cached_pages(array.chunk_file(1)) == pages_of(0, last - per_chunk)
            for array in entries
        )

    def asked_and_arrived() -> bool:
        matrix.will_need(400, 2050)
        return until(arrived, 2)

    assert until(asked_and_arrived)  # a kernel that is short of memory drops advice, so it is asked again
    assert not any(cached_pages(array.chunk_file(2)) for array in entries)


@advised
def test_a_stream_asks_for_the_next_block_before_it_gives_one(disk_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = write(disk_path / "matrix", make_lines(np.full(3000, 250)), 64 * STEP)
    asked: set[int] = set()  # pages; whether they come is the kernel's affair, which is free to drop advice
    advise = os.posix_fadvise

    def advise_and_note(fd: int, offset: int, length: int, advice: int) -> None:
        if os.path.sameopenfile(fd, indices) and advice == os.POSIX_FADV_WILLNEED:
            asked.update(range(offset // PAGE, -(-(offset + length) // PAGE)))
        advise(fd, offset, length, advice)

    with open(matrix.indices.chunk_file(0), "rb") as file:
        indices = file.fileno()
        monkeypatch.setattr(os, "posix_fadvise", advise_and_note)
        blocks = matrix.blocks(1000 * (250 * 8 + 8))
        assert not asked
        for n, known in enumerate((2000, 3000, 3000), 1):
            assert next(blocks).n == 1000
            assert asked | pages_of(0, n * 1000 * 250) == pages_of(0, known * 250)


def test_asking_ahead_leaves_compressed_matrices_alone(tmp_path: Path) -> None:
    lines = make_lines(np.full(300, 250))
    path = tmp_path / "matrix"
    write(path, lines)
    group = zarr.open_group(path, mode="r+")
    for name in ("indptr", "indices", "data"):
        values = group[name][:]
        del group[name]
        group.create_array(name, data=values, chunks=(8192,), compressors=ZstdCodec())
    matrix = SparseMatrix(path)
    matrix.will_need(0, 300)
    assert matrix.bytes_read == 0
    check(matrix.block(0, 300), lines, np.arange(300))


def test_a_line_of_more_entries_than_places_ends_in_an_error(tmp_path: Path) -> None:
    with new_matrix(tmp_path / "m", "csr_matrix", (2, 3)) as writer:
        writer.append(np.array([100_000, 1]), np.zeros(100_001, np.int32), np.ones(100_001, np.float32))
    with pytest.raises(StoreError, match=r"line 0 of .* has 100000 entries, and it has 3 places"):
        for _ in SparseMatrix(tmp_path / "m").blocks(1 << 16):
            pass
