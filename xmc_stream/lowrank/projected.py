"""A = X W of a half-step, and what is summed over its rows: Y^T A and A^T A.

Where that is more work than a stop may lose, A is made by pieces of the rows, and these, the sums and A^T A are kept.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path

from xmc_stream.factors.factors import Dense, Panels
from xmc_stream.factors.heldrows import NO_HOLDING, Holding
from xmc_stream.factors.products import BLOCK, Learned
from xmc_stream.factors.projection import Parts, ProjectJob
from xmc_stream.lowrank.kept import RestoreJob, row_pieces, sparse_work, within
from xmc_stream.lowrank.steps import GramJob, gram_jobs
from xmc_stream.runtime.job import Ledger, Phase, Receipt


@dataclass(frozen=True)
class Projection:
    """Of W (`source`). number: of the half-step; scores: where A is, a range of columns a job; sums: where Y^T A is, or None.

    parts, holding: see `row_blocks`. scratch, state: folders; what is kept is in the second.
    """

    learned: Learned
    number: int
    source: Dense
    scores: Panels
    sums: Panels | None
    parts: Parts
    holding: Holding
    scratch: Path
    state: Path

    def project(self, phase: Phase, ledger: Ledger) -> Generator[Phase, list[Receipt], int]:
        """Make A, and the sums; returns the positives of rows that are learned from. phase: what is said of it."""
        pieces, positives, before = self._pieces(), 0, [""] * len(self.scores.col_ranges)
        if len(pieces) == 1:
            jobs = [self._job(cols, self.parts) for cols in self.scores.col_ranges]
            return int((yield replace(phase, jobs=jobs, kept=False))[0]["positives"])
        for number, rows in enumerate(pieces):
            said = replace(phase, span=within(phase.span, number / len(pieces), (number + 1) / len(pieces)))
            jobs = [
                replace(
                    self._job(cols, (rows,)), holding=NO_HOLDING, begun=begun if self.sums else "",
                    kept=str(self.state / f"a-{self.number}" / f"{cols[0]}-{cols[1]}.{rows[0]}"),
                )
                for cols, begun in zip(self.scores.col_ranges, before, strict=True)
            ]  # fmt: skip
            again = [self._restore(job, rows) for job in jobs if ledger.get(job.key) is not None]
            if again:
                yield replace(said, jobs=again, kept=False)
            positives += (yield replace(said, jobs=jobs))[0]["positives"]
            before = [job.kept for job in jobs]
        return positives

    def gram(self, phase: Phase) -> Generator[Phase, list[Receipt], list[GramJob]]:
        """Make A^T A; returns the jobs that did."""
        long = len(self._pieces()) > 1
        folder = self.state / f"gram-{self.number}" if long else self.scratch / "gram"
        jobs = gram_jobs(self.learned, f"gram/{self.number}", self.scores.n, self.scores, folder, long)
        yield replace(phase, jobs=jobs, kept=long)
        return jobs

    def _pieces(self) -> Parts:
        dataset, r = self.learned.dataset(), self.scores.columns
        work = sparse_work(dataset.X_rows().nnz, r)
        if self.sums:
            work += sparse_work(dataset.Y_rows().nnz, r) + self.scores.n * r * r
        return row_pieces(self.scores.n, work, BLOCK)

    def _job(self, cols: tuple[int, int], parts: Parts) -> ProjectJob:
        return ProjectJob(
            self.learned, f"a/{self.number}", cols, self.source, self.scores, parts, self.holding, self.sums
        )

    def _restore(self, job: ProjectJob, rows: tuple[int, int]) -> RestoreJob:
        lines = {"A": (replace(self.scores, col_ranges=(job.cols,)), rows)}
        if self.sums:
            lines["sums"] = replace(self.sums, col_ranges=(job.cols,)), (0, self.sums.n)
        return RestoreJob(job.key, job.kept, lines)
