"""Mutated texts through the parser beside its plain twin (tests/test_fuzz_parser.py), as many as one likes.

    python benchmarks/fuzz_parser.py 1000000 --seed 7
    NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$(mktemp -d) python benchmarks/fuzz_parser.py 100000

Each must end in the twin's rows and counts, or in an InputError naming the line that the twin names. The second command
compiles code that checks every index.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

STEP = 10_000


@click.command()
@click.argument("n", type=click.IntRange(1))
@click.option("--seed", default=0, show_default=True)
def main(n: int, seed: int) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from helpers.parser_fuzz import fuzz

    began = time.perf_counter()
    n_good = 0
    for start in range(0, n, STEP):
        n_good += fuzz(min(STEP, n - start), seed=seed * 10**6 + start)
        print(f"\r{min(start + STEP, n)}", end="", file=sys.stderr)
    seconds = time.perf_counter() - began
    print(f"\r{n} texts, {n_good} with rows, {n - n_good} without or refused: {seconds:.0f} s")


if __name__ == "__main__":
    main()
