"""Units: classes of which few have positives are solved, kept and written together, and no answer shows it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

import xmc_stream as xs
from xmc_stream.datasets.verify import verify
from xmc_stream.errors import StoreError
from xmc_stream.linear import weights
from xmc_stream.linear.model import LinearModel
from xmc_stream.linear.tiles import TileSizes, tile_width
from xmc_stream.linear.weights import cut_units, plain_units, units_of_run
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.ppdsparse.run import PPDSparseRun
from xmc_stream.runtime.job import Job, Notes, run_here
from xmc_stream.runtime.plan import MemoryPlan
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.model import UNIT, begin_model
from xmc_stream.store.new_dataset import new_dataset

K, D, WIDEST = 6_000, 40, 4
PLAN = MemoryPlan(2**40, 2**30, 1)


def of_labels(path: Path, labels: list[list[int]], n_labels: int, seed: int = 0) -> Path:
    """Data whose rows have the labels, and features that tell something of the first one."""
    rng = np.random.default_rng(seed)
    x = rng.random((len(labels), D)) < 0.2
    x[np.arange(len(labels)), [mine[0] * 7 % D if mine else 0 for mine in labels]] = True
    with new_dataset(path, D, n_labels, {}) as data:
        data.append(
            np.concatenate([[0], np.cumsum(x.sum(axis=1))]), np.nonzero(x)[1].astype(np.int32),
            rng.random(int(x.sum()), np.float32), np.concatenate([[0], np.cumsum([len(mine) for mine in labels])]),
            np.array([label for mine in labels for label in mine], np.int32),
        )  # fmt: skip
    return path


def scattered(path: Path, n_labels: int, n: int = 300, seed: int = 0) -> Path:
    """Rows with a few of very many labels: every label that occurs does so in a few rows."""
    rng = np.random.default_rng(seed)
    some = rng.choice(n_labels, 60, replace=False)
    return of_labels(path, [sorted(set(rng.choice(some, 2).tolist())) for _ in range(n)], n_labels, seed)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 rows, 60 of 6,000 labels occur."""
    return scattered(tmp_path_factory.mktemp("sparse") / "d.xmc", K)


@pytest.fixture(autouse=True)
def _narrower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of four times UNIT classes at most, so that few classes are several units."""
    monkeypatch.setattr(weights, "WIDEST", WIDEST)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What makes all units plain from then on."""
    return lambda: monkeypatch.setattr(weights, "WIDEST", 1)


# the cut


@given(st.lists(st.tuples(st.integers(0, 200 * UNIT - 1), st.integers(1, 40)), max_size=30), st.integers(1, 200 * UNIT))
def test_units_hold_every_class_once_and_no_more_than_they_may(some: list[tuple[int, int]], n_labels: int) -> None:
    counts = np.zeros(n_labels, np.int64)
    for label, n in some:
        counts[label % n_labels : label % n_labels + n * 100] = n

    class Data:
        def positives_of_ranges(self, n: int) -> tuple[Any, Any]:
            starts = np.arange(0, n_labels, n)
            return np.add.reduceat(counts > 0, starts, dtype=np.int64), np.add.reduceat(counts, starts)

    data: Any = Data()
    data.n_labels = n_labels
    cut = cut_units(data)
    assert [unit.first for unit in cut] == [0, *(unit.last for unit in cut[:-1])]
    assert cut[-1].last == n_labels
    for before, unit in zip([None, *cut], cut, strict=False):
        assert unit.first % UNIT == 0
        mine = counts[unit.first : unit.last]
        if unit.last - unit.first > UNIT:
            assert (mine > 0).sum() <= weights._LEARNED
            assert mine.sum() <= weights._POSITIVES
            assert len(unit.numbers) <= WIDEST
        if before is not None:  # it could not have had the next UNIT classes
            more = counts[before.first : unit.first + UNIT]
            assert (
                len(before.numbers) == WIDEST or (more > 0).sum() > weights._LEARNED or more.sum() > weights._POSITIVES
            )  # fmt: skip


