"""This library beside others: the same l2-normalised sets, in turns, each fit and each prediction in its own process.

    pip install -e '.[peers]'
    XMC_STREAM_DATA=... python benchmarks/peers.py [SET ...] --repeats 3 --threads 1

SET is a folder of XMC_STREAM_DATA with train.txt.gz and test.txt.gz (XMLRepo text). Prints one table, whose notes say
what is measured; a program that is not installed is left out with a line, one that fails or takes too long has a row that
says so. Below the table stand differences of P@k between this library and the others, with paired standard errors. Every run
also adds a line to --log as soon as it is over, so that a benchmark that is killed leaves what it had; the processor time of a
row's prediction, which a loaded machine distorts less, stands only there.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import numpy as np
import scipy.sparse
from commands import machine, run
from peer_programs import PEERS, TOP, Peer, write_matrices

from xmc_stream.linear.predict import LinearWarmUp
from xmc_stream.metrics import RankingMetrics, among, inverse_propensity
from xmc_stream.ppdsparse.method import PPDSparseWarmUp
from xmc_stream.store.dataset import Dataset, open_dataset
from xmc_stream.store.encoding import folder_bytes
from xmc_stream.store.predictions import Predictions
from xmc_stream.tree.method import TreeWarmUp
from xmc_stream.tree.predict import TreesWarmUp

OURS = "xmc_stream"
SETS = ("bibtex", "20news_bydate", "rcv1_topics", "wordnet_hypernyms")
FIGURES = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5")
HEAD = ("set", "program", "fit s", "cpu s", "peak MB", "model MB", *FIGURES, "ms/row", "load", "package")
NOTES = """
fit s: of the others the call that fits, the data in memory, without saving (napkinXC saves as it fits; Omikuji's
includes reading its text file); of xmc_stream the whole `train` command by the clock, the interpreter's start and end
and all imports included: it reads the data from disk, checks them, and writes the model. cpu s: processor time of the
whole process that fits, of every program: interpreter, imports, reading, fit and saving. peak MB: VmHWM of the process
that fits, interpreter, packages and data included. model MB: as saved. P@k, PSP@1: by xmc_stream.metrics from each
program's best five labels of each test row. ms/row: the call that predicts the whole test set, model and data loaded
before, divided by its rows (Omikuji and scikit-learn as their Python interfaces allow); of xmc_stream a second
`predict_topk` in one process, which has the model in memory and reads the data from the page cache. Times and memory:
{take} of {repeats} runs; load: the highest at a start; accuracy: the median. napkinXC one-vs-rest is its BR, or
OVR where every row has one label."""


# of a model and a test set: predict twice, and say what the second time took
PREDICT = """
import sys, time, xmc_stream as xs
model, data = xs.load_model(sys.argv[1]), xs.open_dataset(sys.argv[2])
how = {"threads": int(sys.argv[4]), "memory_limit": sys.argv[5]}
for _ in range(2):
    began, before = time.perf_counter(), time.process_time()
    model.predict_topk(data, int(sys.argv[3]), **how)
print(time.perf_counter() - began, time.process_time() - before)
"""


class ProgramError(Exception):
    """A program that did not do it; the message goes into its row."""


@dataclass(frozen=True)
class Contest:
    """One set, converted, and how programs are run on it. matrices: what the others read."""

    name: str
    train: Path
    test: Path
    matrices: Path
    threads: int
    memory_limit: str
    timeout: float

    @property
    def execution(self) -> tuple[str, ...]:
        """Options of this library's commands."""
        return ("--threads", str(self.threads), "--memory-limit", self.memory_limit)


@dataclass(frozen=True)
class Program:
    """A row of the table. fit(contest, model) and predict(contest, model, out) return what they measured."""

    name: str
    version: str
    fit: Callable[[Contest, Path], dict[str, Any]]
    predict: Callable[[Contest, Path, Path], tuple[dict[str, Any], np.ndarray]]
    most_labels: int | None = None


