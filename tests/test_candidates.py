"""What search jobs found, whole classes and intervals, read as one block and as a stream, against plain lists."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xmc_stream.ppdsparse import candidates
from xmc_stream.ppdsparse.candidates import (
    CandidateFile,
    CandidateRows,
    Found,
    candidate_windows,
    new_candidates,
    read_candidates,
    select_threshold,
)

N = 400  # rows of the data
SCORES = st.one_of(
    st.sampled_from([-0.99, -0.0, 0.0, 0.5, 2.0, np.float32(0.5) + np.float32(2**-24)]), st.floats(-1, 3, width=32)
).map(np.float32)
Rows = dict[int, Any]  # row -> score


def write(
    path: Path, first_label: int, classes: list[Rows], flushed: list[int], start: int, interval: int
) -> CandidateFile:
    """A search job's result for rows from `start`: flushed classes interval after interval, the others whole."""
    with new_candidates(path, len(classes), N, np.array(flushed, np.int64)) as writer:
        if writer.intervals is not None:
            for low in range(start, N, interval):
                lines = [sorted(row for row in classes[c] if low <= row < low + interval) for c in flushed]
                scores = [classes[c][row] for c, rows in zip(flushed, lines, strict=True) for row in rows]
                rows = [row for rows in lines for row in rows]
                writer.intervals.append(
                    np.array([*map(len, lines)]), np.array(rows, np.int64), np.array(scores, np.float32)
                )
        lines = [[] if c in flushed else sorted(of_class) for c, of_class in enumerate(classes)]
        scores = [classes[c][row] for c, rows in enumerate(lines) for row in rows]
        rows = [row for rows in lines for row in rows]
        writer.rows.append(np.array([*map(len, lines)]), np.array(rows, np.int64), np.array(scores, np.float32))
        writer.counts[:] = [*map(len, classes)]
    return CandidateFile(first_label, first_label + len(classes), str(path))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, list[Rows], list[int]]], int]:
    """First label; of each job the ends of its rows, what it found of each class, who is flushed; rows of an interval."""
    n_classes = draw(st.integers(1, 5))
    bounds = [0, *sorted(draw(st.lists(st.integers(1, N - 1), max_size=2))), N]
    found = []
    for low, high in itertools.pairwise(bounds):
        rows = st.dictionaries(st.integers(low, high - 1), SCORES, max_size=60) if low < high else st.just({})
        flushed = draw(st.sets(st.integers(0, n_classes - 1)))
        found.append((low, high, [draw(rows) for _ in range(n_classes)], sorted(flushed)))
    return draw(st.integers(0, 3)), found, draw(st.integers(1, 200))


@given(jobs(), st.data())
@settings(deadline=None, max_examples=15)
def test_all_that_was_found_comes_in_order_whole_and_in_windows(problem: Any, data: st.DataObject) -> None:
    label, found, interval = problem
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "_WINDOW", data.draw(st.integers(1, 50)))
        patch.setattr(candidates, "_LINES", data.draw(st.integers(1, 20)))
        files = [
            write(Path(folder) / str(low), label, classes, flushed, low, interval) if high > low else None
            for low, high, classes, flushed in found
        ]
        found_by = Found(tuple(file for file in files if file is not None)).open(N)
        expected: list[Rows] = [{} for _ in found[0][2]]
        for (_, _, classes, _), (c, of_class) in itertools.product(found, enumerate(expected)):
            of_class.update(classes[c])
        first = label + data.draw(st.integers(-1, len(expected) - 1))
        last = data.draw(st.integers(first + 1, label + len(expected) + 1))
        ptr, rows, scores = read_candidates(found_by, first, last, N, np.zeros(last - first, np.int64))
        for at, c in enumerate(range(first - label, last - label)):
            mine = slice(ptr[at], ptr[at + 1])
            of_class = expected[c] if 0 <= c < len(expected) else {}
            assert rows[mine].tolist() == sorted(of_class)
            assert scores[mine].tolist() == [of_class[row] for row in sorted(of_class)]
            windows = list(candidate_windows(found_by, label + c))
            assert [row for part, _ in windows for row in part.tolist()] == sorted(of_class)
            assert [score for _, part in windows for score in part.tolist()] == scores[mine].tolist()
            assert all(0 < len(part) <= candidates._WINDOW and part.dtype == np.int64 for part, _ in windows)
            room = data.draw(st.integers(0, len(of_class) + 2))
            best = check_threshold(found_by, label + c, of_class, room)
            with pytest.MonkeyPatch.context() as little:  # of which more is too much to be read as it is
                little.setattr(candidates, "_WHOLE", 10)
                of_one = read_candidates(found_by, label + c, label + c + 1, N, np.array([room]))
            if len(of_class) > 10:
                assert of_one[1].tolist() == best
                assert of_one[2].tolist() == [of_class[row] for row in best]
            assert of_one[0].tolist() == [0, len(of_one[1])]


def check_threshold(found_by: list[CandidateRows], label: int, of_class: Rows, room: int) -> list[int]:
    """Rows that pass, ascending."""
    threshold, last_tie = select_threshold(found_by, label, room)
    passing = [row for row, s in of_class.items() if s > threshold or (s == threshold and row <= last_tie)]
    assert sorted(passing) == sorted(sorted(of_class, key=lambda row: (-of_class[row], row))[:room])
    if len(of_class) > room > 0:
        assert of_class[last_tie] == threshold
    return sorted(passing)


def test_the_best_of_very_many(tmp_path: Path) -> None:
    """More than a window holds, and scores whose upper bits agree."""
    rng = np.random.default_rng(0)
    n = 300_000
    scores = np.where(rng.random(n) < 0.5, 1 + rng.random(n) * 1e-3, rng.normal(size=n)).astype(np.float32)
    scores[::7] = np.float32(1.0005)
    with new_candidates(tmp_path / "f", 1, n, np.zeros(1, np.int64)) as writer:
        assert writer.intervals is not None
        for low in range(0, n, 70_000):
            part = np.arange(low, min(low + 70_000, n))
            writer.intervals.append(np.array([len(part)]), part, scores[part])
        writer.rows.append(np.zeros(1, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))
        writer.counts[0] = n
    found_by = Found((CandidateFile(5, 6, str(tmp_path / "f")),)).open(n)
    order = np.lexsort((np.arange(n), -scores))
    for room in (1, 1000, 60_000, 100_000, 200_000, n - 1, n):
        threshold, last_tie = select_threshold(found_by, 5, room)
        passing = (scores > threshold) | ((scores == threshold) & (np.arange(n) <= last_tie))
        assert np.array_equal(np.flatnonzero(passing), np.sort(order[:room]))
    assert select_threshold(found_by, 5, n) == (-np.inf, -1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="open files are listed in /proc")
def test_no_file_stays_open_between_reads(tmp_path: Path) -> None:
    """A job has opened what many searches found: all their files at once would be more than a process may have."""
    path = tmp_path / "f"
    found_by = Found((write(path, 0, [{1: 0.5, 3: 2.0}, {2: 1.0}], [1], 0, 4),)).open(N)

    def held() -> int:
        return sum(Path(f"/proc/self/fd/{fd}").resolve() == path.resolve() for fd in os.listdir("/proc/self/fd"))

    for _ in range(2):
        assert read_candidates(found_by, 0, 2, N, np.array([9, 9]))[1].tolist() == [1, 3, 2]
        assert held() == 0
        assert [rows.tolist() for rows, _ in candidate_windows(found_by, 1)] == [[2]]
        assert held() == 0
    found_by[0].of_classes("counts", 0, 2)
    assert held() > 0
