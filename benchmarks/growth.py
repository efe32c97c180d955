"""How training time, prediction time and model size grow with the labels K and the rows N, on synthetic data.

    python benchmarks/growth.py FOLDER [--solver ppdsparse|tree] [--rows N] [--labels K] [--pecos K] [--quick]

FOLDER is for scratch; growth.jsonl in it keeps every point. K varies with the rows fixed, and N, in fourfold steps, with
the labels fixed; the rows of a smaller set begin the larger one. A solver with its defaults on one thread, in one process
that has loaded its kernels. Data for the tree have a tree in them (`make_synthetic.py --tree`), which needs a row for each
label. Exponents are slopes of least squares through the logarithms: seconds of the processor ~ K^e.

prediction: the whole call, which opens the model; again: a second `predict_topk`, which has it in memory (12 GB).
--pecos: PECOS XR-Linear on the same rows, if it is installed (in this interpreter, or that of --peers): its fit and its
prediction without reading or saving. --quick: smaller sets, a minute or two, to see that it runs.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from commands import machine
from peer_programs import write_matrices

import xmc_stream as xs
from xmc_stream.metrics import RankingMetrics, inverse_propensity

HERE = Path(__file__).resolve().parent
GENERATOR, PEERS = HERE.parent / "tools" / "make_synthetic.py", HERE / "peer_programs.py"
SEED = 0
HELD = "12GB"  # limit of the prediction that has the model in memory
HEAD = "| varied | program | rows | labels | training, CPU s | prediction, CPU ms a row | again | model MB | weights | P@1 |"


@dataclass(frozen=True)
class Sizes:
    """labels, rows: those that are varied; at_rows, at_labels: what is fixed meanwhile; rows to predict; more of the data."""

    labels: tuple[int, ...]
    rows: tuple[int, ...]
    at_rows: int
    at_labels: int
    features: int
    predicted: int
    of_row: tuple[int, int] = (40, 3)  # features and labels
    depth: int = 0  # of the tree in the data
    limit: str = "2GB"


FULL = {
    "ppdsparse": Sizes((1_000, 4_000, 16_000, 64_000), (8_000, 32_000, 128_000, 512_000), 16_000, 2_000, 20_000, 8_000),
    "tree": Sizes(
        (4_000, 16_000, 64_000, 256_000, 1_000_000), (62_500, 250_000, 1_000_000), 1_000_000, 16_000, 200_000, 50_000,
        (40, 5), 3, "4GB",
    ),
}  # fmt: skip
QUICK = {
    "ppdsparse": Sizes((250, 1_000, 4_000), (1_000, 4_000, 16_000), 2_000, 500, 2_000, 2_000),
    "tree": Sizes((500, 2_000, 8_000), (2_000, 8_000, 32_000), 8_000, 1_000, 20_000, 2_000, (40, 5), 3, "1GB"),
}


@dataclass(frozen=True)
class Point:
    """One training: seconds of the processor, milliseconds of it a predicted row, megabytes on disk, weights, P@1.

    phases: seconds of jobs by the clock.
    """

    program: str
    n_rows: int
    n_labels: int
    seconds: float
    ms: float | None
    again: float
    megabytes: float
    weights: int | None
    precision: float
    phases: dict[str, float]


def pecos(
    peers: str, train_path: Path, test_path: Path, work: Path, threads: int
) -> tuple[dict[str, dict[str, float]], float, float]:
    """Fit and predict by PECOS, in a folder: seconds and processor seconds of each, megabytes of the model, P@1."""
    train, test = xs.open_dataset(train_path), xs.open_dataset(test_path)
    shutil.rmtree(work, ignore_errors=True)
    write_matrices(train, test, work / "matrices")
    figures = {}
    for action in ("fit", "predict"):
        out = work / action
        command = [peers, PEERS, action, "pecos", work / "matrices", work / "model", out, threads]
        subprocess.run([*map(str, command)], check=True, stdout=subprocess.DEVNULL)  # what fails says why
        figures[action] = json.loads(out.with_suffix(".json").read_text())
    metrics = RankingMetrics((1,), inverse_propensity(train.label_counts(), train.n_samples))
    truth = test.Y_rows().block(0, test.n_samples)
    metrics.update(np.load(work / "predict.npy"), truth.indptr, truth.indices)
    megabytes = n_bytes(work / "model") / 1e6
    shutil.rmtree(work)
    return figures, megabytes, metrics.result()["P@1"]


@dataclass(frozen=True)
class Bench:
    """A solver and its sizes. peers: the interpreter that has PECOS."""

    folder: Path
    solver: str
    sizes: Sizes
    peers: str
    found: dict[tuple[int, int, bool], Point] = field(default_factory=dict)

    def data(self, n_rows: int, n_labels: int) -> tuple[Path, Path]:
        """Make the rows to train and to test by, if they are not there."""
        s, (features, labels) = self.sizes, self.sizes.of_row
        train = self.folder / f"{self.solver}-{n_rows}x{n_labels}.xmc"
        test = train.with_name(f"{train.stem}-test.xmc")
        if not test.exists():
            shape = ["--samples", n_rows, "--features", s.features, "--labels", n_labels, "--test-samples", s.predicted]
            shape += ["--features-per-sample", features, "--labels-per-sample", labels]
            shape += ["--tree", s.depth] if s.depth else []
            command = [sys.executable, GENERATOR, train, *shape, "--seed", SEED, "--overwrite"]
            subprocess.run([*map(str, command)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return train, test

    def ours(self, n_rows: int, n_labels: int) -> Point:
        """Train, predict the test rows, and once more."""
        train, test_path = self.data(n_rows, n_labels)
        test = xs.open_dataset(test_path)
        model_path, out = self.folder / f"{train.stem}.model", self.folder / f"{train.stem}.predictions"
        how: dict[str, Any] = {"memory_limit": self.sizes.limit, "threads": 1}
        kind = xs.LabelTree if self.solver == "tree" else xs.PPDSparse
        learner = kind(**how, seed=SEED, progress=False)
        times = [time.process_time()]
        model = learner.fit(xs.open_dataset(train), model=model_path, overwrite=True).model_
        times.append(time.process_time())
        xs.predict(model, test, out, k=5, overwrite=True, **how)
        times.append(time.process_time())
        for _ in range(2):
            model.predict_topk(test, 5, memory_limit=HELD, threads=1)
            times.append(time.process_time())
        seconds, *rest = np.diff(times).tolist()
        ms, _, again = (1000 * second / self.sizes.predicted for second in rest)
        precision = xs.evaluate(out, test, ks=(1,))["P@1"]
        figures = seconds, ms, again, n_bytes(model_path) / 1e6, model.nnz, precision
        point = Point(f"xmc_stream {self.solver}", n_rows, n_labels, *figures, phases_of(model_path))
        shutil.rmtree(model_path)
        return point

    def pecos(self, n_rows: int, n_labels: int) -> Point:
        """The same of PECOS."""
        figures, megabytes, precision = pecos(self.peers, *self.data(n_rows, n_labels), self.folder / "pecos", 1)
        again = 1000 * figures["predict"]["processor"] / self.sizes.predicted
        return Point(
            "PECOS", n_rows, n_labels, figures["fit"]["processor"], None, again, megabytes, None, precision, {}
        )

    def point(self, varied: str, n_rows: int, n_labels: int, pecos: bool = False) -> Point:
        """Measure what was not yet, keep it, print a row of the table."""
        key = n_rows, n_labels, pecos
        if key not in self.found:
            self.found[key] = (self.pecos if pecos else self.ours)(n_rows, n_labels)
            with open(self.folder / "growth.jsonl", "a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(self.found[key])) + "\n")
        p = self.found[key]
        figures, digits = (
            (p.seconds, p.ms, p.again, p.megabytes, p.weights, p.precision),
            (".1f", ".4f", ".4f", ".2f", ",", ".1f"),
        )
        cells = ["-" if value is None else f"{value:{digit}}" for value, digit in zip(figures, digits, strict=True)]
        print(f"| {' | '.join([varied, p.program, f'{n_rows:,}', f'{n_labels:,}', *cells])} |", flush=True)
        return p


def n_bytes(folder: Path) -> int:
    """Of the files of a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def phases_of(model: Path) -> dict[str, float]:
    """Seconds of the jobs of each phase, and of each level of a tree."""
    seconds: dict[str, float] = defaultdict(float)
    for line in (model / "events.jsonl").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["event"] == "job":
            kind, *parts = event["job"].split("/")
            level = parts[1] if kind in ("solve", "beam") and len(parts) > 2 else ""
            seconds[f"{event['phase']} {level}".strip()] += event["seconds"]
    return {name: round(value, 2) for name, value in seconds.items()}


