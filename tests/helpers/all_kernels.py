"""All kernels that trainings and models use, compiled into the cache: `python -m helpers.all_kernels` in tests/."""

from __future__ import annotations

from xmc_stream.grouplasso.warm import GroupLassoWarmUp
from xmc_stream.lowrank.warm import LEMLWarmUp
from xmc_stream.memoir.warm import MEMOIRWarmUp
from xmc_stream.models.linear.warm import LinearWarmUp
from xmc_stream.models.lowrank.warm import ScoreWarmUp
from xmc_stream.models.rowsparse.warm import RowsWarmUp
from xmc_stream.pdsparse.warm import PDSparseWarmUp
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.ppdsparse.warm import PPDSparseWarmUp


def compile_all() -> None:
    """Takes two minutes where nothing is compiled, else a second."""
    options = PPDSparseParameters(cut=0.1, delta=1.0, min_value=0.1)
    for job in (
        PPDSparseWarmUp(options, again=True, large=True, guided=True),
        PPDSparseWarmUp(dense=True, fours=True),
        PPDSparseWarmUp(guided=True, lifts=True, all_rows=True),
        PDSparseWarmUp(), LEMLWarmUp(), GroupLassoWarmUp(),
        LinearWarmUp(True, guided=True, fours=True),
        LinearWarmUp(False, guided=True, fours=True), ScoreWarmUp(), RowsWarmUp(), MEMOIRWarmUp("l1", "sw-graph"),
        MEMOIRWarmUp("l2", "exact"), MEMOIRWarmUp("lsh", "simple-lsh"), MEMOIRWarmUp("lsh", "exact"),
    ):  # fmt: skip
        job.run()


if __name__ == "__main__":
    compile_all()
