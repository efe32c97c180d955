"""Loading the kernels of a training by the group lasso."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xmc_stream.grouplasso.descent import Data, SegmentJob, Stage
from xmc_stream.grouplasso.parameters import GroupLassoParameters
from xmc_stream.grouplasso.plan import DescentPlan
from xmc_stream.grouplasso.run import GroupLassoRun
from xmc_stream.grouplasso.solver import order_of
from xmc_stream.runtime.job import Notes, run_here
from xmc_stream.runtime.plan import MIB, MemoryPlan
from xmc_stream.runtime.warmup import WarmUp, a_few_rows
from xmc_stream.store.model import begin_model


@dataclass(frozen=True)
class GroupLassoWarmUp(WarmUp):
    """Train on a few rows."""

    @property
    def loads(self) -> str:
        return "group lasso"

    def load(self) -> None:
        # in memory, with columns in pieces and the array in a file, along the gradient
        with a_few_rows() as dataset:
            folder = Path(dataset.path).parent
            for algorithm in ("bcd-ls", "bcd-cst", "fista"):
                work, p = folder / f"{algorithm}.partial", GroupLassoParameters(algorithm=algorithm, max_passes=2)
                begin_model(work)
                plan, notes = MemoryPlan(2**40, 256 * MIB, 1), Notes()
                run_here(GroupLassoRun(dataset, work, p, 0, plan, notes).loop(), notes)
                order_of(np.arange(3), p.draws, 0, 0, 0)
                for entries, window in ((8, 0), (60, 60), (8, 8)) if p.descends else ():
                    data, sizes = Data(str(dataset.path), str(work), p, 0), DescentPlan(entries, window, False)
                    SegmentJob(data, Stage(0, 1e-3), 0, "", True, -1.0, sizes).run()
