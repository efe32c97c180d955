"""Large classes, whose rows stream by: the same bits however they are solved, within the limit."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.executed import fit_cut
from helpers.soak import first
from hypothesis import given
from hypothesis import strategies as st

import xmc_stream as xs
from xmc_stream.ppdsparse import active_rows
from xmc_stream.ppdsparse import plan as solve_plan
from xmc_stream.ppdsparse import solver as ppdsparse
from xmc_stream.ppdsparse.plan import StreamRoom
from xmc_stream.runtime.plan import Cuts
from xmc_stream.store.new_dataset import new_dataset

N, D, K = 1300, 60, 7


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head class with nine rows in ten, another with a third, and small ones; sorted by label, as files may be."""
    rng = np.random.default_rng(3)
    W = rng.standard_normal((D, K))
    X = sp.random(N, D, 0.2, "csr", dtype=np.float32, random_state=5, data_rvs=rng.standard_normal)
    scores = X @ W + rng.standard_normal((N, K)) * 0.5
    shares = [0.9, 0.33, 0.1, 0.02, 0.01, 0.004, 0.0]
    Y = np.column_stack([scores[:, k] >= np.quantile(scores[:, k], 1 - share) for k, share in enumerate(shares)])
    Y[:, -1] = False
    order = np.argsort(-scores[:, 1])
    path = tmp_path_factory.mktemp("stream") / "data.xmc"
    xs.convert(X[order], path, labels=sp.csr_matrix(Y[order].astype(np.int8)), memory_limit="3GB")
    return path


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes are large from 90 rows on, strips are 16 rows long."""
    monkeypatch.setattr(ppdsparse, "LARGE_BYTES", 90 * (8 * 12 + ppdsparse.ROW_BYTES))
    monkeypatch.setattr(ppdsparse, "STRIP_BYTES", 2000)


class Watch:
    """How the large classes of a run were solved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory = self.disk = 0
        make, disk = active_rows.MemoryRows.__init__, active_rows.DiskRows.__init__

        def in_memory(active: Any, *args: Any) -> None:
            self.memory += int(args[0].sum() > 40)  # not the warm-up's
            make(active, *args)

        def on_disk(active: Any, *args: Any) -> None:
            self.disk += int(args[1].n_samples == N)
            disk(active, *args)

        monkeypatch.setattr(active_rows.MemoryRows, "__init__", in_memory)
        monkeypatch.setattr(active_rows.DiskRows, "__init__", on_disk)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "some done": {"max_rounds": 4, "epochs": 8, "tol": 0.3, "lam": 0.1},
    "hinge": {"loss": "hinge", "bias": False},
    "approximate": {"delta": 3.0, "min_value": 0.05},
    "positives weigh more": {"positive_weight": 3.0},
    "hinge, positives weigh less": {"positive_weight": 0.3, "loss": "hinge"},
}


def digest(data: Path, path: Path, threads: int = 1, cuts: Cuts | None = None, **settings: Any) -> str:
    clf = xs.PPDSparse(memory_limit="2GB", threads=threads, **{"epochs": 3, **settings})
    return str(fit_cut(clf, data, path, cuts).model_.digest())


