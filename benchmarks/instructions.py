"""What each instruction beside Python is worth: a training with it, and with plain loops in its place.

    XMC_STREAM_DATA=... python benchmarks/instructions.py FOLDER [NAME ...]

Each row is one training in two processes, one compiled with `kernels/intrinsics.py` and one with the loops below for one of
them. Processor seconds of the process, the least of three fits, once kernels are loaded. `references` stands for numba's option
`_nrt`, by which inner kernels count no references to arrays. `widen` has no plain form that numba compiles. FOLDER is for
datasets and compiled kernels, which stay.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

TIMES = 3
FITS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "rounds": ("wordnet_hypernyms", "PPDSparse", {"max_rounds": 3}),
    "all rows": ("wordnet_hypernyms", "PPDSparse", {"all_rows": True, "max_rounds": 1}),
    "dense rows": ("mnist", "PPDSparse", {}),
    "pd-sparse": ("stackex_cooking", "PDSparse", {"max_passes": 12}),
    "group lasso": ("delicious", "GroupLasso", {"loss": "multitask", "max_passes": 20}),
    "leml": ("wordnet_hypernyms", "LEML", {"rank": 64, "alternations": 2}),
    "lsh": ("rcv1_topics", "MEMOIR", {"steps": 4000, "oracle": "simple-lsh", "variant": "lsh"}),
}
OF = {
    "prefetch": ["rounds", "all rows", "pd-sparse", "group lasso", "lsh", "leml"],
    "popcount": ["rounds", "lsh"], "above": ["rounds"], "at_most": ["lsh"], "product": ["lsh"], "total": ["group lasso"],
    "soft_product": ["dense rows"], "soft_lines": ["all rows"], "add_to_lines": ["all rows"], "lane_step": ["all rows"],
    "add_to_lines lane_step": ["all rows"],
    "references": ["rounds", "pd-sparse", "group lasso"],
}  # fmt: skip
LANES = 16


def prefetch(array: Any, index: Any) -> None:
    """Nothing."""


def popcount(word: Any) -> Any:
    """Bit by bit."""
    n = 0
    while word:
        word &= word - np.uint64(1)
        n += 1
    return n


def above(array: Any, at: Any, bounds: Any) -> Any:
    """Lane by lane."""
    word = np.uint64(0)
    for b in range(32):
        word |= np.uint64(array[at + b] > bounds[at + b]) << np.uint64(b)
    return word


def at_most(array: Any, at: Any, limit: Any) -> Any:
    """Lane by lane."""
    word = np.uint64(0)
    for b in range(64):
        word |= np.uint64(array[at + b] <= limit) << np.uint64(b)
    return word


def total(array: Any) -> Any:
    """One sum, whose rounding differs."""
    s = np.float32(0)
    for j in range(len(array)):
        s += array[j]
    return s


def product(a: Any, at_a: Any, b: Any, at_b: Any, n: Any) -> Any:
    """One sum, whose rounding differs."""
    s = np.float32(0)
    for j in range(n):
        s += a[at_a + j] * b[at_b + j]
    return s


def soft_product(row: Any, at: Any, v: Any, n: Any, lam: Any) -> Any:
    """One sum, whose rounding differs."""
    s = 0.0
    for j in range(n):
        s += row[at + j] * (v[j] - min(max(v[j], -lam), lam))
    return s


def soft_lines(indices: Any, values: Any, begin: Any, end: Any, v: Any, lam: Any, sums: Any) -> None:
    """One sum a lane, whose rounding differs."""
    sums[:] = 0
    for p in range(begin, end):
        first = LANES * np.int64(indices[p])
        for lane in range(LANES):
            x = v[first + lane]
            sums[lane] += values[p] * (x - min(max(x, -lam), lam))


def add_to_lines(indices: Any, values: Any, begin: Any, end: Any, steps: Any, v: Any) -> None:
    """Lane by lane."""
    for p in range(begin, end):
        first = LANES * np.int64(indices[p])
        for lane in range(LANES):
            v[first + lane] += values[p] * steps[lane]


def lane_step(
    i: Any, awake: Any, least: Any, square: Any, weight: Any, tau: Any, positive: Any, h2: Any, upper: Any, alpha: Any,
    sums: Any, met: Any,
) -> Any:  # fmt: skip
    """Lane by lane."""
    zero, one, half, bits = np.float32(0), np.float32(1), np.float32(0.5), 0
    for lane in range(LANES):
        side = LANES if (positive >> lane) & 1 else 0
        sign = one if side else -one
        own = h2[side + lane] / weight
        before = alpha[LANES * i + lane]
        g = sign * (sums[lane] / tau) - one + before * own
        curvature = square / tau + own
        after = min(max(before - g / curvature, zero), upper[side + lane] * weight)
        if not (awake >> lane) & 1 or abs(g) <= least:
            after = before
        step = after - before
        if step != zero:
            bits |= 1 << lane
            met[lane] = max(met[lane], abs(g))
        met[LANES + lane] -= step * (g + half * (curvature * step))
        alpha[LANES * i + lane] = after
        sums[lane] = step * sign
    return np.uint16(bits)


def fit(name: str, plain: str, folder: Path) -> None:
    """Print the processor seconds of a fit, in this process. plain: the instructions that loops stand for, "" for none."""
    from xmc_stream.kernels import instructions, intrinsics
    from xmc_stream.kernels.jit import kernel

    if plain == "references":
        intrinsics.UNCOUNTED = {}
    else:
        for one in plain.split():
            setattr(instructions, one, kernel(globals()[one]))  # before any kernel takes it from there
    import xmc_stream as xs

    of, method, options = FITS[name]
    data = folder / f"{of}.xmc"
    if not data.exists():
        xs.convert(Path(os.environ["XMC_STREAM_DATA"], of, "train.txt.gz"), data, memory_limit="4GB")
    taken = []
    with tempfile.TemporaryDirectory() as out:
        for _ in range(TIMES + 1):
            estimator = getattr(xs, method)(**options, memory_limit="6GB", threads=1, seed=0)
            began = time.process_time()
            estimator.fit(xs.open_dataset(data), model=Path(out, "m"), overwrite=True)
            taken.append(time.process_time() - began)
    print(min(taken[1:]))  # the first one loads kernels


def seconds(name: str, plain: str, folder: Path) -> float:
    """Of a fit in a process of its own."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder / f"kernels {plain}")}
    command = [sys.executable, "-W", "ignore", __file__, str(folder), "--fit", name, "--plain", plain]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("names", nargs=-1)
@click.option("--fit", "fits", default="", hidden=True)
@click.option("--plain", default="", hidden=True)
def main(folder: Path, names: tuple[str, ...], fits: str, plain: str) -> None:
    """Print what instructions are worth: those with these NAMES, or all."""
    folder.mkdir(parents=True, exist_ok=True)
    if fits:
        fit(fits, plain, folder)
        return
    known: dict[str, float] = {}
    print(f"{'instruction':22} {'training':12} {'with it':>8} {'plain':>8} {'plain / with':>13}")
    for name in names or OF:
        for of in OF[name]:
            if of not in known:
                known[of] = seconds(of, "", folder)
            other = seconds(of, name, folder)
            print(f"{name:22} {of:12} {known[of]:8.2f} {other:8.2f} {other / known[of]:13.2f}", flush=True)


if __name__ == "__main__":
    main()
