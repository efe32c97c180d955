"""Text to a finished store against scikit-learn's loader of the same file, in one run.

    python benchmarks/convert.py FOLDER --samples 1000000

A generated set as libsvm text, headerless (1.5 GB for a million rows), is converted (rows, Y both ways, statistics) by
one thread and by two, and loaded by load_svmlight_file into memory; each in a process of its own, alternating. Ends with
exit code 1 if two threads are not at least three times as fast as the loader, or a limit of 1 GB did not hold.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from commands import machine, run

GENERATOR = Path(__file__).resolve().parent.parent / "tools" / "make_synthetic.py"
SHAPE = "--features 300000 --labels 8192 --features-per-sample 80 --labels-per-sample 3 --seed 1".split()
LOAD = """
import json, sys, time
from sklearn.datasets import load_svmlight_file
from xmc_stream.system.memory import peak_resident
began = time.perf_counter()
X, _ = load_svmlight_file(sys.argv[1], multilabel=True)
print(json.dumps({"seconds": time.perf_counter() - began, "peak_rss": peak_resident(), "nnz_features": X.nnz}))
"""


def load(path: Path) -> dict[str, Any]:
    """What load_svmlight_file takes."""
    done = subprocess.run([sys.executable, "-c", LOAD, path], stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--samples", default=1_000_000, show_default=True)
@click.option("--limit", default="1GB", show_default=True)
@click.option("--repeats", default=3, show_default=True)
def main(folder: Path, samples: int, limit: str, repeats: int) -> None:
    text = folder / f"convert-{samples}.svm"
    if not text.exists():
        subprocess.run([sys.executable, GENERATOR, text, "--samples", str(samples), *SHAPE], check=True)
    size = text.stat().st_size
    print(f"{machine()}; {size / 1e9:.2f} GB of libsvm text, {samples:,} rows; limit {limit}; median of {repeats}")
    options = (text, folder / "convert.xmc", "--memory-limit", limit, "--overwrite", "--threads")
    programs: dict[str, Callable[[], dict[str, Any]]] = {
        "convert, 1 thread": lambda: run("convert", *options, 1),
        "convert, 2 threads": lambda: run("convert", *options, 2),
        "load_svmlight_file": lambda: load(text),
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in programs}
    for _ in range(repeats):
        for name, program in programs.items():
            runs[name].append(program())
    seconds = {name: statistics.median(figures["seconds"] for figures in found) for name, found in runs.items()}
    peaks = {name: max(figures["peak_rss"] for figures in found) for name, found in runs.items()}
    print(f"{'':20} {'s':>7} {'least':>7} {'MB/s':>7} {'VmHWM MB':>9} {'times the loader':>17}")
    for name, found in runs.items():
        least = min(figures["seconds"] for figures in found)
        ratio = seconds["load_svmlight_file"] / seconds[name]
        print(
            f"{name:20} {seconds[name]:7.1f} {least:7.1f} {size / 1e6 / seconds[name]:7.0f} {peaks[name] / 1e6:9.0f} "
            f"{ratio:17.1f}"
        )
    if len({figures["nnz_features"] for found in runs.values() for figures in found}) > 1:
        sys.exit("the programs did not read the same number of values")
    held = all(peaks[name] <= 1e9 for name in programs if name.startswith("convert"))
    sys.exit(not (held and seconds["load_svmlight_file"] >= 3 * seconds["convert, 2 threads"]))


if __name__ == "__main__":
    main()
