"""How fast is a store read by pread into reused buffers?

A store of --size is streamed once, and a tenth of its rows is gathered, by two threads, with a warm and with a cold
page cache. Every case runs in a process of its own, so that VmHWM is the case's. Prints GB/s and VmHWM.

    python benchmarks/read_paths.py FOLDER --size 4GB
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.jit import kernel
from xmc_stream.store.encoding import new_matrix
from xmc_stream.store.matrix import Buffer, SparseMatrix
from xmc_stream.system.memory import MemoryLimit, parse_size, peak_resident, resident

N_FEATURES = 200_000
ROW = 100  # mean entries of a row: 800 bytes
WINDOW = 32 * 2**20  # bytes of X in memory per thread


@kernel
def add_up(indices: NDArray[Any], data: NDArray[np.float32]) -> float:
    total = 0.0
    for p in range(len(indices)):
        total += data[p] * (indices[p] & 1)
    return total


def make(path: Path, size: int) -> None:
    rng = np.random.default_rng(0)
    n_rows = size // (8 * ROW)
    step = 50_000
    with new_matrix(path, "csr_matrix", (n_rows, N_FEATURES)) as writer:
        for start in range(0, n_rows, step):
            lengths = rng.integers(ROW // 2, 3 * ROW // 2, min(step, n_rows - start))
            nnz = int(lengths.sum())
            writer.append(lengths, rng.integers(0, N_FEATURES, nnz, np.int32), rng.random(nnz, np.float32))


def stream(matrix: SparseMatrix, start: int, stop: int) -> float:
    return sum(add_up(block.indices, block.values) for block in matrix.blocks(WINDOW, start, stop))


def gather(matrix: SparseMatrix, start: int, stop: int) -> float:
    n = (stop - start) // 10
    rows = start + np.sort(np.random.default_rng(start).choice(stop - start, n, replace=False)).astype(np.int64)
    buffer = Buffer(matrix, WINDOW // 8)
    step = WINDOW // (8 * ROW * 2)
    total = 0.0
    for start in range(0, len(rows), step):
        block = matrix.gather(rows[start : start + step], buffer)
        total += add_up(block.indices, block.values)
    return total


def case(path: Path, name: str, threads: int) -> dict[str, float]:
    """One case in this process: GB/s of useful bytes and VmHWM."""
    MemoryLimit.kept(None)
    matrix = SparseMatrix(path)
    n = matrix.n_lines
    parts = [(n * t // threads, n * (t + 1) // threads) for t in range(threads)]
    # compiled before the clock starts
    probe = matrix.block(0, 1)
    add_up(probe.indices, probe.values)
    work = {"stream": stream, "gather": gather}
    before = resident()
    workers = [threading.Thread(target=lambda a=a, b=b: work[name](SparseMatrix(path), a, b)) for a, b in parts]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - began
    useful = matrix.nnz * 8 * (0.1 if name.startswith("gather") else 1.0)
    return {"GB/s": useful / seconds / 1e9, "VmHWM_MB": peak_resident() / 1e6, "before_MB": before / 1e6}


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--size", default="4GB", show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--case", "one", hidden=True)
def main(folder: Path, size: str, threads: int, one: str | None) -> None:
    path = folder / "read_paths.matrix"
    if one:
        print(json.dumps(case(path, one, threads)))
        return
    if not path.exists():
        make(path, parse_size(size))
    print(f"{'case':14} {'cache':5} {'GB/s':>7} {'VmHWM MB':>9}   (before the work: MB)")
    for name in ("stream", "gather"):
        for cache in ("cold", "warm"):
            if cache == "cold":
                for file in path.rglob("c/*"):
                    fd = os.open(file, os.O_RDONLY)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(fd)
            command = [sys.executable, __file__, str(folder), "--threads", str(threads), "--case", name]
            got = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print(
                f"{name:14} {cache:5} {got['GB/s']:7.2f} {got['VmHWM_MB']:9.0f}   ({got['before_MB']:.0f})", flush=True
            )


if __name__ == "__main__":
    main()
