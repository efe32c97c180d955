"""The visiting order that large classes share, against an order of each class's own: objective and gap after the defaults.

    python benchmarks/visiting_order.py FOLDER --size 300MB --labels 200

On a generated set, and on the same rows sorted by their first label, which is the worst there is for an order made of
ranges of rows: a class's positives stand together.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import scipy.sparse as sp
from commands import machine

import xmc_stream as xs
from xmc_stream.ppdsparse import solver as ppdsparse
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import SparseMatrix

GENERATOR = Path(__file__).resolve().parent.parent / "tools" / "make_synthetic.py"


def in_memory(matrix: SparseMatrix) -> sp.csr_matrix:
    block = matrix.block(0, matrix.n_lines)
    data = np.ones(len(block.indices), np.float32) if block.data is None else block.data
    return sp.csr_matrix((data, block.indices, block.indptr), matrix.shape)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--size", default="300MB", show_default=True, help="Bytes of X.")
@click.option("--labels", default=200, show_default=True)
@click.option("--memory-limit", default="6GB", show_default=True)
def main(folder: Path, size: str, labels: int, memory_limit: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shuffled, by_label = folder / "order.xmc", folder / "order-sorted.xmc"
    shape = f"--size {size} --features 50000 --labels {labels} --features-per-sample 250 --labels-per-sample 1".split()
    subprocess.run([sys.executable, GENERATOR, shuffled, *shape, "--overwrite"], check=True, stdout=sys.stderr)
    dataset = Dataset(shuffled)
    X, Y = in_memory(dataset.X_rows()), in_memory(dataset.Y_rows())
    firsts = np.full(Y.shape[0], labels)
    some = np.diff(Y.indptr) > 0
    firsts[some] = Y.indices[Y.indptr[:-1][some]]
    order = np.argsort(firsts, kind="stable")
    xs.convert(X[order], by_label, labels=Y[order], memory_limit=memory_limit, overwrite=True)
    del X, Y
    print(f"{machine()}; X of {size}, {labels} labels")
    print(f"{'rows':>9} {'order':>7} {'objective':>14} {'worst gap':>10} {'mean gap':>9}")
    bound = ppdsparse.LARGE_BYTES
    for data in (shuffled, by_label):
        for name, large in (("own", 2**50), ("shared", bound)):
            ppdsparse.LARGE_BYTES = large
            r = xs.PPDSparse(memory_limit=memory_limit).fit(data, model=folder / "order.model", overwrite=True).report_
            rows = "sorted" if data == by_label else "shuffled"
            print(
                f"{rows:>9} {name:>7} {r['objective']:14.2f} {r['duality_gap']:10.2e} {r['duality_gap_mean']:9.2e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
