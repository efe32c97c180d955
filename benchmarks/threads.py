"""More threads of this process: processor seconds, seconds and bytes read of every method, and of the other commands.

    XMC_STREAM_DATA=... python benchmarks/threads.py [NAME ...] [--set bibtex] [--threads 1 --threads 16] [--phases]

NAME: of what is measured, as it stands in the table, or the beginning of it; none: all. Each is run with every number of
threads, one after another in this process, which has done it once before on a few rows: kernels are loaded. Seconds and
bytes are beside those of the first number of threads, "1.00 1.12 ...": on a machine with fewer processors than threads,
processor seconds and bytes are what counts. --phases also prints seconds and bytes of the jobs of each phase of a training.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from commands import converted

import xmc_stream as xs
from xmc_stream.jobs.warm import a_few_rows
from xmc_stream.methods import registry
from xmc_stream.models import Execution
from xmc_stream.training import train

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "leml": [
        {"rank": 50, "alternations": 3},
        {"rank": 20, "alternations": 1, "loss": "logistic"},
        {"rank": 20, "alternations": 1, "loss": "squared_hinge"},
    ],
    "cplst": [{"rank": 50}],
    "group-lasso": [
        {"loss": loss, "algorithm": algorithm, "max_passes": 10}
        for loss in ("multitask", "label-ranking")
        for algorithm in ("bcd-ls", "bcd-cst", "fista", "sparsa", "fobos")
    ],
}  # fmt: skip
LIMIT = "4GB"


def trainings(data: Path, folder: Path) -> dict[str, Callable[[int], dict[str, Any]]]:
    """A training of every method that the registry knows, by what stands in the table."""

    def one(name: str, values: dict[str, Any]) -> Callable[[int], dict[str, Any]]:
        parameters = registry.parameters(name, values)

        def run(threads: int, data: Any = data) -> dict[str, Any]:
            dataset = data if isinstance(data, xs.Dataset) else xs.open_dataset(data)
            model = folder / f"{name}-{threads}"
            found, report = train(dataset, model, parameters, 0, Execution(LIMIT, threads), overwrite=True)
            return {**report, "digest": found.digest(), "events": model / "events.jsonl"}

        return run

    return {
        " ".join([name, *(f"{key}={value}" for key, value in values.items())]): one(name, values)
        for name in registry.names()
        for values in OPTIONS.get(name, [{}])
    }


def phases(events: Path) -> list[tuple[str, int, float, int]]:
    """Of a training: each phase, its jobs, their seconds and the bytes that they read."""
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0])
    for line in events.read_text().splitlines():
        event = json.loads(line)
        if "job" in event:
            of = found[event["phase"]]
            of[0], of[1], of[2] = of[0] + 1, of[1] + event["seconds"], of[2] + event.get("bytes_read", 0)
    return [(name, int(n), seconds, int(read)) for name, (n, seconds, read) in found.items()]


def measured(run: Callable[[int], dict[str, Any]], threads: int) -> tuple[float, float, dict[str, Any]]:
    """Processor seconds, seconds, and what it says."""
    processor, began = time.process_time(), time.perf_counter()
    report = run(threads)
    return time.process_time() - processor, time.perf_counter() - began, report


def others(train_set: Path, test: Path, source: Path, folder: Path) -> dict[str, Callable[[int], dict[str, Any]]]:
    """Predictions and evaluations by a model of each kind, conversion."""
    found: dict[str, Callable[[int], dict[str, Any]]] = {}

    def model(name: str, **values: Any) -> Path:
        path = folder / f"of-{name}-{train_set.stem}"
        if not path.exists():
            train(xs.open_dataset(train_set), path, registry.parameters(name, values), 0, Execution(LIMIT, 2))
        return path

    def predict(name: str, values: dict[str, Any]) -> Callable[[int], dict[str, Any]]:
        def run(threads: int) -> dict[str, Any]:
            with tempfile.TemporaryDirectory(dir=folder) as to:
                xs.predict(model(name, **values), test, Path(to) / "p", memory_limit=LIMIT, threads=threads)
            return {}

        return run

    def evaluate(name: str, values: dict[str, Any]) -> Callable[[int], dict[str, Any]]:
        return lambda threads: xs.evaluate(model(name, **values), test, memory_limit=LIMIT, threads=threads)

    for name, values in (("ppdsparse", {}), ("leml", {"alternations": 2}), ("group-lasso", {"max_passes": 5})):
        values = {**values, **({"loss": "multitask"} if name == "group-lasso" else {})}
        found[f"predict {name}"], found[f"evaluate {name}"] = predict(name, values), evaluate(name, values)

    def convert(threads: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(dir=folder) as to:
            xs.convert(source, Path(to) / "d.xmc", memory_limit=LIMIT, threads=threads)
        return {}

    found["convert"] = convert
    return found


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--threads", action="append", type=int, default=[])
    parser.add_argument("--phases", action="store_true")
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    counts = asked.threads or [1, 2, 4, 16]
    import os

    with tempfile.TemporaryDirectory() as made:
        folder = asked.folder or Path(made)
        for name in asked.set or ["bibtex"]:
            data, test = converted(folder, name)
            source = Path(os.environ["XMC_STREAM_DATA"]) / name / "train.txt.gz"
            runs = {**trainings(data, folder), **others(data, test, source, folder)}
            print(f"{name}: threads {' '.join(map(str, counts))}", flush=True)
            for words, run in runs.items():
                if asked.names and not any(words.startswith(n) for n in asked.names):
                    continue
                try:
                    one(words, run, counts, asked.phases)
                except xs.errors.XmcStreamError as error:
                    print(f"{words}: {error}", flush=True)


def one(words: str, run: Callable[..., dict[str, Any]], counts: list[int], show: bool) -> None:
    try:
        with a_few_rows() as few:
            run(1, few)
    except TypeError:
        run(1)
    found = [measured(run, threads) for threads in counts]
    cpu, wall = [f[0] for f in found], [f[1] for f in found]
    read = [f[2].get("bytes_read") for f in found]
    digests = {f[2].get("digest") for f in found}
    print(
        f"{words:55} cpu {cpu[0]:7.2f} s: {' '.join(f'{c / cpu[0]:.2f}' for c in cpu)}  wall {wall[0]:6.2f} s: "
        f"{' '.join(f'{w / wall[0]:.2f}' for w in wall)}  read {read} passes {[f[2].get('passes') for f in found]}"
        f"{'' if len(digests) == 1 else ' DIGESTS DIFFER'}",
        flush=True,
    )
    if show and "events" in found[0][2]:
        for threads, (_, _, report) in zip(counts, found, strict=True):
            for name, n, seconds, bytes_read in phases(report["events"]):
                print(f"    {threads:3} threads {name:40} {n:5} jobs {seconds:8.2f} s {bytes_read / 1e6:10.1f} MB")


if __name__ == "__main__":
    main()
