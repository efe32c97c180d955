"""What a start costs: importing the package, and the commands that need no kernel.

    python benchmarks/cold_start.py DATA.xmc

Best of five, in seconds; and the modules that importing the package loads. Of a training with the defaults and one
thread, from its command to the first job of its first round, and to its end; a first one compiles what is not compiled yet.
Last, how long all kernels of a training take to compile: with active sets, and with all rows at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from xmc_stream.runtime.events import read_events

HEAVY = ("numpy", "numba", "dask", "distributed", "zarr")


def best(*command: str) -> float:
    """Seconds of the fastest of five runs."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - began)
    return min(times)


def training(data: str) -> tuple[float, float]:
    """Seconds to the first round of a training, and to its end: of the fastest of five."""
    times = []
    for _ in range(6):
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "model"
            began = time.time()
            command = [sys.executable, "-m", "xmc_stream.cli", "train", data, str(model), "--threads", "1"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            end = time.time()
            first = next(e["time"] for e in read_events(model / "events.jsonl") if e["phase"].startswith("round 1"))
            times.append((first - began, end - began))
    return min(first for first, _ in times[1:]), min(end for _, end in times[1:])


def compiling(data: str, all_rows: str) -> float:
    """Seconds to compile the kernels of a training into an empty cache."""
    command = [
        sys.executable,
        "-m",
        "xmc_stream.cli",
        "plan",
        "train",
        data,
        "x",
        "--json",
        "--set",
        f"all_rows={all_rows}",
    ]
    with tempfile.TemporaryDirectory() as cache:
        said = subprocess.run(
            command, check=True, capture_output=True, text=True, env={**os.environ, "NUMBA_CACHE_DIR": cache}
        )
    return float(json.loads(said.stdout)["compiling"])


@click.command()
@click.argument("data")
def main(data: str) -> None:
    empty = best("-c", "pass")
    print(f"python by itself      {empty:6.3f}")
    print(f"import xmc_stream     {best('-c', 'import xmc_stream') - empty:6.3f} more")
    print(f"xmc-stream --help     {best('-m', 'xmc_stream.cli', '--help'):6.3f}")
    print(f"xmc-stream info DATA  {best('-m', 'xmc_stream.cli', 'info', data):6.3f}")
    print("xmc-stream train DATA {:6.3f} to the first round, {:6.3f} in all".format(*training(data)))
    print(
        "compiling kernels     {:6.1f}, with all rows {:6.1f}".format(
            *(compiling(data, said) for said in ("false", "true"))
        )
    )
    code = f"import sys, xmc_stream; print([name for name in {HEAVY} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    print(f"of {', '.join(HEAVY)}, importing loads: {loaded}")


if __name__ == "__main__":
    main()