@pytest.fixture(scope="module")
def expected(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The digest by a setting where memory holds all rows, made once."""

    @cache
    def made(name: str) -> str:
        with pytest.MonkeyPatch.context() as patch:
            small(patch)
            watch = Watch(patch)
            made = digest(data, tmp_path_factory.mktemp("held") / "m", **SETTINGS[name])
        assert (watch.memory, watch.disk) == (0, 0)
        return made

    return made


STREAMED = Cuts(solve_rows=60)  # no large class fits a batch


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_streamed_classes_end_the_same(
    data: Path, tmp_path: Path, expected: Callable[[str], str], watch: Watch, name: str
) -> None:
    held = expected(name)
    assert digest(data, tmp_path / "streamed", 2, STREAMED, **SETTINGS[name]) == held
    assert watch.memory > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", first(SETTINGS, 3))
def test_a_class_that_exceeds_memory_ends_the_same(
    data: Path, tmp_path: Path, expected: Callable[[str], str], watch: Watch, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    held = expected(name)
    alone = StreamRoom.together

    def none_fits(room: StreamRoom, *args: Any) -> Any:
        return [(cut, room.classes + 1) for cut, _ in alone(replace(room, classes=0), *args)]

    monkeypatch.setattr(StreamRoom, "together", none_fits)
    assert digest(data, tmp_path / "disk", 1, STREAMED, **SETTINGS[name]) == held
    assert watch.disk > 0


@pytest.mark.slow
def test_a_group_that_exceeds_the_buffer_is_taken_in_parts(
    data: Path, tmp_path: Path, expected: Callable[[str], str], watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = expected("default")
    room = solve_plan.plan_solve

    def narrow(*args: Any) -> Any:
        sizes = room(*args)
        return replace(sizes, room=sizes.room and replace(sizes.room, nnz=150))

    monkeypatch.setattr("xmc_stream.ppdsparse.plan.plan_solve", narrow)
    assert digest(data, tmp_path / "parts", 1, STREAMED) == held
    assert watch.memory > 0


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200,000 rows of 60 entries, 96 MB; 90 % of the rows are positives of class 0."""
    n, d, per_row = 200_000, 4000, 60
    path = tmp_path_factory.mktemp("heavy") / "heavy.xmc"
    rng = np.random.default_rng(0)
    w = rng.standard_normal(d).astype(np.float32)
    with new_dataset(path, d, 3, {"normalize": "l2"}) as writer:
        for _ in range(0, n, 10_000):
            indices = (rng.integers(0, d // per_row, (10_000, per_row)) + d // per_row * np.arange(per_row)).astype(
                np.int32
            )
            scores = w[indices].sum(axis=1) + rng.standard_normal(10_000) * 4
            labels = np.column_stack([scores > np.quantile(scores, 0.1), scores > np.quantile(scores, 0.95)])
            indptr = np.arange(10_001, dtype=np.int64)
            values = np.full(indices.size, per_row**-0.5, np.float32)
            y = np.concatenate([[0], np.cumsum(labels.sum(axis=1))])
            writer.append(per_row * indptr, indices.ravel(), values, y, np.nonzero(labels)[1].astype(np.int32))
    return path


SETTINGS_HEAVY = ("--set", "max_rounds=2", "--set", "last_epochs=2", "--threads", "1")


@pytest.fixture(scope="module")
def held(heavy: Path, tmp_path_factory: pytest.TempPathFactory, cli: Callable[..., Any]) -> tuple[str, int]:
    """The digest where memory holds all rows, and the peak."""
    model = tmp_path_factory.mktemp("held") / "model"
    report = cli("train", heavy, model, "--memory-limit", "4GB", *SETTINGS_HEAVY)
    return xs.load_model(model).digest(), report["peak_rss"]


@pytest.mark.slow
def test_a_class_of_nine_rows_in_ten_trains_in_a_part_of_them(
    heavy: Path, tmp_path: Path, cli: Callable[..., Any], commands: Callable[..., Any], held: tuple[str, int]
) -> None:
    """Its active rows take 110 MB, the matrix that is made of them 96 MB: a run that may hold them does.

    The run is killed while they stream; the same command ends with the same model.
    """
    model = tmp_path / "model"
    least = commands("plan", "train", heavy, model, *SETTINGS_HEAVY)["least_limit"]
    assert least < 330e6  # libraries that distributed loads where they are installed take 50 MB more
    options = ("train", str(heavy), str(model), "--memory-limit", str(least + 8 * 10**6), *SETTINGS_HEAVY)
    scratch = tmp_path / "model.partial" / "scratch"
    with subprocess.Popen(
        [sys.executable, "-m", "xmc_stream.cli", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as run:
        while run.poll() is None and not any(scratch.glob("*")):
            time.sleep(0.01)
        time.sleep(0.3)
        run.kill()
    assert any(scratch.glob("*"))
    report = cli(*options)
    digest, peak = held
    assert report["peak_rss"] <= min(report["memory_limit"], peak - 150e6)
    assert report["solve_passes"] > 0
    assert xs.load_model(model).digest() == digest
    assert not (model / "scratch").exists()


@pytest.fixture(scope="module")
def many_large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300,000 rows of 10 entries; each of 64 classes has half of them: 240 MB of active rows, 24 MB of X."""
    n, d, per_row, k = 300_000, 1000, 10, 64
    path = tmp_path_factory.mktemp("many_large") / "data.xmc"
    rng = np.random.default_rng(0)
    W = rng.standard_normal((d, k)).astype(np.float32)
    with new_dataset(path, d, k, {"normalize": "l2"}) as writer:
        for _ in range(0, n, 10_000):
            indices = rng.integers(0, d // per_row, (10_000, per_row)) + d // per_row * np.arange(per_row)
            labels = W[indices].sum(axis=1) + rng.standard_normal((10_000, k)) > 0
            y = np.concatenate([[0], np.cumsum(labels.sum(axis=1))])
            values = np.full(indices.size, per_row**-0.5, np.float32)
            indptr = per_row * np.arange(10_001, dtype=np.int64)
            writer.append(indptr, indices.ravel().astype(np.int32), values, y, np.nonzero(labels)[1].astype(np.int32))
    return path


@pytest.mark.slow
def test_active_rows_in_memory_are_those_of_one_turn(
    many_large: Path, tmp_path: Path, cli: Callable[..., Any], commands: Callable[..., Any]
) -> None:
    """Classes go by turns, with a third of the active rows each: what one turn held is gone when the next one starts."""
    settings = ("--set", "max_rounds=1", "--set", "last_epochs=2", "--threads", "2")
    least = commands("plan", "train", many_large, tmp_path / "model", *settings)["least_limit"]
    report = cli("train", many_large, tmp_path / "model", "--memory-limit", str(least + 80 * 10**6), *settings)
    assert report["solve_passes"] >= 3 * (2 + 2)
    assert report["peak_rss"] <= report["memory_limit"]


@given(
    st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)), max_size=40), st.integers(0, 10**9), st.booleans()
)
def test_classes_are_put_together_as_long_as_they_fit(sizes: list[tuple[int, int]], classes: int, known: bool) -> None:
    room = StreamRoom(10**6, classes, 2, 10**4, 500)
    active, found = (
        (np.array(of, np.int64) for of in zip(*sizes, strict=True)) if sizes else (np.zeros(0, np.int64),) * 2
    )

    def taken(begin: int, end: int) -> int:
        merged = np.maximum(active, found // 2) if known else active
        of_classes = (8 * 10**4 + 4 * 501) * (end - begin) + 15 * int(active[begin:end].sum())
        return of_classes + 60 * int(merged[begin:end].max())

    cuts, begin = [], 0
    for end in range(1, len(active) + 1):
        if end - begin > 1 and taken(begin, end) > classes:
            cuts.append((begin, end - 1))
            begin = end - 1
    if len(active):
        cuts.append((begin, len(active)))
    assert room.together(active, found if known else None) == [(cut, taken(*cut)) for cut in cuts]
