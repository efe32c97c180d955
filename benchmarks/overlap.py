"""Is reading hidden behind computing? A matrix is streamed, and some of its rows gathered, from a cold page cache.

For each way of reading: seconds of reading alone and with computing that takes as long, and the ratio of the sum to both:
from 1 (one after the other) to 2 (at once). Ways: `plain`, nothing asked for ahead; `asked`, the library's: the kernel is
asked for the next block; `thread`, a second thread that reads into a second buffer. Cases alternate, medians are printed.
--idle: computing is waiting, on a machine whose processors have other work.

    python benchmarks/overlap.py FOLDER --size 2GB
"""

from __future__ import annotations

import itertools
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import click
import numpy as np
from commands import drop_cache, machine
from read_paths import add_up, make

from xmc_stream.store import chunks
from xmc_stream.store.matrix import Block, Buffer, SparseMatrix
from xmc_stream.system.memory import parse_size

BLOCK = 10 * 2**20  # of X in a row block: what a thread has at a limit of 512 MB
WAYS = ("plain", "asked", "thread")


def blocks_of_thread(matrix: SparseMatrix, start: int, stop: int) -> Iterator[Block]:
    """As `matrix.blocks`, read by another thread into two buffers in turn."""
    free: queue.Queue[Buffer] = queue.Queue()
    full: queue.Queue[tuple[Block, Buffer] | None] = queue.Queue()
    for _ in range(2):
        free.put(Buffer(matrix, BLOCK // matrix.entry_bytes))
    ends = matrix.indptr.read(start, stop + 1)
    cuts = [0]
    while cuts[-1] < stop - start:
        most = ends[cuts[-1]] + BLOCK // (matrix.entry_bytes + 1)
        cuts.append(int(np.searchsorted(ends, most, "right")) - 1)

    def read() -> None:
        for a, b in itertools.pairwise(cuts):
            buffer = free.get()
            full.put((matrix.block(start + a, start + b, buffer), buffer))
        full.put(None)

    threading.Thread(target=read).start()
    while (item := full.get()) is not None:
        yield item[0]
        free.put(item[1])


def stream(path: Path, way: str, start: int, stop: int, work: Callable[[Block], Any]) -> None:
    matrix = SparseMatrix(path)
    for block in blocks_of_thread(matrix, start, stop) if way == "thread" else matrix.blocks(BLOCK, start, stop):
        work(block)


def timed(path: Path, threads: int, way: str, work: Callable[[Block], Any], cold: bool) -> float:
    """Seconds of a stream whose parts are read by so many threads."""
    n = SparseMatrix(path).n_lines
    if cold:
        drop_cache(path)
    workers = [
        threading.Thread(target=stream, args=(path, way, n * t // threads, n * (t + 1) // threads, work))
        for t in range(threads)
    ]
    asks = chunks.ChunkedArray.will_need if way == "asked" else lambda *_: None
    with mock.patch.object(chunks.ChunkedArray, "will_need", asks):
        began = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return time.perf_counter() - began


def nothing(_: Block) -> None:
    pass


def streams(path: Path, threads: int, repeats: int, idle: bool) -> None:
    probe = SparseMatrix(path).block(0, 1000)
    add_up(probe.indices, probe.values)  # compiled before the clock starts
    reading = statistics.median(timed(path, threads, "plain", nothing, True) for _ in range(repeats))
    pace = reading * threads / SparseMatrix(path).nnz  # seconds of a thread an entry

    def compute(block: Block) -> None:
        if idle:
            time.sleep(pace * len(block.indices))
        else:
            began = time.thread_time()
            while time.thread_time() - began < pace * len(block.indices):
                add_up(block.indices[: 1 << 16], block.values[: 1 << 16])

    print(f"\n{threads} threads, computing as long as reading: seconds of reading alone, of both; 2 x reading / both")
    figures: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way in WAYS:
            figures[way].append((timed(path, threads, way, nothing, True), timed(path, threads, way, compute, True)))
    for way in WAYS:
        alone, both = (statistics.median(column) for column in zip(*figures[way], strict=True))
        print(f"{way:8} {alone:7.2f} {both:7.2f}   {2 * reading / both:.2f}", flush=True)


def gathers(path: Path, repeats: int) -> None:
    matrix = SparseMatrix(path)
    rng = np.random.default_rng(0)
    print("\ngather, one thread: microseconds a row (two ranges), cold and warm")
    print(f"{'share of rows':14} {'plain':>8} {'asked':>8} {'warm plain':>11} {'warm asked':>11}")
    for share in (0.005, 0.03, 0.1):
        rows = np.sort(rng.choice(matrix.n_lines, int(share * matrix.n_lines), replace=False)).astype(np.int64)
        lengths = matrix.lengths(rows)
        buffer = Buffer(matrix, int(lengths[1].sum()))
        seconds: dict[tuple[bool, int], list[float]] = {}
        for _ in range(repeats):
            for cold in (True, False):
                for ahead in (0, chunks._AHEAD):
                    if cold:
                        drop_cache(path)
                    else:
                        matrix.gather(rows, buffer, lengths)
                    with mock.patch.object(chunks, "_AHEAD", ahead):
                        began = time.perf_counter()
                        matrix.gather(rows, buffer, lengths)
                        seconds.setdefault((cold, ahead), []).append(time.perf_counter() - began)
        cells = [statistics.median(of) / len(rows) * 1e6 for of in seconds.values()]
        print(f"{share:14.1%} {cells[0]:8.1f} {cells[1]:8.1f} {cells[2]:11.2f} {cells[3]:11.2f}", flush=True)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--size", default="2GB", show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--idle", is_flag=True)
def main(folder: Path, size: str, repeats: int, idle: bool) -> None:
    path = folder / "overlap.matrix"
    if not path.exists():
        make(path, parse_size(size))
    print(machine())
    for threads in (1, 2):
        streams(path, threads, repeats, idle)
    gathers(path, repeats)


if __name__ == "__main__":
    main()
