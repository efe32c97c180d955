"""Which labels are predicted: micro-F1 of a cut at 0, of the threshold that is learned, of the best for the test rows.

    XMC_STREAM_DATA=... python benchmarks/decisions.py FOLDER [--set bibtex]

Of methods whose scores compare the labels of one row alone, in per cent, with the labels that are predicted for a row.
"""

from __future__ import annotations

import os
from pathlib import Path

import click
import numpy as np
import scipy.sparse as sp
from commands import machine

import xmc_stream as xs
from xmc_stream.models.decisions import learn

METHODS = (
    xs.MEMOIR(), xs.MEMOIR(variant="lsh"), xs.PDSparse(), xs.PDSparse(held_out=0.0, max_passes=10),
    xs.GroupLasso(loss="label-ranking"),
)  # fmt: skip


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--set", "name", default="bibtex", show_default=True)
def main(folder: Path, name: str) -> None:
    """Train with the defaults, and print a line for each method."""
    source = Path(os.environ["XMC_STREAM_DATA"]) / name
    train, test = folder / f"{name}.xmc", folder / f"{name}-test.xmc"
    if not test.exists():
        xs.convert(source / "train.txt.gz", train, normalize="l2")
        xs.convert(source / "test.txt.gz", test, like=train)
    data, rows = xs.open_dataset(train), xs.open_dataset(test)
    y = rows.Y_rows().block(0, rows.n_samples)
    truth = sp.csr_matrix((np.ones(len(y.indices)), y.indices, y.indptr), (rows.n_samples, rows.n_labels)).toarray() > 0
    print(machine(), f"{truth.sum(axis=1).mean():.2f} labels a row", sep="\n")
    for method in METHODS:
        scores, predicted = method.fit(data).decision_function(rows), method.predict(rows).toarray() > 0
        at_zero = scores > 0
        at_zero[np.arange(len(scores)), scores.argmax(axis=1)] = True
        found = [
            f"{200 * (truth & chosen).sum() / (truth.sum() + chosen.sum()):.1f} ({chosen.sum(axis=1).mean():.1f})"
            for chosen in (at_zero, predicted)
        ]
        print(" ".join(str(method).split()), *found, learn(scores, truth, int(truth.sum()))["micro_F1"], sep="\t")


if __name__ == "__main__":
    main()
