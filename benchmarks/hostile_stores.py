"""Commands on spoilt stores (tests/helpers/spoilt_stores.py), as many as one likes.

    python benchmarks/hostile_stores.py 1000 --seed 7
    NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$(mktemp -d) python benchmarks/hostile_stores.py 1000

Bits flip, files are cut, lost and exchanged; values, arrays, matrices and descriptions of datasets, models, predictions and
unfinished runs are replaced, mostly with checksums and seal made anew. Each command must end with exit code 0, or with 1
and one line, in little memory and time. The second command compiles code that checks every index. What fails is printed;
in tests/, `python -m helpers.spoilt_stores FOLDER SEED SEED+1` does it again, with SHOW=1 each command and what it says.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import click


@click.command()
@click.argument("n", type=click.IntRange(1), default=300)
@click.option("--seed", default=0, show_default=True)
def main(n: int, seed: int) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from helpers.spoilt_stores import fuzz_in

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        first = seed * 10**6
        failures = fuzz_in(Path(folder) / "stores", range(first, first + n), verbose=True)
    print(f"{n} spoilt stores, {len(failures)} failures: {time.perf_counter() - began:.0f} s")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