def ours(name: str, options: Sequence[str]) -> Program:
    """This library with options of `train`."""

    def guarded(timeout: float, *arguments: Any) -> dict[str, Any]:
        try:
            return run(*arguments, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise ProgramError(f"over {timeout:g} s") from None
        except subprocess.CalledProcessError as error:
            raise ProgramError(f"exit code {error.returncode}") from None

    def fit(c: Contest, model: Path) -> dict[str, Any]:
        began = time.perf_counter()
        done = guarded(c.timeout, "train", c.train, model, *options, *c.execution)
        return {**done, "seconds": time.perf_counter() - began}

    def predict(c: Contest, model: Path, out: Path) -> tuple[dict[str, Any], np.ndarray]:
        test = open_dataset(c.test)
        k = min(TOP, test.n_labels)
        done = guarded(c.timeout, "predict", model, c.test, out, "-k", k, *c.execution)
        labels = np.full((test.n_samples, TOP), -1, np.int64)
        labels[:, :k] = Predictions(out).rows(0, test.n_samples)[0]
        words = [sys.executable, "-c", PREDICT, model, c.test, k, c.threads, c.memory_limit]
        again = subprocess.run([str(word) for word in words], stdout=subprocess.PIPE, text=True, check=True)
        seconds, processor = map(float, again.stdout.split())
        return {**done, "seconds": seconds, "processor": processor}, labels

    return Program(name, f"xmc-stream {version('xmc-stream')}", fit, predict)


def theirs(key: str, peer: Peer) -> Program:
    """One of the other programs."""

    def child(c: Contest, action: str, model: Path, out: Path) -> dict[str, Any]:
        script = Path(__file__).with_name("peer_programs.py")
        command = [sys.executable, *map(str, (script, action, key, c.matrices, model, out, c.threads))]
        try:
            done = subprocess.run(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
                timeout=c.timeout, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise ProgramError(f"over {c.timeout:g} s") from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [""])[-1]
            raise ProgramError(f"exit code {done.returncode} {last}".strip())
        figures: dict[str, Any] = json.loads(out.with_suffix(".json").read_text())
        return figures

    def fit(c: Contest, model: Path) -> dict[str, Any]:
        figures = child(c, "fit", model, model.with_name("fit"))
        return {**figures, "model_bytes": folder_bytes(model)}

    def predict(c: Contest, model: Path, out: Path) -> tuple[dict[str, Any], np.ndarray]:
        return child(c, "predict", model, out), np.load(out.with_suffix(".npy"))

    return Program(peer.name, peer.version or "", fit, predict, peer.most_labels)


def write_text(path: Path, X: scipy.sparse.csr_matrix, Y: scipy.sparse.csr_matrix) -> None:
    """XMLRepo text; nine digits give the float32 values back."""
    pairs = [f"{j}:{value:.9g}" for j, value in zip(X.indices.tolist(), X.data.tolist(), strict=True)]
    labels = [str(label) for label in Y.indices.tolist()]
    with open(path, "w", encoding="ascii") as file:
        file.write(f"{X.shape[0]} {X.shape[1]} {Y.shape[1]}\n")
        for i in range(X.shape[0]):
            of_row = (",".join(labels[Y.indptr[i] : Y.indptr[i + 1]]), *pairs[X.indptr[i] : X.indptr[i + 1]])
            file.write(" ".join(of_row) + "\n")


def prepare(source: Path, folder: Path, text: bool) -> tuple[Path, Path, Path]:
    """Convert a set; its matrices as files for the others, with text where a program reads nothing else."""
    train, test, matrices = folder / "train.xmc", folder / "test.xmc", folder / "matrices"
    run("convert", source / "train.txt.gz", train, "--normalize", "l2")
    run("convert", source / "test.txt.gz", test, "--like", train)
    X, Y = write_matrices(open_dataset(train), open_dataset(test), matrices)
    if text:
        write_text(matrices / "train.txt", X, Y)
    return train, test, matrices


def merit(labels: np.ndarray, train: Dataset, test: Dataset) -> dict[str, float]:
    """The figures of the best five labels, the same way for every program."""
    metrics = RankingMetrics((1, 3, 5), inverse_propensity(train.label_counts(), train.n_samples))
    truth = test.Y_rows().block(0, test.n_samples)
    metrics.update(labels, truth.indptr, truth.indices)
    return metrics.result()


def precisions(labels: np.ndarray, test: Dataset) -> np.ndarray:
    """P@1, P@3, P@5 of each row (n, 3), in per cent."""
    truth = test.Y_rows().block(0, test.n_samples)
    hits = among(np.arange(len(labels))[:, None], labels, truth.indptr, truth.indices)
    return np.stack([100.0 * hits[:, :k].mean(axis=1) for k in (1, 3, 5)], axis=1)


def differences(name: str, ours: str, own: np.ndarray, peer: str, other: np.ndarray) -> str:
    """How much higher our P@k is than another program's on the same rows, and the standard error of that mean."""
    of_rows = own - other
    errors = of_rows.std(axis=0, ddof=1) / np.sqrt(len(of_rows))
    cells = (
        f"P@{k} {mean:+.2f} +- {error:.2f}"
        for k, mean, error in zip((1, 3, 5), of_rows.mean(axis=0), errors, strict=True)
    )
    return f"{name}: {ours} - {peer}: {', '.join(cells)}"


def once(program: Program, contest: Contest, folder: Path, judged: dict[str, np.ndarray]) -> dict[str, Any]:
    """Fit, predict and judge once; a failure ends the record and stands in it. judged: gets `precisions`."""
    folder.mkdir()
    record: dict[str, Any] = {"load": os.getloadavg()[0]}
    try:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        fitted = program.fit(contest, folder / "model")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        record["cpu s"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        record |= {"fit s": fitted["seconds"], "peak MB": fitted["peak_rss"] / 1e6}
        record["model MB"] = fitted["model_bytes"] / 1e6
        predicted, labels = program.predict(contest, folder / "model", folder / "predictions")
        for column, measured in (("ms/row", "seconds"), ("cpu ms/row", "processor")):
            record[column] = 1000 * predicted[measured] / len(labels)
        test = open_dataset(contest.test)
        record |= merit(labels, open_dataset(contest.train), test)
        judged.setdefault(program.name, precisions(labels, test))
    except ProgramError as failure:
        record["failure"] = f"{'prediction' if 'fit s' in record else 'fit'}: {failure}"
    shutil.rmtree(folder)
    return record


def row(name: str, program: Program, records: Sequence[dict[str, Any]], take: str) -> str:
    """A program's line of the table."""
    middle: Callable[..., float] = statistics.median if take == "median" else min
    cells = {"set": name, "program": program.name, "package": program.version}
    for column, digits in (("fit s", 2), ("cpu s", 2), ("peak MB", 0), ("model MB", 1), ("ms/row", 4)):
        taken = [record[column] for record in records if column in record]
        cells[column] = f"{middle(taken):.{digits}f}" if taken else "-"
    for figure in FIGURES:  # some programs draw otherwise in each run
        taken = [record[figure] for record in records if figure in record]
        cells[figure] = f"{statistics.median(taken):.2f}" if taken else "-"
    cells["load"] = f"{max(record['load'] for record in records):.1f}"
    failures = [record["failure"] for record in records if "failure" in record]
    return table_line([cells[column] for column in HEAD]) + (f" {failures[0]}" if failures else "")


def table_line(cells: Sequence[str]) -> str:
    widths = (20, 26, 8, 8, 8, 8, 6, 6, 6, 6, 6, 6, 8, 5, 20)
    aligned = (
        f"{cell:{'<' if i in (0, 1, 14) else '>'}{width}}"
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return f"| {' | '.join(aligned)} |"


@click.command()
@click.argument("names", nargs=-1)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Runs of each program, in turns.")
@click.option(
    "--take", type=click.Choice(["median", "best"]), default="median", show_default=True, help="Of the repeats."
)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Of every program.")
@click.option("--timeout", type=float, default=600, show_default=True, help="Seconds a fit or a prediction may take.")
@click.option("--ours", "more", multiple=True, metavar="'NAME: OPTIONS'", help="One more row, of `train` with OPTIONS.")
@click.option(
    "--solver", "solvers", multiple=True, default=("ppdsparse", "tree"), show_default=True, help="Of this library."
)
@click.option("--only", multiple=True, type=click.Choice(list(PEERS)), help="Not all the others but this one.")
@click.option("--memory-limit", default="1GB", show_default=True, help="For xmc_stream.")
@click.option("--log", type=click.Path(path_type=Path), default=Path("peers.jsonl"), show_default=True)
def main(
    names: tuple[str, ...], repeats: int, take: str, threads: int, timeout: float, more: tuple[str, ...],
    solvers: tuple[str, ...], only: tuple[str, ...], memory_limit: str, log: Path,
) -> None:  # fmt: skip
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(threads)
    print(f"{machine()}; {threads} threads each; {take} of {repeats} runs; xmc_stream in {memory_limit}")
    programs = [ours(f"{OURS} {solver}", ("--solver", solver)) for solver in solvers]
    for extra in more:
        name, colon, options = extra.partition(":")
        if not colon:
            raise click.UsageError(
                f"--ours {extra!r}: write it as 'NAME: OPTIONS', for instance 'lam 0.1: --set lam=0.1'"
            )
        programs.append(ours(f"{OURS} {name}", shlex.split(options)))
    for key, peer in PEERS.items():
        if only and key not in only:
            continue
        if peer.version is None:
            print(f"{peer.name}: skipped, {peer.package} is not installed (pip install 'xmc-stream[peers]')")
        else:
            programs.append(theirs(key, peer))
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # modules are compiled once, as those of an installation are
    for large, guided, dense in itertools.product((False, True), repeat=3):  # no measured run compiles
        PPDSparseWarmUp(large=large, guided=guided, dense=dense, fours=dense).run()
        LinearWarmUp(False, guided=guided, fours=dense).run()
    TreeWarmUp().run()
    TreesWarmUp().run()
    print(table_line(HEAD), "|" + "---|" * len(HEAD), sep="\n", flush=True)
    below: list[str] = []
    for name in names or SETS:
        with tempfile.TemporaryDirectory() as work:
            folder = Path(work)
            text = any(peer.text for peer in PEERS.values() if peer.name in {program.name for program in programs})
            paths = prepare(Path(os.environ["XMC_STREAM_DATA"]) / name, folder, text)
            contest = Contest(name, *paths, threads, memory_limit, timeout)
            n_labels = open_dataset(paths[0]).n_labels
            records: dict[str, list[dict[str, Any]]] = {program.name: [] for program in programs}
            judged: dict[str, np.ndarray] = {}
            for repeat in range(repeats):
                for program in programs:
                    before = records[program.name]
                    if before and "failure" in before[-1]:
                        continue
                    if program.most_labels is not None and n_labels > program.most_labels:
                        reason = f"skipped: {n_labels:,} labels, run up to {program.most_labels:,}"
                        before.append({"load": os.getloadavg()[0], "failure": reason})
                        continue
                    before.append(once(program, contest, folder / "run", judged))
                    head = {"set": name, "program": program.name, "package": program.version}
                    with open(log, "a", encoding="utf-8") as lines:
                        lines.write(json.dumps({**head, "threads": threads, "repeat": repeat, **before[-1]}) + "\n")
            for program in programs:
                print(row(name, program, records[program.name], take), flush=True)
            own = [name_of for name_of in judged if name_of.startswith(OURS)]
            below += [
                differences(name, one, judged[one], peer, judged[peer])
                for one, peer in itertools.product(own, judged)
                if peer not in own
            ]
    if below:
        print("\nDifferences of P@k and their paired standard errors, of each program's first run:", *below, sep="\n")
    print(NOTES.format(repeats=repeats, take=take))


if __name__ == "__main__":
    main()
