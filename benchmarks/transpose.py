"""Rows to columns: how long it takes against reading and writing the same bytes plainly on the same disk.

A synthetic X of --size is made (or taken, if it is there), then transposed in buffers of --buffer in a process of its
own; then the disk alone reads and writes as many bytes. Both end with fsync. Prints passes, seconds, MB/s, VmHWM.

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

from xmc_stream.memory import format_size, parse_size, peak_resident, resident, return_freed_memory
from xmc_stream.store.dataset import make_columns, open_dataset
from xmc_stream.store.transpose import load_kernels

PIECE = 8 * 2**20
MAKER = Path(__file__).resolve().parent.parent / "tools" / "make_synthetic.py"


def transposition(path: Path, buffer: int) -> dict[str, float]:
    """X to columns in this process: seconds and memory."""
    return_freed_memory()
    rows = open_dataset(path).X_rows()
    load_kernels(rows.shape[0], rows.indices.dtype)
    before = resident()
    began = time.perf_counter()
    make_columns(path, buffer)
    return {"seconds": time.perf_counter() - began, "before": before, "peak": peak_resident()}


def plain(folder: Path, n_bytes: int) -> dict[str, float]:
    """Seconds to write n_bytes and to read them again, plainly."""
    piece = np.random.default_rng(0).integers(0, 255, PIECE, np.uint8)
    file = folder / "plain.bytes"
    began = time.perf_counter()
    with open(file, "wb") as out:
        for _ in range(n_bytes // PIECE):
            out.write(piece.data)
        out.flush()
        os.fsync(out.fileno())
    written = time.perf_counter()
    with open(file, "rb", buffering=0) as back:
        while back.readinto(piece.data):
            pass
    seconds = {"write": written - began, "read": time.perf_counter() - written}
    file.unlink()
    return seconds


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
        made = [MAKER, path, "--size", size, "--features", str(features), "--labels", "8192"]
        subprocess.run([sys.executable, *made], check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(path / "X" / "columns", ignore_errors=True)
    X = open_dataset(path).X_rows()
    columns = 8 * X.nnz
    spill = 0 if columns <= room * 3 // 4 else 10 * X.nnz
    read, written = columns + spill, columns + spill
    command = [sys.executable, __file__, str(folder), "--buffer", buffer, "--case"]
    got = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    disk = plain(folder, written)
    print(f"X: {X.shape[0]} x {X.shape[1]}, {X.nnz} values, {format_size(columns)}; buffers of {buffer}")
    print(f"passes {1 + bool(spill)}, read {format_size(read)}, written {format_size(written)}")
    rate = (read + written) / got["seconds"] / 1e6
    print(f"transposition {got['seconds']:.1f} s, {rate:.0f} MB/s read and written")
    print(f"VmHWM {got['peak'] / 1e6:.0f} MB, of which {got['before'] / 1e6:.0f} MB were there before")
    both = disk["read"] + disk["write"]
    rates = f"writes {written / disk['write'] / 1e6:.0f} MB/s, reads {written / disk['read'] / 1e6:.0f} MB/s"
    print(f"the disk alone {both:.1f} s ({rates}): the transposition takes {got['seconds'] / both:.2f} times that")


if __name__ == "__main__":
    main()
