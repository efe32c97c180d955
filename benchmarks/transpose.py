"""Rows to columns: how long it takes against reading and writing the same bytes plainly on the same disk.

A synthetic X of --size is made (or taken, if it is there), then transposed in buffers of --buffer in a process of its
own; then the disk alone reads and writes as many bytes. Both begin with X out of the page cache and end with fsync.
Prints passes, seconds, MB/s, VmHWM.

    python benchmarks/transpose.py FOLDER --size 5GB --buffer 256MB
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import click
import numpy as np

from xmc_stream.store.dataset import open_dataset
from xmc_stream.store.new_dataset import load_kernels
from xmc_stream.system.memory import MemoryLimit, format_size, parse_size, peak_resident, resident

PIECE = 8 * 2**20
MAKER = Path(__file__).resolve().parent.parent / "tools" / "make_synthetic.py"


def transposition(path: Path, buffer: int) -> dict[str, float]:
    """X to columns in this process: seconds and memory."""
    MemoryLimit.kept(None)
    data = open_dataset(path)
    rows = data.X_rows()
    load_kernels(rows.shape[0], 1, rows.shape[1])
    before, cpu = resident(), time.process_time()
    began = time.perf_counter()
    data.X_columns(buffer)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return {"seconds": seconds, "cpu": cpu, "before": before, "peak": peak_resident()}


def files(matrix: Path) -> list[Path]:
    return sorted(matrix.rglob("c/*"))


def forget(matrix: Path) -> None:
    """Take a matrix out of the page cache."""
    for file in files(matrix):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def plain(rows: Path, spill: int, columns: int) -> dict[str, float]:
    """Seconds to read X, write and read a file of the spill's size, and write one of the columns' with fsync."""
    piece = np.random.default_rng(0).integers(0, 255, PIECE, np.uint8)
    target = rows.with_name("plain")
    times = [time.perf_counter()]

    def read(paths: list[Path]) -> None:
        for path in paths:
            with open(path, "rb", buffering=0) as file:
                while file.readinto(piece.data):
                    pass
        times.append(time.perf_counter())

    def write(n_bytes: int, sync: bool) -> None:
        with open(target, "wb", buffering=0) as file:
            for _ in range(n_bytes // PIECE):
                file.write(piece.data)
            if sync:
                os.fsync(file.fileno())
        times.append(time.perf_counter())

    read(files(rows))
    write(spill, False)
    read([target])
    target.unlink()
    write(columns, True)
    target.unlink()
    return dict(zip(("read X", "write spill", "read spill", "write columns"), np.diff(times).tolist(), strict=True))


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--size", default="5GB", show_default=True, help="Of X by rows.")
@click.option("--buffer", default="256MB", show_default=True)
@click.option("--features", default=200_000, show_default=True)
@click.option("--case", is_flag=True, hidden=True)
def main(folder: Path, size: str, buffer: str, features: int, case: bool) -> None:
    path = folder / "transpose.xmc"
    room = parse_size(buffer)
    if case:
        print(json.dumps(transposition(path, room)))
        return
    if not path.exists():
        made = [str(MAKER), str(path), "--size", size, "--features", str(features), "--labels", "8192"]
        subprocess.run([sys.executable, *made], check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(path / "X" / "columns", ignore_errors=True)
    X = open_dataset(path).X_rows()
    columns = 8 * X.nnz
    spill = 0 if columns <= room * 3 // 4 else 8 * X.nnz
    moved = 2 * (columns + spill)
    command = [sys.executable, __file__, str(folder), "--buffer", buffer, "--case"]
    forget(X.path)
    got = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    forget(X.path)
    disk = plain(X.path, spill, columns)
    print(f"X: {X.shape[0]} x {X.shape[1]}, {X.nnz} values, {format_size(columns)}; buffers of {buffer}")
    print(f"passes {1 + bool(spill)}, read {format_size(moved / 2)}, written {format_size(moved / 2)}")
    rate = f"{moved / got['seconds'] / 1e6:.0f} MB/s read and written"
    print(f"transposition {got['seconds']:.1f} s ({got['cpu']:.1f} s of processors), {rate}")
    print(f"VmHWM {got['peak'] / 1e6:.0f} MB, of which {got['before'] / 1e6:.0f} MB were there before")
    both = sum(disk.values())
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in disk.items())
    print(f"the disk alone {both:.1f} s, {moved / both / 1e6:.0f} MB/s ({parts})")
    print(f"the transposition takes {got['seconds'] / both:.2f} times that")


if __name__ == "__main__":
    main()
