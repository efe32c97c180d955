"""Shares of units: where there are few units, each is solved by several jobs, whose states are joined.

How units are cut is a matter of threads and workers, and of no result: draws and ties go by the class, and what the next
search and a later session read is the state of the whole unit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from xmc_stream.errors import MemoryLimitError
from xmc_stream.kernels.instructions import LANES
from xmc_stream.linear.weights import Unit
from xmc_stream.models.cache import drop_tiles
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.ppdsparse.plan import SolvePlan, next_search, plan_solve
from xmc_stream.ppdsparse.problem import Problem, Share
from xmc_stream.ppdsparse.solver import all_rows_bytes, row_order, start_sizes
from xmc_stream.ppdsparse.state import WRITER_BYTES, UnitState, new_unit_state
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.plan import MIB, Cuts, MemoryPlan
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.model import UNIT

_ENOUGH = 4  # units for each thread: their jobs end at much the same time
_SHARES = 2  # for each thread, where there are fewer
_NEARLY = 1e-6  # what rounding may add to a number of shares
_HELD = 4  # X is held where it takes one in so many of a job's bytes at most
_CLASS_BYTES = 352  # of a class in a solve job: two times its statistics, and some 29 numbers
_STREAMED = 8  # entries of active rows for each of X, in a share that streams it: passes are little beside the steps
_LEAST = 1 << 22  # entries of active rows in a share: a job's files are little beside that
# of an entry of a first active set in a pass over it, about: later sets are larger, and much of them is asleep
_PASS_SECONDS = 6e-9
_LANE_PASS_SECONDS = 6e-10  # the same, of a class among LANES


def cut_shares(
    units: Sequence[Unit], dataset: Dataset, plan: MemoryPlan, parameters: PPDSparseParameters
) -> tuple[list[Share], int]:
    """Units in shares of nearly equal work, and how many of them a process solves beside each other, at most.

    There are two for each thread of all workers at least, or whole units where these are enough; and so many that none takes
    much longer than `MemoryPlan.job_seconds`. A class counts by the rows that it begins with: all of them, if `all_rows` is
    set. Where there are large classes and jobs cannot hold X, every share streams X by itself, and the threads of a
    process share that (see `streaming`): so each has a process with all its threads and memory for itself, and there are no
    more than are worth that.
    """
    at_once, all_rows = plan.threads * plan.processes, bool(parameters.all_rows)
    n, nnz = dataset.n_samples, dataset.X_rows().nnz
    counts = dataset.label_counts()
    rows = np.where((counts > 0) & (counts < n), n, 0) if all_rows else counts + start_sizes(counts, n)
    entries = np.concatenate([[0.0], np.cumsum(rows * (nnz / n))])
    enough = len(units) >= _ENOUGH * at_once
    wanted, least, beside = 1, _LEAST, plan.threads
    if at_once > 1 and not enough:
        wanted = at_once if all_rows else _SHARES * at_once
    # the round that passes over a class's rows most often
    passes = max(parameters.epochs_of(0), parameters.epochs_of((parameters.common_rounds or 1) - 1))
    longest = plan.job_seconds / (passes * (_LANE_PASS_SECONDS if all_rows else _PASS_SECONDS))
    if not all_rows and int(rows.max(initial=0)) > row_order(n, nnz).large and 8 * nnz > plan.per_thread // _HELD:
        longest = max(longest, _STREAMED * nnz)
        if not enough:
            wanted, beside = plan.processes, 1 if len(units) <= plan.processes else plan.threads
    if plan.cuts.shares:
        wanted, least = plan.cuts.shares, 1
    size = max(least, min(entries[-1] / wanted, longest))
    step = LANES * nnz if all_rows and not plan.cuts.shares else 0  # what is solved together stays together
    middles = (entries[1:] + entries[:-1]) / 2
    shares = []
    for unit in units:
        begin, end = entries[unit.first], entries[unit.last]
        parts = max(1, math.ceil((end - begin) / size - _NEARLY))
        places = np.linspace(begin, end, parts + 1)[1:-1]
        if step:
            places = begin + step * np.maximum(1, np.round((places - begin) / step))
        bounds = np.searchsorted(middles, places)  # the nearest end of a class
        cut = sorted({unit.first, *np.clip(bounds, *unit).tolist(), unit.last})
        shares += [Share(first, last, unit) for first, last in itertools.pairwise(cut)]
    return shares, beside


@dataclass(frozen=True)
class JoinSharesJob:
    """Make the state of a unit after a round of those of its shares, which lie beside it.

    folder: of the round's states. sums: over the receipts of the shares.
    """

    problem: Problem
    round: int
    unit: Unit
    shares: tuple[Share, ...]
    folder: str
    sums: Receipt

    @property
    def key(self) -> str:
        """As of a job that solves the whole unit."""
        return f"solve/{self.round}/{self.unit.name}"

    def run(self) -> Receipt:
        """Copy; the receipt is that of a job that solves the whole unit, without what the shares' receipts say."""
        drop_tiles()
        dataset, path = Dataset(self.problem.data), Path(self.folder) / self.unit.name
        shape = dataset.n_samples, dataset.n_features
        with new_unit_state(path, self.unit.last - self.unit.first, *shape) as writer:
            for share in self.shares:
                state = UnitState(path.with_name(share.name), share.last - share.first, *shape)
                writer.statistics[share.first - self.unit.first : share.last - self.unit.first] = state.statistics
                writer.copy(state, 0, share.last - share.first)
        return {**next_search(path, self.unit, dataset, self.problem.parameters), **self.sums}