def exponents(varied: str, sizes: list[int], points: list[Point]) -> None:
    """A row of slopes in what is varied: of seconds, both milliseconds a row and megabytes; and phases, aside."""
    values = np.array([(p.seconds, p.ms or np.nan, p.again, p.megabytes) for p in points])
    slopes = np.polyfit(np.log(sizes), np.log(values), 1)[0] if len(sizes) > 1 else [np.nan] * 4
    cells = ["-" if np.isnan(slope) else f"{slope:.2f}" for slope in slopes]
    print(f"| exponent in {varied} | {points[0].program} | | | {' | '.join(cells)} | | |", flush=True)
    for size, p in zip(sizes, points, strict=True):
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in p.phases.items())
        if phases:
            print(f"  {varied} {size:,}: {phases}", file=sys.stderr)


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--solver", type=click.Choice(list(FULL)), default="ppdsparse", show_default=True)
@click.option("--rows", type=int, help="That K is varied at, and N up to: fewer than usual.")
@click.option("--labels", type=int, multiple=True, help="Only these K, no more rows.")
@click.option("--pecos", type=int, multiple=True, metavar="K", help="PECOS at so many labels.")
@click.option("--peers", default=sys.executable, help="The interpreter that has PECOS, if another one.")
@click.option("--quick", is_flag=True, help="Smaller sets.")
def main(
    folder: Path, solver: str, rows: int | None, labels: tuple[int, ...], pecos: tuple[int, ...], peers: str, quick: bool
) -> None:  # fmt: skip
    sizes = (QUICK if quick else FULL)[solver]
    if rows is not None:
        share = rows / sizes.at_rows
        sizes = replace(sizes, at_rows=rows, rows=tuple(int(n * share) for n in sizes.rows))
    if sizes.depth:  # a row for each label
        sizes = replace(sizes, labels=tuple(n for n in sizes.labels if n <= sizes.at_rows))
    folder.mkdir(parents=True, exist_ok=True)
    print(machine())
    small = QUICK[solver]
    warm = Bench(folder / "warm", solver, small, peers)
    warm.folder.mkdir(exist_ok=True)
    for at in (0, -1):
        warm.ours(small.rows[at], small.labels[at])  # loads the kernels, those of groups of labels too
    bench = Bench(folder, solver, sizes, peers)
    print(HEAD, "|" + "---|" * 10, sep="\n")
    of_k = list(labels or sizes.labels)
    exponents("K", of_k, [bench.point("K", sizes.at_rows, n) for n in of_k])
    if not labels:
        exponents("N", list(sizes.rows), [bench.point("N", n, sizes.at_labels) for n in sizes.rows])
    if pecos:
        if subprocess.run([peers, "-c", "import pecos"], stderr=subprocess.DEVNULL, check=False).returncode:
            sys.exit(f"PECOS is not installed in {peers}: pip install 'xmc-stream[peers]' there")
        exponents("K", list(pecos), [bench.point("K", sizes.at_rows, n, pecos=True) for n in pecos])


if __name__ == "__main__":
    main()
