"""Checking the chunks of a dataset against their checksums, once a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from xmc_stream.jobs.job import Receipt
from xmc_stream.jobs.plan import even_ranges
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import SparseMatrix

_CHUNKS_PER_JOB = 32


@dataclass(frozen=True)
class CheckJob:
    """Chunks [first, last) of one array of a matrix."""

    matrix: str
    array: int
    first: int
    last: int

    @property
    def key(self) -> str:
        """Matrix, array and chunks; the matrix by its place in the dataset."""
        return f"check/{'/'.join(Path(self.matrix).parts[-2:])}/{self.array}/{self.first}-{self.last}"

    def run(self) -> Receipt:
        """Check; raises StoreError naming a chunk that is damaged."""
        array = SparseMatrix(self.matrix).arrays()[self.array]
        for k in range(self.first, self.last):
            array.verify_chunk(k)
        return {"checked_bytes": (self.last - self.first) * array.chunk * array.dtype.itemsize}


def check_jobs(dataset: Dataset) -> list[CheckJob]:
    """Jobs for all chunks that training reads, of stores whose chunk files are plain."""
    jobs = []
    for matrix in (dataset.X_rows(), dataset.Y_rows(), dataset.Y_columns()):
        for number, array in enumerate(matrix.arrays()):
            if array.path is not None and array.n_chunks:
                parts = -(-array.n_chunks // _CHUNKS_PER_JOB)
                jobs += [CheckJob(str(matrix.path), number, a, b) for a, b in even_ranges(array.n_chunks, parts)]
    return jobs
