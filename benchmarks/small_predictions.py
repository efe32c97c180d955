"""How long few rows take in one process: the first call, one row as a scipy matrix, the whole set; beside an engine.

    python benchmarks/small_predictions.py MODEL TEST.xmc [--threads 1] [--memory-limit 1GB]

Each figure but the first call is the median of calls that come after it, in ms.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import scipy.sparse
from commands import machine

import xmc_stream as xs
from xmc_stream.models import Execution
from xmc_stream.models.prediction import predict_topk
from xmc_stream.runtime.plan import Cuts


def milliseconds(call: Callable[[], Any], times: int) -> float:
    """The median."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return 1000 * statistics.median(taken)


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.argument("test", type=click.Path(exists=True, path_type=Path))
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@click.option("--memory-limit", default="1GB", show_default=True)
def main(model: Path, test: Path, threads: int, memory_limit: str) -> None:
    opened, data = xs.load_model(model), xs.open_dataset(test)
    block = data.X_rows().block(0, 1)
    row = scipy.sparse.csr_matrix((block.values, block.indices, block.indptr), shape=(1, data.n_features))
    here = Execution(memory_limit, threads)
    engine = Execution(memory_limit, threads, cuts=Cuts())
    k = min(5, data.n_labels)
    print(f"{machine()}; {threads} threads; {data.n_samples:,} rows")
    print(f"first call {milliseconds(lambda: predict_topk(opened, row, k, here), 1):.1f}")
    print(f"one row {milliseconds(lambda: predict_topk(opened, row, k, here), 100):.3f}")
    print(f"all rows {milliseconds(lambda: predict_topk(opened, data, k, here), 7):.2f}")
    predict_topk(opened, row, k, engine)  # loads dask
    print(f"one row by an engine {milliseconds(lambda: predict_topk(opened, row, k, engine), 7):.1f}")
    print(f"all rows by an engine {milliseconds(lambda: predict_topk(opened, data, k, engine), 7):.1f}")


if __name__ == "__main__":
    main()
