"""Forms of calibration: chosen on rows held out, by a model that has not seen them; what they do to the test rows.

    XMC_STREAM_DATA=... python benchmarks/calibration.py FOLDER [NAME ...]

Two models of each set are trained with the defaults, on nine tenths of the rows and on all (kept in FOLDER). Each form is
learned on the rows held out. `held out`: what it gains there in the mean of P@1, P@3 and P@5, learned on one half and
measured on the other, both ways, and the standard error; `test`: what the model of all rows gains on the test set.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np
import scipy.sparse as sp
from commands import machine, run
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from xmc_stream.models import load_model
from xmc_stream.models.calibration import Candidates, fit
from xmc_stream.store.dataset import open_dataset

SETS = (
    "wordnet_hypernyms", "yeast_seq_GO", "bibtex", "corel5k", "mediamill_partial", "delicious", "stackex_cooking",
    "rcv1_topics", "rcv1_multiclass_sub", "20news_bydate", "news20", "sector_partial", "udhr_langid",
)  # fmt: skip
Scores = Callable[[Candidates], NDArray[Any]]  # float32 of the library, else float64


def with_cap(z: NDArray[Any], c: float, counts: NDArray[np.int64]) -> NDArray[Any]:
    """min(z, c), ties to the more frequent label."""
    return np.where(z > c, c + 1e-3 * np.log(counts + 1), z)


def by_hand(
    learned: Candidates, exponents: tuple[float, ...], shifts: tuple[float, ...], caps: tuple[float, ...]
) -> Scores:
    """The best of some exponents p, shifts g and caps c: min((n + 1)^-p s - g ln(n + 1), c)."""

    def scores(p: float, g: float, c: float, rows: Candidates) -> NDArray[Any]:
        logs = np.log(rows.counts + 1)
        return with_cap(rows.scores * np.exp(-p * logs) - g * logs, c, rows.counts)

    options = [partial(scores, *option) for option in product(exponents, shifts, caps)]
    return max(options, key=lambda option: quality(learned, option(learned)).mean())


def shift_only(learned: Candidates) -> Scores:
    """The logit a s + b ln(n + 1) of the ten best labels' truth."""
    ten = learned.scores[:, :10].ravel(), np.log(learned.counts[:, :10].ravel() + 1)
    a, b = LogisticRegression().fit(np.stack(ten, axis=1), learned.true[:, :10].ravel()).coef_[0]
    return lambda rows: a * rows.scores + b * np.log(rows.counts + 1)


def ours(learned: Candidates, cap: bool) -> Scores:
    """What the library does, or that without its cap."""
    calibration = fit(learned)
    calibration = calibration if cap else replace(calibration, cap=None)
    return lambda rows: rows.calibrated(calibration)


SHIFTS, CAPS = (-0.04, -0.02, 0.0, 0.02, 0.04, 0.06, 0.08), (-0.2, 0.0, 0.2, np.inf)
FORMS: dict[str, Callable[[Candidates], Scores]] = {
    "shift, cap": lambda rows: by_hand(rows, (0.0,), SHIFTS, CAPS),
    "scale": lambda rows: by_hand(rows, (0.0, 0.05, 0.1, 0.15), (0.0,), (np.inf,)),
    "scale, shift, cap": lambda rows: by_hand(rows, (0.0, 0.05, 0.1, 0.15), SHIFTS, CAPS),
    "logit, shift": shift_only,
    "logit, slope, shift": lambda rows: ours(rows, cap=False),
    "the same, cap (ours)": lambda rows: ours(rows, cap=True),
}


def quality(rows: Candidates, scores: NDArray[Any]) -> NDArray[np.float64]:
    """The mean of P@1, P@3 and P@5 of each row."""
    return np.asarray(np.mean(list(rows.precisions(scores).values()), axis=0))


def prepare(source: Path, folder: Path) -> None:
    """Datasets and models, where they are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "test.xmc").exists():
        run("convert", source / "train.txt.gz", folder / "all.xmc", "--normalize", "l2")
        run("convert", source / "test.txt.gz", folder / "test.xmc", "--like", folder / "all.xmc")
    if not (folder / "part.xmc").exists():
        run("split", folder / "all.xmc", folder / "part.xmc", folder / "held.xmc", "--overwrite")
    for part in ("part", "all"):
        run("train", folder / f"{part}.xmc", folder / f"{part}.model", "--threads", 1)


def candidates(folder: Path, trained_on: str, data: str) -> Candidates:
    """The best labels of each row."""
    dataset, counts = open_dataset(folder / f"{data}.xmc"), open_dataset(folder / f"{trained_on}.xmc").label_counts()
    labels, scores = load_model(folder / f"{trained_on}.model").predict_topk(dataset, min(20, dataset.n_labels))
    y = dataset.Y_rows().block(0, dataset.n_samples)
    truth = sp.csr_matrix(
        (np.ones(len(y.indices), np.bool_), y.indices, y.indptr), (dataset.n_samples, dataset.n_labels)
    )
    true = sp.csr_matrix(truth[np.arange(len(labels))[:, None], labels]).toarray()
    return Candidates(labels, scores, counts[labels], true)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("names", nargs=-1)
def main(folder: Path, names: tuple[str, ...]) -> None:
    print(machine())
    for name in names or SETS:
        prepare(Path(os.environ["XMC_STREAM_DATA"]) / name, folder / name)
        held, test = candidates(folder / name, "part", "held"), candidates(folder / name, "all", "test")
        before = quality(held, held.scores), quality(test, test.scores)
        precisions = "/".join(f"{p.mean():.2f}" for p in test.precisions(test.scores).values())
        print(f"{name}: {len(held.labels)} rows held out; test P@1/3/5 {precisions}", flush=True)
        for form, learn in FORMS.items():
            gains = np.empty(len(held.labels))
            for mine, other in ((slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2))):
                rows = held.rows(mine)
                gains[mine] = quality(rows, learn(held.rows(other))(rows)) - before[0][mine]
            after = learn(held)(test)
            precisions = "/".join(f"{p.mean():.2f}" for p in test.precisions(after).values())
            error, gain = gains.std() / len(gains) ** 0.5, (quality(test, after) - before[1]).mean()
            print(
                f"  {form:22} held out {gains.mean():+.2f} ({error:.2f})   test {gain:+.2f}   {precisions}", flush=True
            )


if __name__ == "__main__":
    main()