def test_the_dataset_counts_by_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Dataset(scattered(tmp_path / "d.xmc", 5_000))
    counts = data.label_counts()
    for window in (1, 2000, 1 << 16):
        monkeypatch.setattr("xmc_stream.store.dataset._COUNTS", window)
        learned, positives = data.positives_of_ranges(UNIT)
        starts = np.arange(0, 5000, UNIT)
        assert learned.tolist() == np.add.reduceat((counts > 0).astype(int), starts).tolist()
        assert positives.tolist() == np.add.reduceat(counts, starts).tolist()


def test_an_ordinary_set_has_plain_units(small: Path) -> None:
    assert cut_units(Dataset(small)) == plain_units(1100) == [(0, 1024), (1024, 1100)]
    assert [unit.name for unit in plain_units(1100)] == ["0", "1"]


# the same model


def fitted(data: Path, model: Path, **options: Any) -> xs.PPDSparse:
    return xs.PPDSparse(memory_limit="3GB", threads=2, **options).fit(xs.open_dataset(data), model=model)


@pytest.mark.parametrize(
    "options",
    [{}, {"max_rounds": None, "prune": 0.05, "bias": False}, {"delta": 0.5, "min_value": 0.1, "loss": "hinge"}],
)
def test_wide_units_show_in_no_answer(sparse: Path, tmp_path: Path, plain: Any, options: dict[str, Any]) -> None:
    wide = fitted(sparse, tmp_path / "wide", **options).model_
    assert [len(unit.numbers) for unit in wide.units] == [4, 2]
    plain()
    usual = fitted(sparse, tmp_path / "plain", **options).model_
    assert len(usual.units) == 6
    assert wide.digest() == usual.digest()
    for name in ("objective", "duality_gap", "violation", "nnz", "n_open", "n_empty", "rounds"):
        assert wide.attributes[name] == pytest.approx(usual.attributes[name], rel=1e-12), name
    assert wide.attributes["tiles"] == usual.attributes["tiles"]
    assert wide.bias().tolist() == usual.bias().tolist()
    assert (wide.to_scipy() != usual.to_scipy()).nnz == 0
    for first, last in ((0, 1024), (3 * UNIT, 4 * UNIT), (5 * UNIT, K), (1030, 4000)):
        block = wide.classes(first, last)
        assert block.indices.tolist() == usual.to_scipy()[:, first:last].indices.tolist()
    data = xs.open_dataset(sparse)
    for mine, theirs in zip(wide.predict_topk(data, 3), usual.predict_topk(data, 3), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    figures = [xs.evaluate(model.path, data, data) for model in (wide, usual)]
    assert figures[0] == figures[1]
    assert verify(wide.path)["sound"]
    assert len(list((tmp_path / "wide" / "units").iterdir())) == 2


@pytest.mark.slow
def test_a_warm_start_from_units_cut_otherwise(sparse: Path, tmp_path: Path, plain: Any) -> None:
    more = scattered(tmp_path / "more.xmc", K, n=350, seed=1)
    models = {"wide": fitted(sparse, tmp_path / "wide").model_}
    ends = [fitted_from(more, tmp_path / "a", models["wide"])]
    plain()
    models["plain"] = fitted(sparse, tmp_path / "plain").model_
    ends.append(fitted_from(more, tmp_path / "b", models["wide"]))
    ends.append(fitted_from(more, tmp_path / "c", models["plain"]))
    assert len(set(ends)) == 1


def fitted_from(data: Path, path: Path, start: Any) -> str:
    learner = xs.PPDSparse(memory_limit="3GB", threads=1, C=2.0)
    model: Any = learner.fit(xs.open_dataset(data), model=path, warm_start=start).model_
    return str(model.digest())


def test_pdsparse_writes_wide_units(sparse: Path, tmp_path: Path, plain: Any) -> None:
    settings: dict[str, Any] = {"memory_limit": "3GB", "threads": 1, "max_passes": 3, "lam": 0.01, "refit": False}
    wide = xs.PDSparse(**settings).fit(xs.open_dataset(sparse), model=tmp_path / "wide").model_
    plain()
    usual = xs.PDSparse(**settings).fit(xs.open_dataset(sparse), model=tmp_path / "plain").model_
    assert (len(wide.units), len(usual.units)) == (2, 6)
    assert wide.digest() == usual.digest()


def test_a_model_with_units_that_cannot_be_is_refused(sparse: Path, tmp_path: Path) -> None:
    path = fitted(sparse, tmp_path / "m").model_.path
    about = json.loads((path / "zarr.json").read_text())
    for wrong in (None, 0, [], [0, 1024.0], [0, 5], [UNIT, 2 * UNIT], [0, 2 * UNIT, UNIT], [0, 6 * UNIT]):
        about["attributes"]["units"] = wrong
        (path / "zarr.json").write_text(json.dumps(about))
        with pytest.raises(StoreError, match="does not say which classes its units have"):
            LinearModel(path)


# what is paid


def files_and_syncs(data: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """How many files and folders a training leaves in its units, and how often it waits for the disk."""
    synced: list[int] = []  # some at a time: a sum would miss some
    fsync = os.fsync

    def count(fd: int) -> None:
        synced.append(fd)
        fsync(fd)

    begin_model(work)
    notes = Notes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", count)
        run_here(PPDSparseRun(Dataset(data), work, PPDSparseParameters(), 0, PLAN, notes).loop(), notes)
    return sum(1 for _ in (work / "units").rglob("*")), len(synced)


def test_labels_that_no_row_has_cost_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = files_and_syncs(scattered(tmp_path / "few.xmc", 1000), tmp_path / "few.model", monkeypatch)
    many = files_and_syncs(scattered(tmp_path / "many.xmc", WIDEST * UNIT), tmp_path / "many.model", monkeypatch)
    assert many == few
    # a state or what a search found: a file and the folder it is in; a unit of the model: 16 files, 17 folders, and one;
    # and folders as they are made
    assert few[1] <= 3 * 2 + 3 * 2 + 34 + 12


@given(st.integers(0, 2**32 - 1), st.integers(1, 300), st.sampled_from([1, 16, 128]))
def test_sizes_of_tiles_are_those_of_the_weights(seed: int, n_classes: int, step: int) -> None:
    rng = np.random.default_rng(seed)
    n_features = int(rng.integers(1, 2000))
    share = rng.choice([0.001, 0.3])
    lengths = rng.binomial(n_features, share, n_classes)
    lengths[rng.random(n_classes) < 0.5] = 0
    features = [np.sort(rng.choice(n_features, n, replace=False)).astype(np.int32) for n in lengths]
    occurrences = rng.integers(0, 9, n_features)
    sizes = TileSizes(5, 5 + n_classes, n_features, occurrences, step)
    sizes.in_tiles[:] = in_tiles = (lengths > 0) | (rng.random(n_classes) < 0.3)
    for low in range(0, n_classes, 50):
        mine = slice(low, min(low + 50, n_classes))
        buffer = np.concatenate(features[mine])
        sizes.add(lengths[mine], buffer)
        buffer[:] = -1  # it is the caller's
    matrix = sp.csc_matrix(
        (np.ones(lengths.sum()), np.concatenate(features), np.concatenate([[0], np.cumsum(lengths)])),
        shape=(n_features, n_classes),
    )
    assert sizes.work == int(occurrences @ np.asarray(matrix.sum(axis=1)).ravel())
    assert {(span.last, span.first) for span in sizes.ranges} == {
        (5 + min(low + (step << level), n_classes), 5 + low)
        for level in range(4)
        for low in range(0, n_classes, step << level)
        if in_tiles[low : low + (step << level)].any()
    }
    for span in sizes.ranges:
        mine = slice(span.first - 5, span.last - 5)
        width, counts = tile_width(int(in_tiles[mine].sum())), np.diff(matrix[:, mine].tocsr().indptr)
        total = int(np.where(counts * 4 >= width, width, counts).sum())
        assert span.weights == counts.sum()
        assert span.tile == 6 * total + 4 * (n_features + 1) + 4 * width


# going on


class StoppedHereError(Exception):
    """A run ends here."""


class Until(Notes):
    """A ledger whose run is stopped when a key is added."""

    def __init__(self, notes: Notes, last: str) -> None:
        super().__init__(notes)
        self.last = last

    def add(self, key: str, receipt: dict[str, Any]) -> None:
        super().add(key, receipt)
        if key == self.last:
            raise StoppedHereError


def run_until(data: Path, work: Path, notes: Notes, last: str) -> Notes:
    """Train until a line of the ledger; returns the ledger."""
    ledger = Until(notes, last)
    with pytest.raises(StoppedHereError):
        run_here(PPDSparseRun(Dataset(data), work, PPDSparseParameters(), 0, PLAN, ledger).loop(), ledger)
    return Notes(ledger)


def written_weights(work: Path, cut: list[Any]) -> list[Any]:
    from xmc_stream.linear.weights import unit_path
    from xmc_stream.store.matrix import SparseMatrix

    blocks = [SparseMatrix(unit_path(work, unit) / "weights").block(0, unit.last - unit.first) for unit in cut]
    return [np.concatenate([getattr(block, name) for block in blocks]).tolist() for name in ("indices", "values")]


@pytest.mark.parametrize("last", ["solve/0/3", "cut/1/narrow", "solve/1/5", "solve/2/0", "finalise/2"])
def test_a_run_that_began_in_plain_units_goes_on_in_them(
    sparse: Path, tmp_path: Path, plain: Any, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    begin_model(tmp_path / "old")
    with monkeypatch.context() as patch:
        patch.setattr(weights, "WIDEST", 1)  # as every release before there were others
        notes = run_until(sparse, tmp_path / "old", Notes(), last)
    assert "units" not in notes
    run = PPDSparseRun(Dataset(sparse), tmp_path / "old", PPDSparseParameters(), 0, PLAN, notes)
    figures = run_here(run.loop(), notes)
    assert run.units == plain_units(K)
    begin_model(tmp_path / "new")
    notes = Notes()
    run = PPDSparseRun(Dataset(sparse), tmp_path / "new", PPDSparseParameters(), 0, PLAN, notes)
    assert figures["objective"] == pytest.approx(run_here(run.loop(), notes)["objective"], rel=1e-12)
    assert written_weights(tmp_path / "old", plain_units(K)) == written_weights(tmp_path / "new", run.units)


@pytest.mark.parametrize("last", ["solve/0/0-3", "cut/1/narrow", "solve/2/4-5", "finalise/0-3"])
def test_a_run_goes_on_in_the_units_it_began_with(sparse: Path, tmp_path: Path, plain: Any, last: str) -> None:
    begin_model(tmp_path / "m")
    notes = run_until(sparse, tmp_path / "m", Notes(), last)
    done = set(notes)
    plain()  # as if a later release cut them so
    again: list[str] = []

    class Told(Notes):
        def add(self, key: str, receipt: dict[str, Any]) -> None:
            again.append(key)
            super().add(key, receipt)

    ledger = Told(notes)
    run = PPDSparseRun(Dataset(sparse), tmp_path / "m", PPDSparseParameters(), 0, PLAN, ledger)
    run_here(run.loop(), ledger)
    assert [unit.first for unit in run.units] == [0, WIDEST * UNIT]
    assert units_of_run(Dataset(sparse), ledger, ("solve/0",)) == run.units
    assert not done & set(again)


def test_jobs_have_names_of_their_own(sparse: Path, tmp_path: Path) -> None:
    begin_model(tmp_path / "m")
    loop = PPDSparseRun(Dataset(sparse), tmp_path / "m", PPDSparseParameters(), 0, PLAN, Notes()).loop()
    jobs: list[Job] = list(next(loop).jobs)
    assert [job.key for job in jobs] == ["solve/0/0-3", "solve/0/4-5"]