def solve_plan(
    dataset: Dataset, plan: MemoryPlan, parameters: PPDSparseParameters, warm_start: bool, units: Sequence[Unit],
    of_samples: bool = False, guided: bool = False,
) -> tuple[list[Share], SolvePlan]:  # fmt: skip
    """What the solve jobs of a round solve, and what one may hold. Raises MemoryLimitError where that is too little.

    guided: whether groups of labels are learned, which may be beside the first solves, as one more job.
    """
    others = int(guided and not parameters.all_rows)
    whole = [Share(*unit, unit) for unit in units]
    # as many jobs as threads need more memory than one: where it is not there, there are as few as one thread would have
    few, _ = cut_shares(units, dataset, replace(plan, threads=1, processes=1, cuts=Cuts()), parameters)
    cut, beside = cut_shares(units, dataset, plan, parameters)
    ways = [(cut, min(beside, len(cut) + others)), (few, min(plan.threads, len(few)))]
    if parameters.all_rows:  # it may hold all rows once, where it cannot for each thread
        ways.append((few, 1))
    elif few != whole:
        ways.append((whole, min(plan.threads, len(whole))))
    for shares, beside in ways[:-1]:
        with suppress(MemoryLimitError):
            return shares, _plan_of(plan, dataset, parameters, warm_start, shares, beside, of_samples)
    shares, beside = ways[-1]
    return shares, _plan_of(plan, dataset, parameters, warm_start, shares, beside, of_samples)


def _plan_of(
    plan: MemoryPlan, dataset: Dataset, parameters: PPDSparseParameters, warm_start: bool, shares: Sequence[Share],
    beside: int, of_samples: bool,
) -> SolvePlan:  # fmt: skip
    n_features = dataset.n_features
    most = np.array([dataset.most_positives()])  # an active set grows with the positives
    largest = int(most[0] + start_sizes(most, dataset.n_samples)[0])
    # beside what every solve holds: sizes of two kinds of tiles and their work; weights of a warm start; a wide unit
    extra = 32 * n_features * parameters.approximate + (20 * n_features + 4 * MIB) * warm_start
    extra += _CLASS_BYTES * max(0, *(share.last - share.first - UNIT for share in shares))
    order = row_order(dataset.n_samples, dataset.X_rows().nnz)
    all_rows = all_rows_bytes(dataset) if parameters.all_rows else 0
    return plan_solve(
        plan, dataset.n_samples, n_features, WRITER_BYTES + extra, largest, order, beside, of_samples, all_rows
    )
