"""Damaged stores, and every command that reads them: as many trials as one likes (tests/helpers/damaged.py).

    python benchmarks/damage.py 600 --seed 3

A trial flips a bit of a file of a dataset, model or predictions, cuts it short, takes it away or puts another one in its
place, and runs three of the commands that read such a store, each on a copy of its own. A command that ends with exit
code 0 must have made what it makes of the whole store; any other ends with 1 and one line that names the store. What
fails is printed, with the seed that does it again.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import click


@click.command()
@click.argument("n", type=click.IntRange(1), default=500)
@click.option("--seed", default=0, show_default=True)
@click.option("--target", default=None, help="One of the stores. [default: all, by chance]")
def main(n: int, seed: int, target: str | None) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from helpers.damaged import attempt, prepare_all
    from helpers.spoilt_stores import fuzz_in

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        seeds = range(seed * 10**6, seed * 10**6 + n)
        failures = fuzz_in(Path(folder) / "stores", seeds, target, None, True, attempt, prepare_all)
    print(f"{n} trials, {len(failures)} failures: {time.perf_counter() - began:.0f} s")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
