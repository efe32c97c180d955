"""Megabytes of models on disk with weights of 32 and of 16 bits, and what the rounding does to precision.

    python benchmarks/sizes.py FOLDER NAME ... --scratch FOLDER

FOLDER holds NAME.xmc and NAME-test.xmc. For each set and type of weights: PPDSparse with its defaults on one thread; the
model's megabytes and weights, seconds of the processor to predict the test rows (least of five), P@1, 3 and 5 on them, and
on a tenth of the training rows, by a model that has not seen these.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
from commands import machine

import xmc_stream as xs

TYPES = ("float32", "float16")
KS = (1, 3, 5)
HERE: dict[str, Any] = {"memory_limit": "1GB", "threads": 1}


def trained(data: xs.Dataset, model: Path, kind: str) -> Any:
    """A model with weights of a type."""
    learner = xs.PPDSparse(weight_type=kind, memory_limit="1GB", threads=1, progress=False)
    return learner.fit(data, model=model, overwrite=True).model_


def precision(model: Any, data: xs.Dataset, out: Path) -> tuple[str, float]:
    """P@k, and seconds of the processor for the prediction."""
    began = time.process_time()
    xs.predict(model, data, out, k=max(KS), **HERE, overwrite=True)
    seconds = time.process_time() - began
    figures = xs.evaluate(out, data, ks=KS, **HERE)
    return " / ".join(f"{figures[f'P@{k}']:.2f}" for k in KS), seconds


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("names", nargs=-1, required=True)
@click.option("--scratch", type=click.Path(path_type=Path), required=True, help="Folder of models and splits.")
def main(folder: Path, names: tuple[str, ...], scratch: Path) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    print(machine())
    print(
        "| set | weights | type | MB | P@1 / 3 / 5, test rows | the same, held-out training rows | prediction, CPU s |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in names:
        train, test = (xs.open_dataset(folder / f"{name}{end}.xmc") for end in ("", "-test"))
        part, held = scratch / f"{name}-part.xmc", scratch / f"{name}-held.xmc"
        xs.split(train, part, held, overwrite=True)
        models = [trained(train, scratch / f"{name}-{kind}.model", kind) for kind in TYPES]
        seconds = [min(precision(model, test, scratch / "p")[1] for _ in range(5)) for model in models]
        for kind, model, took in zip(TYPES, models, seconds, strict=True):
            megabytes = sum(file.stat().st_size for file in model.path.rglob("*") if file.is_file()) / 1e6
            seen, _ = precision(model, test, scratch / "p")
            unseen, _ = precision(
                trained(xs.open_dataset(part), scratch / "part.model", kind), xs.open_dataset(held), scratch / "p"
            )
            print(f"| {name} | {model.nnz:,} | {kind} | {megabytes:.2f} | {seen} | {unseen} | {took:.2f} |", flush=True)


if __name__ == "__main__":
    main()
