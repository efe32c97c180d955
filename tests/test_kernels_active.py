"""Active sets against plain lists and dicts, marked rows against numpy, and ranges of a file against slices."""

from __future__ import annotations

import itertools
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import pytest
from helpers.compiler import needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import active as twin

from xmc_stream.kernels.blocks import ActiveSets
from xmc_stream.kernels.csr import pread_ranges, pwrite_lines
from xmc_stream.ppdsparse.kernels.active import (
    append_lines,
    count_before,
    count_below,
    mark,
    marked_rows,
    merge_candidates,
    rank,
    set_signs,
    start_sets,
)
from xmc_stream.ppdsparse.state import kept_rows

# uncompiled, numpy says so when a key or a count of bits wraps around
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def ragged(lists: Sequence[Sequence[Any]], dtype: Any) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Where each list begins, and all of them in a row."""
    ptr = np.cumsum([0, *map(len, lists)]).astype(np.int64)
    return ptr, np.array([item for of_class in lists for item in of_class], dtype)


def parts(ptr: NDArray[np.int64], *values: NDArray[Any]) -> list[tuple[list[Any], ...]]:
    """The lists again, of one or several arrays."""
    return [tuple(array[begin:end].tolist() for array in values) for begin, end in itertools.pairwise(ptr)]


def row_sets(most: int = 40) -> st.SearchStrategy[list[int]]:
    return st.sets(st.integers(0, most - 1)).map(sorted)


# ----------------------------------------------------------------------------------------------------------------------
# how sets start, grow and shrink


def started(
    positives: Sequence[Sequence[int]], sizes: Sequence[int], first_label: int, n_samples: int, seed: int, index: Any
) -> list[list[int]]:
    p_ptr, p_rows = ragged(positives, index)
    ptr = np.full(len(p_ptr), -1, np.int64)
    rows = np.full(p_ptr[-1] + sum(sizes), -1, np.int64)
    start_sets(p_ptr, p_rows, np.array(sizes, np.int64), first_label, n_samples, seed, ptr, rows)
    assert ptr[-1] == len(rows)
    return [of_class for (of_class,) in parts(ptr, rows)]


@pytest.mark.parametrize("index", [np.int32, np.int64])
@given(st.lists(row_sets(), min_size=1, max_size=5), st.integers(0, 2**62), st.integers(0, 2**31), st.data())
@settings(deadline=None)
def test_sets_start_with_positives_and_keyed_negatives(
    index: Any, positives: list[list[int]], seed: int, first: int, data: st.DataObject
) -> None:
    n = data.draw(st.integers(1 + max((row for of_class in positives for row in of_class), default=0), 60))
    sizes = [data.draw(st.integers(0, n - len(mine))) for mine in positives]
    got = started(positives, sizes, first, n, seed, index)
    for c, (mine, size) in enumerate(zip(positives, sizes, strict=True)):
        assert len(set(got[c])) == len(got[c]) == len(mine) + size
        assert sorted(got[c]) == got[c]
        assert set(mine) <= set(got[c]) <= set(range(n))
        assert got[c] == twin.start_set(mine, size, first + c, n, seed)
        assert got[c] == started([mine], [size], first + c, n, seed, index)[0]  # whatever classes come before


def test_the_negatives_of_a_class_are_keyed_by_seed_and_class() -> None:
    draws = [
        tuple(started([[3, 5]], [20], label, 1000, seed, np.int32)[0]) for label in range(30) for seed in range(30)
    ]
    assert len(set(draws)) == 900
    counts = np.bincount([row for draw in draws for row in draw], minlength=1000)
    assert counts[3] == counts[5] == 900
    counts = np.delete(counts, [3, 5])
    assert counts.max() < 18 + 6 * np.sqrt(18)  # 900 * 20 / 998 each
    assert counts.min() > 0


@st.composite
def found_by_jobs(draw: st.DrawFn) -> tuple[list[list[int]], list[list[list[tuple[int, float]]]], list[int]]:
    """Of each class the active rows, of each job and class (row, score) best first, and of each class the room."""
    n_classes, n_jobs = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    active, jobs, room = [], [[[] for _ in range(n_classes)] for _ in range(n_jobs)], []
    for c in range(n_classes):
        owner = draw(st.lists(st.integers(-2, n_jobs - 1), max_size=40))  # of each row: a job, active, or nothing
        active.append([row for row, job in enumerate(owner) if job == -1])
        for j in range(n_jobs):
            mine = [(row, float(draw(st.integers(-1, 2)))) for row, job in enumerate(owner) if job == j]
            jobs[j][c] = sorted(mine, key=lambda pair: (-pair[1], pair[0]))
        room.append(draw(st.integers(0, 45)))
    return active, jobs, room


@given(found_by_jobs(), st.sampled_from([np.int32, np.int64]))
@settings(deadline=None)
def test_the_best_of_all_jobs_join(problem: Any, index: Any) -> None:
    active, jobs, room = problem
    n_classes = len(active)
    a_ptr, a_rows = ragged(active, np.int32)
    a_alpha = np.arange(len(a_rows)) / 8
    f_ptr, _ = ragged([[row for job in jobs for row in job[c]] for c in range(n_classes)], index)
    f_rows, f_scores = np.full(f_ptr[-1], -1, index), np.full(f_ptr[-1], np.nan, np.float32)
    place = f_ptr[:-1].copy()
    for job in jobs:  # lines of classes in any order
        classes = np.array([c for c in range(n_classes) if job[c]][::-1], np.int64)
        ptr, rows = ragged([[row for row, _ in job[c]] for c in classes], index)
        _, scores = ragged([[score for _, score in job[c]] for c in classes], np.float32)
        append_lines(ptr, rows, scores, classes, place, f_rows, f_scores)
    assert place.tolist() == f_ptr[1:].tolist()
    for c, mine in enumerate(
        parts(f_ptr, f_rows, f_scores)
    ):  # jobs have any rows here: none comes before all of another
        f_rows[f_ptr[c] : f_ptr[c + 1]], order = np.sort(mine[0]), np.argsort(mine[0])
        f_scores[f_ptr[c] : f_ptr[c + 1]] = np.array(mine[1], np.float32)[order]
    expected = [
        twin.merged(
            dict(zip(active[c], a_alpha[a_ptr[c] : a_ptr[c + 1]].tolist(), strict=True)),
            [job[c] for job in jobs],
            room[c],
        )
        for c in range(n_classes)
    ]
    ptr, n = np.full(n_classes + 1, -1, np.int64), sum(map(len, expected))
    rows, alpha = np.full(n, -1, np.int64), np.full(n, np.nan)
    merge_candidates(a_ptr, a_rows, a_alpha, f_ptr, f_rows, f_scores, np.array(room, np.int64), ptr, rows, alpha)
    assert parts(ptr, rows, alpha) == [(list(of_class), list(of_class.values())) for of_class in expected]


@given(st.lists(st.tuples(row_sets(), row_sets()), min_size=1, max_size=6))
@settings(deadline=None)
def test_signs_tell_positives(classes: Any) -> None:
    p_ptr, positives = ragged([mine for mine, _ in classes], np.int32)
    ptr, rows = ragged([members for _, members in classes], np.int64)
    sign = np.zeros(len(rows), np.int8)
    set_signs(p_ptr, positives, ptr, rows, sign)
    assert parts(ptr, sign) == [(twin.signs(members, mine),) for mine, members in classes]


member = st.tuples(st.booleans(), st.sampled_from([0.0, 5e-324, 0.5]))


@given(st.lists(st.dictionaries(st.integers(0, 40), member), min_size=1, max_size=6))
@settings(deadline=None)
def test_idle_negatives_are_dropped(classes: list[dict[int, tuple[bool, float]]]) -> None:
    classes = [dict(sorted(of_class.items())) for of_class in classes]
    ptr, rows = ragged([list(of_class) for of_class in classes], np.int64)
    pairs = [pair for of_class in classes for pair in of_class.values()]
    sign = np.array([1 if positive else -1 for positive, _ in pairs], np.int8)
    alpha = np.array([a for _, a in pairs])
    kept, counts = kept_rows(ActiveSets(0, ptr, rows, sign, alpha))
    expected = [
        twin.without_idle({row: a for row, (_, a) in c.items()}, {row for row, (positive, _) in c.items() if positive})
        for c in classes
    ]
    ends = np.concatenate([[0], np.cumsum(counts)])
    assert parts(ends, rows[kept], alpha[kept]) == [(list(of_class), list(of_class.values())) for of_class in expected]


# ----------------------------------------------------------------------------------------------------------------------
# marked rows, windows


@given(st.lists(st.integers(0, 300)), st.integers(301, 450))
@settings(deadline=None)
def test_marked_rows_come_back_in_order_and_numbered(rows: list[int], n_samples: int) -> None:
    words = np.zeros(-(-n_samples // 64), np.uint64)
    half = len(rows) // 2
    for some in (rows[:half], rows[half:]):  # in two calls, with rows that occur twice
        mark(np.array(some, np.int64), words)
    union = np.unique(np.array(rows, np.int64))
    flags = np.zeros(64 * len(words), np.bool_)
    flags[union] = True
    assert np.array_equal(np.unpackbits(words.astype("<u8").view(np.uint8), bitorder="little").astype(bool), flags)
    before = np.full(len(words), -1, np.int32)
    assert count_before(words, before) == len(union)
    assert before.tolist() == [int(flags[: 64 * w].sum()) for w in range(len(words))]
    out = np.full(len(union), -1, np.int64)
    marked_rows(words, out)
    assert np.array_equal(out, union)
    number = np.full(len(rows), -1, np.int64)
    rank(np.array(rows, np.int64), words, before, number)
    assert np.array_equal(number, np.searchsorted(union, np.array(rows, np.int64)))


def test_full_words_are_counted() -> None:
    words, before = np.full(3, 2**64 - 1, np.uint64), np.empty(3, np.int32)
    assert count_before(words, before) == 192
    assert before.tolist() == [0, 64, 128]
    number = np.empty(192, np.int64)
    rank(np.arange(192), words, before, number)
    assert np.array_equal(number, np.arange(192))


@given(st.lists(row_sets(), min_size=1, max_size=6), st.sets(st.integers(0, 40), min_size=2), st.integers(1, 60))
@settings(deadline=None)
def test_rows_below_bounds_are_counted_window_by_window(classes: Any, ends: set[int], window: int) -> None:
    bounds = np.array(sorted(ends))
    ptr, rows = ragged(classes, np.int32)
    begins = np.repeat(ptr[:-1, None], len(bounds), axis=1)
    for low in range(0, len(rows), window):
        high = min(low + window, len(rows))
        # the classes with entries in the window: the last one may go on in the next
        mine = slice(int(np.searchsorted(ptr, low, "right")) - 1, int(np.searchsorted(ptr, high, "left")))
        places = np.clip(ptr[mine.start : mine.stop + 1], low, high) - low
        count_below(places, rows[low:high], bounds, begins[mine])
    for c, of_class in enumerate(classes):
        for b, (start, stop) in enumerate(itertools.pairwise(bounds.tolist())):
            mine = rows[begins[c, b] : begins[c, b + 1]] - start
            assert mine.tolist() == twin.clipped(of_class, start, stop)


# ----------------------------------------------------------------------------------------------------------------------
# ranges of a file

N_BYTES = 2_000


@pytest.fixture(scope="module")
def file() -> Iterator[BinaryIO]:
    with tempfile.TemporaryFile() as opened:
        opened.write(np.random.default_rng(0).bytes(N_BYTES))
        opened.flush()
        yield opened


def read(
    file: BinaryIO, ranges: Sequence[tuple[int, int]], itemsize: int, hole: int, room: int, ahead: int = 0
) -> tuple[bool, bytes, bytes]:
    """Whether it was all there, what was read, and the staging area; nothing beside the two is written to."""
    starts, counts = (np.array([pair[side] for pair in ranges], np.int64) for side in (0, 1))
    n = int(counts.sum()) * itemsize
    staging, out = np.full(room + 64, 0xEE, np.uint8), np.full(n + 64, 0xEE, np.uint8)
    whole = pread_ranges(file.fileno(), starts, counts, itemsize, hole, ahead, 9, staging[:room], out[:n])
    assert np.all(staging[room:] == 0xEE)
    assert np.all(out[n:] == 0xEE)
    return bool(whole), out[:n].tobytes(), staging[:room].tobytes()


@st.composite
def ranges_of_items(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int]:
    """(start, count) in ascending order, apart, some of them empty or next to each other, and the size of an item."""
    itemsize = draw(st.sampled_from([1, 4, 8]))
    n_items, at, ranges = N_BYTES // itemsize, 0, []
    for gap, count in draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 60)), max_size=20)):
        start = min(at + gap, n_items)
        at = min(start + count, n_items)
        ranges.append((start, at - start))
    return ranges, itemsize


@needs_compiler
@given(ranges_of_items(), st.integers(0, 40), st.integers(0, 600), st.sampled_from([0, 1, 9000, 1 << 20]))
@settings(deadline=None)
def test_ranges_are_slices_of_the_file(file: BinaryIO, problem: Any, hole: int, room: int, ahead: int) -> None:
    ranges, itemsize = problem
    content = os.pread(file.fileno(), N_BYTES, 0)
    expected = b"".join(content[start * itemsize : (start + count) * itemsize] for start, count in ranges)
    whole, got, _ = read(file, ranges, itemsize, hole, room, ahead)
    assert whole
    assert got == expected


@needs_compiler
@pytest.mark.parametrize("itemsize", [1, 4, 8])
def test_the_whole_file_in_one_range_and_in_two(file: BinaryIO, itemsize: int) -> None:
    content, n = os.pread(file.fileno(), N_BYTES, 0), N_BYTES // itemsize
    for ranges in ([(0, n)], [(0, 5), (5, n - 5)], [(0, n - 1), (n - 1, 1), (n, 0)]):
        assert read(file, ranges, itemsize, 0, 0) == (True, content, b"")


@needs_compiler
def test_holes_are_read_over_up_to_the_bound_and_as_far_as_staging_reaches(file: BinaryIO) -> None:
    content = os.pread(file.fileno(), N_BYTES, 0)
    ranges = [(10, 5), (20, 5), (30, 5)]  # holes of five
    untouched = b"\xee" * 100
    assert read(file, ranges, 4, 4, 100)[2] == untouched
    assert read(file, ranges, 4, 5, 100)[2] == content[40:140]
    assert read(file, ranges, 4, 5, 99)[2][:60] == content[40:100]  # the third one for itself
    assert read(file, ranges, 4, 5, 59)[2] == untouched[:59]
    assert read(file, [(10, 5), (15, 5)], 4, 5, 100)[2] == untouched  # no hole, no staging


@needs_compiler
def test_a_file_that_ends_early_is_noticed(file: BinaryIO) -> None:
    for ranges in (
        [(N_BYTES - 5, 6)],
        [(0, 1), (N_BYTES - 1, 2)],
        [(N_BYTES - 9, 2), (N_BYTES - 5, 6)],
        [(N_BYTES, 1)],
    ):
        assert not read(file, ranges, 1, 100, 100)[0]


@needs_compiler
@given(st.sets(st.integers(0, 39)), st.integers(0, 9), st.sampled_from([5, 20, 64, 1 << 10]), st.integers(0, 99))
@settings(deadline=None)
def test_lines_are_written_and_what_is_between_them_stays(lines: set[int], hole: int, room: int, seed: int) -> None:
    """room: bytes of the staging area, for a line or more; a line has 5."""
    before, at = np.arange(200, dtype=np.uint8).reshape(40, 5), np.array(sorted(lines), np.int64)
    places = np.array(random.Random(seed).sample(range(40), len(at)), np.int64)
    values = 255 - before
    staging = np.full(room + 64, 0xEE, np.uint8)
    with tempfile.TemporaryFile() as opened:
        opened.write(before.tobytes())
        opened.flush()
        assert pwrite_lines(opened.fileno(), at, hole, staging[:room], places, values)
        opened.seek(0)
        after = opened.read()
    assert np.all(staging[room:] == 0xEE)
    before[at] = values[places]
    assert after == before.tobytes()


@needs_compiler
def test_lines_that_cannot_be_written_or_are_not_there_are_said_to_be_so() -> None:
    values, places = np.zeros((2, 5), np.uint8), np.arange(2)
    with tempfile.NamedTemporaryFile() as opened:
        opened.write(bytes(10))
        opened.flush()
        staging = np.empty(100, np.uint8)
        assert not pwrite_lines(opened.fileno(), np.array([0, 9]), 9, staging, places, values)  # the hole is not there
        with open(opened.name, "rb") as for_reading:
            assert not pwrite_lines(for_reading.fileno(), np.array([0, 1]), 0, staging, places, values)
