"""Mutated inputs through whole conversions (tests/test_fuzz_conversion.py), as many as one likes; and a table.

    python benchmarks/hostile.py 10000 --seed 7
    python benchmarks/hostile.py --table          # what `convert` does with bad input: the column in docs/convert.md

Each input must end in the dataset that a plain reading gives, or in one line. The table runs the command on files of 300
rows, and prints what it ends in.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click

STEP = 1000
N_ROWS, N_FEATURES, N_LABELS = 300, 50, 20
SECONDS = 60


def good() -> list[str]:
    """Lines without a fault, each with labels in ascending order."""
    lines = []
    for i in range(N_ROWS):
        labels = sorted({i % N_LABELS, i * 7 % N_LABELS})
        features = sorted({i % N_FEATURES, i * 3 % N_FEATURES, 17})
        lines.append(",".join(map(str, labels)) + "".join(f" {j}:0.{i + 1}" for j in features))
    return lines


def cases() -> Iterator[tuple[str, str, list[str]]]:
    """Name, text and options of each; line 101 of the file is the one that is spoilt."""
    header = f"{N_ROWS} {N_FEATURES} {N_LABELS}"

    def spoilt(line: str) -> str:
        lines = good()
        lines[99] = line
        return "\n".join([header, *lines, ""])

    yield 'value "abc"', spoilt("3 5:0.5 9:abc"), []
    yield "NaN", spoilt("3 5:0.5 9:nan"), []
    yield "feature id > D", spoilt("3 5:0.5 1000000:1"), []
    yield "label > K", spoilt("3,1000000 5:0.5"), []
    yield "negative feature id", spoilt("3 -5:0.5 9:1"), []
    yield "duplicate ids", spoilt("3 5:0.5 5:1"), []
    yield "duplicate ids, --duplicates=sum", spoilt("3 5:0.5 5:1"), ["--duplicates=sum"]
    yield "unsorted ids", spoilt("3 9:0.5 5:1"), []
    yield "wrong N", "\n".join([f"400 {N_FEATURES} {N_LABELS}", *good(), ""]), []
    yield "no header", "\n".join([*good(), ""]), []
    yield "empty file", "", []
    yield "any bad row, --on-error=skip", spoilt("3 5:0.5 9:abc"), ["--on-error=skip"]


def table() -> None:
    """Run the command on each case."""
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, text, options) in enumerate(cases()):
            path, target = Path(folder) / "bad.txt", Path(folder) / f"{number}.xmc"
            path.write_text(text)
            command = [sys.executable, "-m", "xmc_stream.cli", "convert", str(path), str(target), *options]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
            said = (done.stdout.splitlines()[:2] if done.returncode == 0 else done.stderr.splitlines()) or [""]
            if done.returncode not in (0, 1) or (done.returncode and (len(said) != 1 or target.exists())):
                raise SystemExit(f"{name}: exit code {done.returncode}: {done.stderr}")
            said = [line for line in said if not line.startswith(str(target))]
            print(f"| {name} | {done.returncode} | {'; '.join(said).replace(folder + '/', '')} |")


@click.command()
@click.argument("n", type=click.IntRange(1), default=1000)
@click.option("--seed", default=0, show_default=True)
@click.option("--table", "as_table", is_flag=True, help="What `convert` does with bad input, instead.")
def main(n: int, seed: int, as_table: bool) -> None:
    if as_table:
        table()
        return
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from test_fuzz_conversion import fuzz

    began = time.perf_counter()
    n_good = 0
    for start in range(0, n, STEP):
        n_good += fuzz(min(STEP, n - start), seed=seed * 10**6 + start)
        print(f"\r{min(start + STEP, n)}", end="", file=sys.stderr)
    seconds = time.perf_counter() - began
    print(f"\r{n} inputs, {n_good} datasets, {n - n_good} refused in a line: {seconds:.0f} s")


if __name__ == "__main__":
    main()
