"""A job reads only what it needs: with every chunk file outside its ranges removed it does the same."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from xmc_stream.errors import StoreError
from xmc_stream.linear.model import LinearModel
from xmc_stream.linear.predict import LinearTask, PredictJob
from xmc_stream.models.runs import Wanted
from xmc_stream.ppdsparse.candidates import CandidateRows
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.ppdsparse.run import PPDSparseRun
from xmc_stream.ppdsparse.search import SearchJob
from xmc_stream.runtime.job import Notes
from xmc_stream.runtime.plan import MIB, Cuts, MemoryPlan
from xmc_stream.store.dataset import Dataset, open_dataset
from xmc_stream.store.encoding import new_matrix
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.store.model import begin_model
from xmc_stream.store.predictions import Predictions, begin_predictions, finish_predictions

CHUNK = 4096  # bytes: small, so that small data have many
PLAN = MemoryPlan(2**31, 512 * MIB, 2, cuts=Cuts(rows=97))


@pytest.fixture(scope="module")
def chunked(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The small set in small chunks."""
    path = tmp_path_factory.mktemp("chunked") / "small.xmc"
    shutil.copytree(small, path)
    for name in ("X/rows", "Y/rows", "Y/columns"):
        matrix = SparseMatrix(small / name)
        data_dtype = None if matrix.data is None else np.float32
        encoding = "csc_matrix" if name == "Y/columns" else "csr_matrix"
        with new_matrix(path / name, encoding, matrix.shape, data_dtype, chunk_bytes=CHUNK) as writer:
            for block in matrix.blocks(1 << 14):
                writer.append(np.diff(block.indptr), block.indices, block.data)
    return Dataset(path)


def cut_down(dataset: Dataset, target: Path, ranges: dict[str, tuple[int, int]]) -> tuple[Dataset, int, int]:
    """A copy with those chunk files alone that hold the named matrices' lines of a range; how many are left and gone."""
    kept = set()
    for name, (start, stop) in ranges.items():
        matrix = SparseMatrix(dataset.path / name)
        first, last = matrix.indptr.read(start, stop + 1)[[0, -1]].tolist()
        for array in matrix.arrays():
            a, b = (start, stop + 1) if array is matrix.indptr else (first, last)
            kept |= {
                array.chunk_file(k).relative_to(dataset.path) for k in range(a // array.chunk, -(-b // array.chunk))
            }
    shutil.copytree(dataset.path, target, copy_function=os.link)
    chunks = [file for file in target.rglob("c/*") if file.is_file()]
    for file in chunks:
        if file.relative_to(target) not in kept:
            file.unlink()
    return Dataset(target), len(kept), len(chunks) - len(kept)


def range_bytes(matrix: SparseMatrix, start: int, stop: int) -> int:
    """Of the lines [start, stop): row ends, and entries."""
    ends = matrix.indptr.read(start, stop + 1)
    return 8 * len(ends) + int(ends[-1] - ends[0]) * matrix.entry_bytes


def search_jobs(dataset: Dataset, work: Path) -> Iterator[SearchJob]:
    """The search jobs of a run of two rounds, when what they read is there."""
    begin_model(work)
    parameters, notes = PPDSparseParameters(max_rounds=2), Notes()
    plan = replace(PLAN, limit=2**16)  # less than X takes: so jobs share the rows, not the classes
    loop = PPDSparseRun(dataset, work, parameters, 0, plan, notes).loop()
    receipts = None
    while True:
        try:
            phase = loop.send(receipts)  # type: ignore[arg-type]
        except StopIteration:
            return
        for job in phase.jobs:
            if isinstance(job, SearchJob):
                yield job
            notes.add(job.key, job.run())
        receipts = [notes[job.key] for job in phase.jobs]


def found(job: SearchJob) -> list[NDArray[np.generic]]:
    of = job.first, job.last
    f = CandidateRows(Path(job.out), *of, Dataset(job.problem.data).n_samples)
    blocks = [part for classes, b in f.blocks(*of) for part in (classes, b.indptr, b.indices, b.values)]
    return [*blocks, *(f.of_classes(name, *of) for name in ("counts", "losses", "best"))]


@pytest.mark.slow
def test_a_search_job_needs_the_chunks_of_its_rows_alone(chunked: Dataset, tmp_path: Path) -> None:
    checked = []
    for n, job in enumerate(search_jobs(chunked, tmp_path / "work")):
        rows = (job.start, job.stop)
        few, n_kept, n_gone = cut_down(chunked, tmp_path / f"{n}.xmc", {"X/rows": rows, "Y/rows": rows})
        assert n_gone > n_kept > 10
        with pytest.raises(StoreError):
            open_dataset(few.path)  # what commands begin with looks at all of them
        alone = replace(job, problem=replace(job.problem, data=str(few.path)), out=str(tmp_path / f"{n}.found"))
        receipt, expected = alone.run(), job.run()
        assert receipt == expected
        assert receipt["bytes_read"] == range_bytes(chunked.X_rows(), *rows) + range_bytes(chunked.Y_rows(), *rows)
        for got, wanted in zip(found(alone), found(job), strict=True):
            np.testing.assert_array_equal(got, wanted)
        checked.append(job.check)
    assert set(checked) == {False, True}
    assert len(checked) >= 4


@pytest.mark.slow
def test_a_predict_job_needs_the_chunks_of_its_rows_alone(chunked: Dataset, trained: Path, tmp_path: Path) -> None:
    model, n = LinearModel(trained), chunked.n_samples
    out = begin_predictions(tmp_path / "whole", n, model.n_labels, 5)
    phase = next(LinearTask(model, chunked, 5).loop(PLAN, Wanted(out)))  # one job has all rows: there are few
    (job,) = phase.jobs
    assert isinstance(job, PredictJob)
    job.run()
    finish_predictions(out, tmp_path / "whole", {}, overwrite=False)
    expected = Predictions(tmp_path / "whole").rows(0, n)
    parts = begin_predictions(tmp_path / "parts", n, model.n_labels, 5)
    for start, stop in ((0, 400), (400, 900), (900, n)):
        few, n_kept, n_gone = cut_down(chunked, tmp_path / f"{start}.xmc", {"X/rows": (start, stop)})
        assert n_gone > n_kept > 10
        receipt = replace(job, data=str(few.path), start=start, stop=stop, wanted=Wanted(parts)).run()
        assert receipt["bytes_read"] == range_bytes(chunked.X_rows(), start, stop)
    finish_predictions(parts, tmp_path / "parts", {}, overwrite=False)
    for got, wanted in zip(Predictions(tmp_path / "parts").rows(0, n), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_the_files_of_a_job_are_looked_at_when_it_opens_them(chunked: Dataset, tmp_path: Path) -> None:
    """A chunk of the range that is short is named, whoever checked the sizes before."""
    shutil.copytree(chunked.path, tmp_path / "d.xmc")
    X = Dataset(tmp_path / "d.xmc").X_rows()
    file = X.indices.chunk_file(3)
    os.truncate(file, file.stat().st_size - 1)
    first = int(np.searchsorted(X.indptr.read(0, X.n_lines + 1), 4 * X.indices.chunk)) + 1  # behind that chunk
    X.block(first, X.n_lines)
    with pytest.raises(StoreError, match=str(file)):
        X.block(0, first)
