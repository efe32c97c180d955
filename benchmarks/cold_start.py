"""What a start costs: importing the package, and the commands that need no kernel.

    python benchmarks/cold_start.py DATA.xmc

Best of five, in seconds; and the modules that importing the package loads.
"""

from __future__ import annotations

import subprocess
import sys
import time

import click

HEAVY = ("numpy", "numba", "dask", "distributed", "zarr")


def best(*command: str) -> float:
    """Seconds of the fastest of five runs."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - began)
    return min(times)


@click.command()
@click.argument("data")
def main(data: str) -> None:
    empty = best("-c", "pass")
    print(f"python by itself      {empty:6.3f}")
    print(f"import xmc_stream     {best('-c', 'import xmc_stream') - empty:6.3f} more")
    print(f"xmc-stream --help     {best('-m', 'xmc_stream.cli', '--help'):6.3f}")
    print(f"xmc-stream info DATA  {best('-m', 'xmc_stream.cli', 'info', data):6.3f}")
    code = f"import sys, xmc_stream; print([name for name in {HEAVY} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    print(f"of {', '.join(HEAVY)}, importing loads: {loaded}")


if __name__ == "__main__":
    main()
