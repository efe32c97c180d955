"""More threads of this process: processor seconds, seconds and bytes read of every method, and of the other commands.

    XMC_STREAM_DATA=... python benchmarks/threads.py [NAME ...] [--set bibtex] [--threads 1 --threads 16] [--phases]

NAME: of what is measured, as it stands in the table, or the beginning of it; none: all. Each is run with every number of
threads, one after another in this process, after one run on a few rows that loads kernels. Ratios are to the first number of
threads. On a machine with fewer processors than threads, processor seconds and bytes are what counts. --phases: also of each
phase of a training its jobs, their seconds and bytes, and the share of time that threads wait in it: for a job to be there, or
for the last one to end. The line "all" has the time between phases too.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from commands import converted

import xmc_stream as xs
from xmc_stream.methods import registry
from xmc_stream.methods.contract import Task
from xmc_stream.models import Execution
from xmc_stream.runtime.warmup import a_few_rows
from xmc_stream.training.train import train

LIMIT = "4GB"
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "leml": [
        {"rank": 100, "alternations": 2},
        {"rank": 20, "alternations": 1, "loss": "logistic"},
        {"rank": 20, "alternations": 1, "loss": "squared_hinge"},
    ],
    "cplst": [{"rank": 50}],
    "group-lasso": [
        {"loss": loss, "algorithm": algorithm, "max_passes": 10}
        for loss in ("multitask", "label-ranking")
        for algorithm in ("bcd-ls", "bcd-cst", "fista", "sparsa", "fobos")
    ],
}
PREDICTING: dict[str, dict[str, Any]] = {
    "ppdsparse": {}, "leml": {"alternations": 2}, "group-lasso": {"loss": "multitask", "max_passes": 5},
}  # fmt: skip

Told = dict[str, Any]
Run = Callable[[int], Told]


class Runs:
    """What is measured, of a set: its name in the table, and a run with some threads, which returns what it says."""

    def __init__(self, name: str, folder: Path) -> None:
        self._data, self._test = converted(folder, name)
        self._source = Path(os.environ["XMC_STREAM_DATA"]) / name / "train.txt.gz"
        self._folder = folder

    def all(self) -> dict[str, Run]:
        """By name."""
        runs: dict[str, Run] = {}
        for name in registry.names():
            for values in OPTIONS.get(name, [{}]):
                words = " ".join([name, *(f"{key}={value}" for key, value in values.items())])
                runs[words] = partial(self.train, name=name, values=values)
        for name in PREDICTING:
            runs[f"predict {name}"] = partial(self.predict, name=name)
            runs[f"evaluate {name}"] = partial(self.evaluate, name=name)
        return {**runs, "convert": self.convert}

    def train(self, threads: int, name: str, values: dict[str, Any]) -> Told:
        """The report, and where the events are."""
        parameters = registry.parameters(name, values)
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            with a_few_rows() as rows:  # kernels are loaded, which is not measured
                train(Task(rows, parameters, 0), Path(folder) / "few", Execution(LIMIT, 1))
            began, cpu = time.perf_counter(), time.process_time()
            model, report = train(
                Task(xs.open_dataset(self._data), parameters, 0), Path(folder) / "m", Execution(LIMIT, threads)
            )
            taken = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - began}
            events = [json.loads(line) for line in (model.path / "events.jsonl").read_text().splitlines()]
            return {**report, **taken, "digest": model.digest(), "events": events}

    def _model(self, name: str) -> Path:
        path = self._folder / f"{name}-of-{self._data.stem}"
        if not path.exists():
            parameters = registry.parameters(name, PREDICTING[name])
            train(Task(xs.open_dataset(self._data), parameters, 0), path, Execution(LIMIT, 2))
        return path

    def predict(self, threads: int, name: str) -> Told:
        """Predict the test set."""
        model = self._model(name)
        with tempfile.TemporaryDirectory(dir=self._folder) as to:
            xs.predict(model, self._test, Path(to) / "few", memory_limit=LIMIT, threads=1)
            return measured(lambda: xs.predict(model, self._test, Path(to) / "p", memory_limit=LIMIT, threads=threads))

    def evaluate(self, threads: int, name: str) -> Told:
        """Evaluate on the test set."""
        model = self._model(name)
        xs.evaluate(model, self._test, memory_limit=LIMIT, threads=1)
        return measured(lambda: xs.evaluate(model, self._test, memory_limit=LIMIT, threads=threads))

    def convert(self, threads: int) -> Told:
        """Convert the training set's text."""
        with tempfile.TemporaryDirectory(dir=self._folder) as to:
            xs.convert(self._source, Path(to) / "few.xmc", memory_limit=LIMIT, threads=1)
            return measured(lambda: xs.convert(self._source, Path(to) / "d.xmc", memory_limit=LIMIT, threads=threads))


def measured(run: Callable[[], Any]) -> Told:
    """Processor seconds, seconds, and what a run says."""
    began, cpu = time.perf_counter(), time.process_time()
    said = run()
    taken = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - began}
    return {**said, **taken} if isinstance(said, dict) else taken


def ratios(told: list[Told], name: str) -> str:
    """Of each run to the first; "-" where it is not known."""
    first = told[0].get(name)
    return " ".join(f"{one[name] / first:.2f}" for one in told) if first else "-"


def show(words: str, told: list[Told]) -> None:
    """A line of the table."""
    differ = "" if len({one.get("digest") for one in told}) == 1 else "; MODELS DIFFER"
    print(
        f"| {words} | {told[0]['cpu']:.2f} | {ratios(told, 'cpu')} | {ratios(told, 'wall')} | {ratios(told, 'bytes_read')} |"
        + differ,
        flush=True,
    )


def show_phases(events: list[dict[str, Any]], threads: int) -> None:
    """Each phase of a training: its jobs, their seconds, the bytes that they read, and the share of time that threads wait."""
    found: dict[str, list[float]] = {}  # jobs, their seconds, bytes, from when to when
    for event in events:
        if event["event"] in ("phase", "job"):
            of = found.setdefault(event["phase"], [0, 0.0, 0, event["time"], event["time"]])
            if event["event"] == "job":
                of[:3] = of[0] + 1, of[1] + event["seconds"], of[2] + event["bytes_read"]
            of[4] = event["time"]
    lines = list(zip(*found.values(), strict=True))
    found["all"] = [*map(sum, lines[:3]), min(lines[3]), max(lines[4])]
    for name, (jobs, seconds, n_bytes, begin, end) in found.items():
        waiting = 1.0 - min(1.0, seconds / (threads * max(end - begin, 1e-3)))
        print(f"    {name:40} {jobs:5} jobs {seconds:8.2f} s {n_bytes / 1e6:10.1f} MB, threads wait {waiting:4.0%}")


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--threads", action="append", type=int, default=[])
    parser.add_argument("--phases", action="store_true")
    asked = parser.parse_args()
    counts = asked.threads or [1, 2, 4, 16]
    with tempfile.TemporaryDirectory() as folder:
        for name in asked.set or ["bibtex"]:
            print(f"{name}, threads {', '.join(map(str, counts))}\n\n| | processor s | ratio | seconds | bytes read |")
            for words, run in Runs(name, Path(folder)).all().items():
                if asked.names and not any(words.startswith(some) for some in asked.names):
                    continue
                told = [run(threads) for threads in counts]
                show(words, told)
                if asked.phases and "events" in told[0]:
                    for one, threads in zip(told, counts, strict=True):
                        print(f"    {threads} threads")
                        show_phases(one["events"], threads)


if __name__ == "__main__":
    main()
