"""Blocks of X that W steps by rows leave in memory: the same bits, within their room, and let go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import xmc_stream as xs
from xmc_stream.factors import rowblocks
from xmc_stream.factors.rowblocks import (
    ROW_BYTES,
    Holding,
    RangedBlock,
    entries_bytes,
    held_or_read,
    let_go,
    ranged_blocks,
)
from xmc_stream.lowrank import plan, ridge
from xmc_stream.lowrank.leml import LEMLRun
from xmc_stream.lowrank.parameters import LEMLParameters
from xmc_stream.lowrank.plan import lowrank_needs, plan_lowrank
from xmc_stream.runtime.plan import MemoryPlan
from xmc_stream.runtime.workers import Folders, about_this
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.system.memory import MemoryLimit

N, D, K, RANK = 700, 40, 30, 6
LINES = 64  # of a row block
ALL = 1 << 20
LIMIT = "3GB"  # bounds the whole process of the tests


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    X = sp.random(N, D, 0.1, format="csr", dtype=np.float32, random_state=1)
    Y = sp.random(N, K, 0.05, format="csr", dtype=np.float32, random_state=2)
    path = tmp_path_factory.mktemp("held") / "data.xmc"
    xs.convert(X, path, labels=Y, memory_limit=LIMIT)
    return path


@pytest.fixture(autouse=True)
def ranges_of_few_features(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rowblocks, "_RANGE_BITS", 3)
    monkeypatch.setattr(rowblocks, "_LINE_BYTES", ROW_BYTES // LINES)
    let_go()
    yield
    let_go()


def entries(blocks: Iterator[Any]) -> tuple[Any, Any, list[int]]:
    """Places and values of all blocks, and where these begin."""
    taken = [(x.entries.places.copy(), x.entries.values.copy(), x.start) for x in blocks if isinstance(x, RangedBlock)]
    return np.concatenate([x[0] for x in taken]), np.concatenate([x[1] for x in taken]), [x[2] for x in taken]


def bytes_of(path: Path, rows: tuple[int, int], holding: Holding) -> int:
    """That are read of X; what comes is compared with what stands there."""
    X, again = Dataset(path).X_rows(), Dataset(path).X_rows()
    found = entries(x for x, _ in held_or_read(X, None, rows, ROW_BYTES, holding))
    want = entries(ranged_blocks(again, rows, ROW_BYTES))
    for mine, theirs in zip(found, want, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    return X.bytes_read


def size_of(X: SparseMatrix, first: int, last: int) -> int:
    begin, end = X.entries(first, last)
    return 8 * (end - begin)


def held_of(X: SparseMatrix, first: int, last: int) -> int:
    return entries_bytes(X, (first, last))


def test_blocks_stay_from_job_to_job_of_one_run(data: Path) -> None:
    rows = (100, N)
    first = bytes_of(data, rows, Holding("a", ALL, ALL))
    entries_bytes = size_of(Dataset(data).X_rows(), *rows)
    assert first > entries_bytes
    assert bytes_of(data, rows, Holding("a", ALL, ALL)) < 100
    assert bytes_of(data, rows, Holding("b", ALL, ALL)) == first
    assert bytes_of(data, rows, Holding("a", ALL, ALL)) == first
    let_go()
    assert bytes_of(data, rows, Holding("a", ALL, ALL)) == first
    assert bytes_of(data, rows, rowblocks.NO_HOLDING) > entries_bytes


def test_jobs_that_come_at_once_read_once(data: Path) -> None:
    """X and Y, by ranges of features and as they stand; the others wait for the first one."""
    for bits in (3, 40):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rowblocks, "_RANGE_BITS", bits)
            sets = [Dataset(data) for _ in range(8)]

            def read(dataset: Dataset, run: str = f"at once {bits}") -> tuple[int, int, int]:
                X, Y = dataset.X_rows(), dataset.Y_rows()
                pairs = held_or_read(X, Y, (0, N), ROW_BYTES, Holding(run, ALL, ALL))
                n_labels = sum(len(y.indices) for _, y in pairs if y is not None)
                return X.bytes_read, Y.bytes_read, n_labels

            with ThreadPoolExecutor(8) as pool:
                found = sorted(pool.map(read, sets))
            assert [one[:2] for one in found[:-1]] == [(16, 16)] * 7  # of X and of Y where their rows begin and end
            assert found[-1][0] > size_of(sets[0].X_rows(), 0, N)
            assert {one[2] for one in found} == {sets[0].Y_rows().nnz}


def test_the_first_blocks_stay_where_there_is_no_room_for_all(data: Path) -> None:
    X = Dataset(data).X_rows()
    room = held_of(X, 0, 2 * LINES) + 8  # not enough for the third block
    holding = Holding("a", room, 2 * room)
    for rows in ((0, 350), (350, N)):
        bytes_of(data, rows, holding)
    left = bytes_of(data, (0, 350), holding)
    assert size_of(X, 2 * LINES, 350) <= left < size_of(X, 2 * LINES, 350) + 3000
    assert left < size_of(X, 0, 350)
    assert rowblocks._held.taken <= 2 * room


def test_no_more_stays_than_a_process_has_room_for(data: Path) -> None:
    X = Dataset(data).X_rows()
    room = held_of(X, 0, 350)
    holding = Holding("a", room, room + 8)
    for rows in ((0, 350), (350, N), (0, 350), (350, N)):
        read = bytes_of(data, rows, holding)
        assert rowblocks._held.taken <= room + 8
    assert read > size_of(X, 350, N)  # the second part found no room
    assert bytes_of(data, (0, 350), holding) < 100


def test_where_the_first_job_fails_the_next_one_reads(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holding, X = Holding("a", ALL, ALL), Dataset(data).X_rows()
    with monkeypatch.context() as broken:
        broken.setattr(rowblocks, "to_hold", lambda *_: [][0])
        with pytest.raises(IndexError):
            next(held_or_read(X, None, (0, N), ROW_BYTES, holding))
    assert bytes_of(data, (0, N), holding) > size_of(X, 0, N)
    assert bytes_of(data, (0, N), holding) < 100


def test_what_jobs_under_way_work_with_is_counted_until_they_end(data: Path) -> None:
    """Whatever lets go of it: a plan, or a job of another run. Else more would be held than there is room for."""
    X, rows, others = Dataset(data).X_rows(), (350, N), (0, 350)
    room = held_of(X, *rows)
    assert held_of(X, *others) <= room
    for full in (False, True):  # the job makes the blocks, or has them from memory
        for run, lets_go in (("a", let_go), ("b", None)):
            holding, held = Holding("a", room, room), rowblocks._held
            if full:
                bytes_of(data, rows, holding)
            job = held_or_read(X, None, rows, ROW_BYTES, holding)
            next(job)
            if lets_go:
                lets_go()
            other = replace(holding, run=run)
            for _ in range(2):
                assert bytes_of(data, others, other) > size_of(X, *others)  # there was no room
            assert held.taken == room
            job.close()  # type: ignore[attr-defined]
            assert held.taken == 0
            bytes_of(data, others, other)
            assert bytes_of(data, others, other) < 100
            assert held.taken == held_of(X, *others)
            let_go()


def test_a_job_that_is_late_leaves_nothing_in_the_place_of_what_is_there(data: Path) -> None:
    holding, X, rows = Holding("a", ALL, ALL), Dataset(data).X_rows(), (0, 350)
    late = held_or_read(X, None, rows, ROW_BYTES, holding)
    next(late)
    let_go()
    bytes_of(data, rows, holding)
    assert rowblocks._held.taken == 2 * held_of(X, *rows)
    late.close()  # type: ignore[attr-defined]
    assert bytes_of(data, rows, holding) < 100
    assert rowblocks._held.taken == held_of(X, *rows)


def test_what_stays_is_let_go_when_nobody_asks_and_when_memory_is_planned(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holding = Holding("a", ALL, ALL)
    for act in (
        lambda: MemoryLimit.kept(LIMIT),
        lambda: about_this("worker", 0, Folders()),
    ):
        bytes_of(data, (0, N), holding)
        assert rowblocks._held.taken
        act()
        assert not rowblocks._held.taken
    monkeypatch.setattr(rowblocks, "_IDLE", 0.05)
    bytes_of(data, (0, N), holding)
    end = time.monotonic() + 20
    while rowblocks._held.taken and time.monotonic() < end:
        time.sleep(0.01)
    assert not rowblocks._held._parts
    assert bytes_of(data, (0, N), holding) > 1000


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ridge, "_LARGE", 1)
    monkeypatch.setattr(ridge, "_PART", 1)


@pytest.mark.usefixtures("in_parts")
def test_a_training_whose_x_stays_in_memory_gives_the_model_of_one_by_columns(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {
        "rank": RANK,
        "cg_tol": 0.0,
        "cg": 4,
        "tol": 0.0,
        "alternations": 3,
        "memory_limit": LIMIT,
    }
    read, digests = {}, set()
    monkeypatch.setattr(plan, "LARGE_ROW_BYTES", ROW_BYTES)
    blocks = 8 * (size_of(Dataset(data).X_rows(), 0, LINES) + 500)  # of eight parts, the first block of each
    for name, threads, room in (("columns", 1, 0), ("rows", 2, ALL), ("reads", 2, 0), ("some", 2, blocks)):
        monkeypatch.setattr(plan, "held_bytes", lambda _, room=room: room)
        clf = xs.LEML(**options, threads=threads).fit(data, model=tmp_path / name)
        digests.add(clf.model_.digest())
        read[name] = clf.report_["bytes_read"]
        assert not rowblocks._held._parts  # the run is over
    assert len(digests) == 1
    assert read["rows"] < 0.6 * read["reads"]
    assert read["rows"] < read["some"] < read["reads"]


@pytest.mark.usefixtures("in_parts")
def test_what_stays_is_planned(data: Path, tmp_path: Path) -> None:
    dataset, p = Dataset(data), LEMLParameters(rank=RANK, lam=1.0)
    kept = rowblocks.held_bytes(dataset)
    plan = MemoryPlan(2**40, 2**30, 2)
    for threads, processes in ((2, 1), (1, 3), (1, 1), (16, 1)):  # by rows, and on one thread by columns
        assert plan_lowrank(MemoryPlan(2**40, 2**32, threads, processes), dataset, p).held == (kept, kept)
    fixed = sum(lowrank_needs(MemoryPlan(2**40, 0, 2), dataset, p, RANK, RANK, rowblocks.LARGE_ROW_BYTES).values())
    for more in (0, 8000, 16000):
        tight = MemoryPlan(2**40, fixed + more, 2)
        sizes = plan_lowrank(tight, dataset, p)
        assert sizes.held == (int(0.75 * more) // 8, int(0.75 * more))
        assert sum(lowrank_needs(tight, dataset, p, *sizes.widest).values()) <= tight.budget
    sessions = [LEMLRun(dataset, tmp_path, p, 0, plan, {})._holding.run for _ in range(2)]  # type: ignore[arg-type]
    assert sessions[0] != sessions[1]
