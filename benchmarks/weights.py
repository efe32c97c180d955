"""What weights of classes do to P@k, PSP@k and macro-F1: PPDSparse as it is, with class_weight="propensity", and others.

    python benchmarks/weights.py FOLDER SETS wordnet_hypernyms rcv1_topics delicious stackex_cooking

SETS has a folder for each data set, with train.txt.gz and test.txt.gz. With --held-out the figures are those of a tenth of
the training rows, from models of the others: by these `propensity` was chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from commands import machine
from numpy.typing import NDArray

import xmc_stream as xs
from xmc_stream.metrics import inverse_propensity

FIGURES = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5", "macro_F1")
WORDS = (None, "propensity", "balanced")
# of the inverse propensity q = 1/p
TEMPERED: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "1/p": lambda q: q,
    "sqrt(2/p - 1)": lambda q: np.sqrt(2 * q - 1),
    "(2/p - 1)^(1/4)": lambda q: (2 * q - 1) ** 0.25,
}


def sets(name: str, folder: Path, source: Path, held_out: bool) -> tuple[xs.Dataset, xs.Dataset]:
    """Rows to learn from and rows to compare on."""
    train, test = folder / f"{name}.xmc", folder / f"{name}-test.xmc"
    if not test.exists():
        xs.convert(source / name / "train.txt.gz", train, normalize="l2", overwrite=True)
        xs.convert(source / name / "test.txt.gz", test, like=train)
    if held_out:
        part, held = folder / f"{name}-part.xmc", folder / f"{name}-held.xmc"
        if not held.exists():
            xs.split(train, part, held, fraction=0.1, seed=0, overwrite=True)
        train, test = part, held
    return xs.open_dataset(train), xs.open_dataset(test)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.argument("source", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.argument("names", nargs=-1, required=True)
@click.option("--held-out", is_flag=True)
@click.option("--memory-limit", default="2GB", show_default=True)
def main(folder: Path, source: Path, names: tuple[str, ...], held_out: bool, memory_limit: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    print(machine())
    print(f"{'':18} {'class_weight':16} " + " ".join(f"{name:>8}" for name in FIGURES) + "   mean gap  seconds")
    for name in names:
        train, test = sets(name, folder, source, held_out)
        inverse = inverse_propensity(train.label_counts(), train.n_samples)
        weights: list[tuple[str, Any]] = [(str(word).lower(), word) for word in WORDS]
        weights += [(form, of(inverse)) for form, of in TEMPERED.items()]
        for form, weight in weights:
            clf = xs.PPDSparse(class_weight=weight, memory_limit=memory_limit).fit(train)
            found = xs.evaluate(clf.model_, test, train, memory_limit=memory_limit)
            figures = " ".join(f"{found[figure]:8.2f}" for figure in FIGURES)
            report = clf.report_
            print(
                f"{name:18} {form:16} {figures}   {report['duality_gap_mean']:8.4f} {report['seconds']:8.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
