"""More values than an int32 counts: a store of --values is made, checked, read back at both ends, and streamed.

Each stage runs in a process of its own. `make` is tools/make_synthetic.py; `verify` is the command; `ends` draws the first
and the last rows again and compares them with the store; `stream` reads all rows once and looks whether indices ascend
and are in range, lengths add up and features occur as often as the statistics say. Prints seconds and VmHWM; ends with
exit code 1 where something is wrong or a process exceeds --limit. Removes what it made.

    python benchmarks/many_values.py FOLDER        # 17.6 GB of disk
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from xmc_stream.kernels.csr import count_indices
from xmc_stream.store.dataset import Dataset, open_dataset
from xmc_stream.store.matrix import Block
from xmc_stream.system.memory import MemoryLimit, format_size, parse_size, peak_resident

MAKER = Path(__file__).resolve().parent.parent / "tools" / "make_synthetic.py"
FEATURES, LABELS, PER_SAMPLE, PER_LABEL = 200_000, 8192, 100.0, 3.0
BLOCK = 2**27  # bytes of X that are streamed at a time


class WrongError(Exception):
    """Something in the store is not as it must be."""


def expect(true: Any, what: str) -> None:
    """Raise WrongError where something is not true."""
    if not true:
        raise WrongError(what)


def ends(data: Dataset) -> str:
    """The first and the last rows, drawn again."""
    spec = importlib.util.spec_from_file_location("make_synthetic", MAKER)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    generator = tool._Generator(FEATURES, LABELS, PER_SAMPLE, PER_LABEL, 0)
    step = generator.block_rows
    last = (data.n_samples - 1) // step * step
    X, Y = data.X_rows(), data.Y_rows()
    for start, stop in ((0, step), (last, data.n_samples)):
        x_indptr, x_indices, x_data, y_indptr, y_indices = generator._rows(tool._rng(0, 0, start // step))
        n = stop - start
        x, y = X.block(start, stop), Y.block(start, stop)
        for got, drawn, name in (
            (x.indptr, x_indptr[: n + 1], "indptr of X"),
            (x.indices, x_indices[: x_indptr[n]], "indices of X"),
            (x.values, x_data[: x_indptr[n]], "values of X"),
            (y.indptr, y_indptr[: n + 1], "indptr of Y"),
            (y.indices, y_indices[: y_indptr[n]], "indices of Y"),
        ):
            expect(np.array_equal(got, drawn), f"{name} in rows {start} to {stop}")
    entry = int(X.indptr.read(last, last + 1)[0])
    expect(entry > 2**31, f"the last rows begin at entry {entry}")
    return f"rows 0 to {step}, and {last} to {data.n_samples}, from entry {entry} on"


def structure(block: Block, n_features: int) -> None:
    """Raise WrongError where indices of a block are out of range or do not ascend in a row."""
    expect(not len(block.indices) or 0 <= block.indices.min() <= block.indices.max() < n_features, "range of indices")
    descends = np.flatnonzero(block.indices[1:] <= block.indices[:-1]) + 1
    expect(np.isin(descends, block.indptr).all(), f"order of indices in rows from {block.start}")


def stream(data: Dataset) -> str:
    """Every row once."""
    X = data.X_rows()
    counts = np.zeros(data.n_features, np.int64)
    rows = values = 0
    for block in X.blocks(BLOCK):
        expect(block.start == rows, f"row {block.start} comes after row {rows}")
        structure(block, data.n_features)
        count_indices(block.indices, counts)
        rows += block.n
        values += len(block.values)
    expect((rows, values) == (data.n_samples, X.nnz), f"{rows} rows, {values} values")
    expect(values > 2**31, f"{values} values")
    expect(np.array_equal(counts, data.feature_counts()), "feature counts")
    return f"{rows} rows, {values} values, {format_size(X.bytes_read)}"


STAGES = {"ends": ends, "stream": stream}


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--values", default=2_200_000_000, show_default=True)
@click.option("--limit", default="1GB", show_default=True, help="Of the memory of each process.")
@click.option("--stage", type=click.Choice(list(STAGES)), hidden=True)
def main(folder: Path, values: int, limit: str, stage: str | None) -> None:
    path = folder / "many_values.xmc"
    if stage:
        MemoryLimit.kept(limit)
        began = time.perf_counter()
        said = STAGES[stage](open_dataset(path))
        print(json.dumps({"said": said, "seconds": time.perf_counter() - began, "peak_rss": peak_resident()}))
        return
    sizes = ["--features", FEATURES, "--labels", LABELS, "--features-per-sample", PER_SAMPLE, "--size", 8 * values]
    commands = {"make": [MAKER, path, *sizes, "--labels-per-sample", PER_LABEL, "--overwrite", "--json"]}
    commands["verify"] = ["-m", "xmc_stream.cli", "verify", path, "--memory-limit", limit, "--json"]
    commands |= {name: [__file__, folder, "--stage", name] for name in STAGES}
    wrong = False
    try:
        for name, command in commands.items():
            done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{name}: {done.stderr.strip().splitlines()[-1]}")
            got = json.loads(done.stdout)
            read = f"{format_size(got.get('bytes_read', 0))} read"
            said = got["said"] if "said" in got else f"{got['nnz_features']} values" if name == "make" else read
            print(f"{name:7} {got['seconds']:6.1f} s  VmHWM {got['peak_rss'] / 1e6:4.0f} MB  {said}", flush=True)
            wrong |= got["peak_rss"] > parse_size(limit)
    finally:
        shutil.rmtree(path, ignore_errors=True)
    if wrong:
        sys.exit(f"a process had more than {limit}")


if __name__ == "__main__":
    main()
