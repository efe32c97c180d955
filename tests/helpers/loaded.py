"""What helpers.forked forks from: a process that has loaded the library and some kernels, and began nothing.

Those of trainings and predictions by PPDSparse. With those of all methods it would hold more than what any command counts
as (`system.memory`), and the least limits of commands would not be those that they have on their own.
"""

from __future__ import annotations

import distributed.cli.dask_scheduler
import distributed.cli.dask_worker  # noqa: F401
import pytest  # noqa: F401 (a child loads the main module of the process that starts it)

import xmc_stream.cli
import xmc_stream.convert.tfidf.records
import xmc_stream.datasets.verify
import xmc_stream.runtime.engine
import xmc_stream.training.train  # noqa: F401
from xmc_stream.linear.predict import LinearWarmUp
from xmc_stream.ppdsparse.method import PPDSparseWarmUp
from xmc_stream.ppdsparse.parameters import PPDSparseParameters

PPDSparseWarmUp().run()
PPDSparseWarmUp(PPDSparseParameters(cut=0.1, delta=1.0, min_value=0.1), again=True).run()
for evaluate in (False, True):
    LinearWarmUp(evaluate, fours=True).run()
