"""All kernels that trainings and models use, compiled into the cache: `python -m helpers.all_kernels` in tests/."""

from __future__ import annotations

from xmc_stream.factors.predict import ScoreWarmUp
from xmc_stream.grouplasso.method import GroupLassoWarmUp
from xmc_stream.grouplasso.predict import RowsWarmUp
from xmc_stream.linear.predict import LinearWarmUp
from xmc_stream.lowrank.method import LEMLWarmUp
from xmc_stream.memoir.method import MEMOIRWarmUp
from xmc_stream.pdsparse.method import PDSparseWarmUp
from xmc_stream.ppdsparse.method import PPDSparseWarmUp
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.tree.method import TreeWarmUp
from xmc_stream.tree.predict import TreesWarmUp


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
        TreeWarmUp(), TreesWarmUp(),
    ):  # fmt: skip
        job.run()


if __name__ == "__main__":
    compile_all()
