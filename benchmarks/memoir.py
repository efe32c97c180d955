"""MEMOIR: its oracles beside each other, steps as classes grow, linear SVMs, batch sizes, and sparsity.

    XMC_STREAM_DATA=... python benchmarks/memoir.py oracles FOLDER
    XMC_STREAM_DATA=... python benchmarks/memoir.py defaults FOLDER
    XMC_STREAM_DATA=... python benchmarks/memoir.py svm FOLDER
    XMC_STREAM_DATA=... python benchmarks/memoir.py batch FOLDER
    XMC_STREAM_DATA=... python benchmarks/memoir.py lam FOLDER
    python benchmarks/memoir.py growth FOLDER

XMC_STREAM_DATA has a folder for each set, with train.txt.gz and test.txt.gz in XMLRepo text. Rows are l2-normalised. Of
wordnet_hypernyms each row keeps its deepest label: the one that the fewest training rows have. Classes that no training row
keeps are left out, and their test rows. FOLDER keeps converted sets and pictures. Seconds are those of the processor, of
one thread, unless a table says otherwise. `batch` and `lam` take the extra `plot`.
"""

from __future__ import annotations

import os

os.environ.update(
    dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
)  # before numpy loads

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import scipy.sparse as sp
from commands import machine, run
from group_lasso import pictures
from group_lasso import print_head as head
from group_lasso import print_row as row
from mips import clustered_dense, rarest
from pdsparse import in_memory

import xmc_stream as xs
from xmc_stream.factors.factors import Panels
from xmc_stream.memoir.draws import Copies, Steps
from xmc_stream.memoir.learners import Learner, learner_of
from xmc_stream.memoir.parameters import MEMOIRParameters
from xmc_stream.memoir.plan import StepsPlan
from xmc_stream.memoir.solver import macro_f1, take_step
from xmc_stream.store.dataset import Dataset

GENERATOR = Path(__file__).resolve().parent.parent / "tools" / "make_synthetic.py"
SETS = "letter,20news_bydate,udhr_langid,wordnet_hypernyms"
DEEPEST = ("wordnet_hypernyms",)  # sets with several labels a row
LIMIT = "3GB"
AUTHORS = {
    "variant": "l2",
    "sampling": "class",
    "lam": 1.0,
    "eta0": 0.1,
    "cosine": True,
    "bias": True,
}  # of the authors' runs, with draws and steps by `authors`


class Done(NamedTuple):
    """A training and its test: processor seconds of both, accuracy and macro-F1 in per cent, the report."""

    trained: float
    predicted: float
    accuracy: float
    f1: float
    report: dict[str, Any]


def about(**options: Any) -> None:
    """Machine, command and options."""
    said = ", ".join(f"{name} {value}" for name, value in options.items())
    click.echo(f"{machine()}; {shlex.join(sys.argv[1:])}; {said}\n")


def prepared(folder: Path, name: str) -> tuple[Path, Path]:
    """Training and test set, made once; one label a row."""
    train, test = folder / f"{name}.xmc", folder / f"{name}-test.xmc"
    if test.exists():
        return train, test
    folder.mkdir(parents=True, exist_ok=True)
    text = Path(os.environ["XMC_STREAM_DATA"]) / name
    whole = (folder / "whole.xmc", folder / "whole-test.xmc") if name in DEEPEST else (train, test)
    run("convert", text / "train.txt.gz", whole[0], "--normalize", "l2", "--overwrite")
    run("convert", text / "test.txt.gz", whole[1], "--like", whole[0], "--overwrite")
    if name in DEEPEST:
        sets = [Dataset(path) for path in whole]
        counts = sets[0].label_counts()
        labels = [rarest(in_memory(dataset.Y_rows()), counts).indices for dataset in sets]
        present = np.unique(labels[0])
        for dataset, y, target in zip(sets, labels, (train, test), strict=True):
            kept = np.isin(y, present)
            y = np.searchsorted(present, y[kept])
            Y = sp.csr_matrix((np.ones(len(y)), (np.arange(len(y)), y)), (len(y), len(present)))
            xs.convert(in_memory(dataset.X_rows())[kept], target, labels=Y, overwrite=True)
    return train, test


def measured(train: Path, test: Path, **options: Any) -> Done:
    """Train and test in this process."""
    began = time.process_time()
    fitted = xs.MEMOIR(memory_limit=LIMIT, threads=1, **options).fit(train)
    between = time.process_time()
    dataset = Dataset(test)
    labels, _ = fitted.predict_topk(dataset, k=1)
    ended = time.process_time()
    Y = dataset.Y_rows().block(0, dataset.n_samples)
    predicted = np.repeat(labels[:, 0], np.diff(Y.indptr))
    scores = macro_f1(Y.indices.astype(np.int64), predicted.astype(np.int64), dataset.n_labels)
    return Done(between - began, ended - between, *scores, fitted.report_)


def authors(train: Path) -> dict[str, Any]:
    """The settings of the authors' runs."""
    dataset = Dataset(train)
    batch = 100 * int(np.sqrt(dataset.n_labels))
    return {**AUTHORS, "batch": batch, "steps": -(-22 * dataset.n_samples // (10 * batch))}


def common(sets: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Arguments that commands share."""

    def names(context: click.Context, parameter: click.Parameter, value: str) -> list[str]:
        return value.split(",")

    def add(command: Callable[..., None]) -> Callable[..., None]:
        command = click.option("--seed", default=0, show_default=True)(command)
        command = click.option("--sets", default=sets, callback=names, show_default=True)(command)
        return click.argument("folder", type=click.Path(path_type=Path))(command)

    return add


@click.group(help=str(__doc__).replace("    XMC", "\b\n    XMC", 1))  # these lines stay as they are
def main() -> None:
    """What is measured."""


@main.command()
@common(SETS)
@click.option("--variants", default="l1,l2,lsh", show_default=True)
def oracles(folder: Path, sets: list[str], seed: int, variants: str) -> None:
    """Accuracy and macro-F1 with each oracle, at the defaults.

    Ends with exit code 1 if an approximate oracle is more than a point below the exact one of the same variant.
    """
    about(seed=seed)
    lost = []
    head("set", "variant", "oracle", "accuracy", "macro-F1", "train s", "steps", "best")
    for name in sets:
        train, test = prepared(folder, name)
        for variant in variants.split(","):
            exact: Done | None = None
            for oracle in ("exact", "simple-lsh" if variant == "lsh" else "sw-graph"):
                done = measured(train, test, seed=seed, variant=variant, oracle=oracle)
                steps = done.report["steps"], done.report["best_step"]
                row(name, variant, oracle, f"{done.accuracy:.2f}", f"{done.f1:.2f}", f"{done.trained:.1f}", *steps)
                exact = exact or done
                if min(done.accuracy - exact.accuracy, done.f1 - exact.f1) < -1.0:
                    lost.append(f"{oracle} on {name}")
    if lost:
        sys.exit(f"more than a point below the exact oracle: {', '.join(lost)}")


@main.command()
@common(SETS)
def defaults(folder: Path, sets: list[str], seed: int) -> None:
    """The defaults, each of them changed alone, and the authors' settings."""
    about(seed=seed)
    head("set", "settings", "accuracy", "macro-F1", "train s")
    for name in sets:
        train, test = prepared(folder, name)
        dataset = Dataset(train)
        n, p = dataset.n_samples, MEMOIRParameters().resolved(dataset.n_labels, dataset.n_samples)
        cases: dict[str, dict[str, Any]] = {
            "defaults": {}, "the authors'": authors(train), "lam / 10": {"lam": 0.1 / n}, "lam * 10": {"lam": 10 / n},
            "eta0 / 3": {"eta0": p.draws / 3}, "eta0 * 3": {"eta0": p.draws * 3.0}, "steps / 3": {"steps": p.most_steps // 3},
            "gamma=0": {"gamma": 0.0}, "gamma * 3": {"gamma": 3 * p.gamma}, "variant=l2": {"variant": "l2"},
            "sampling=class": {"sampling": "class"}, "cosine=true": {"cosine": True},
            "bias=true": {"bias": True}, "update=all": {"update": "all"},
        }  # fmt: skip
        for said, options in cases.items():
            done = measured(train, test, seed=seed, oracle="exact", **options)
            row(name, said, f"{done.accuracy:.2f}", f"{done.f1:.2f}", f"{done.trained:.1f}")


# steps as classes grow


def seconds_a_step(dataset: Dataset, learner: Learner, p: MEMOIRParameters, first: int, last: int, seed: int) -> float:
    """Processor seconds of steps first .. last - 1, on average: reading, searching, moving W, the index."""
    copies = Copies(dataset, seed, 0.0)
    steps = Steps(dataset, copies, p.draws, seed, p.sampling == "class", learner.rows)
    learner.oracle  # noqa: B018 (made before the clock runs)
    began = time.process_time()
    for step, drawn in steps.of(first, last):
        sums = take_step(learner.weights, drawn.rows, drawn.places, learner.find(drawn, step), step, p)
        learner.refresh(sums.touched)
    return (time.process_time() - began) / (last - first)


def coordinates(dataset: Dataset, folder: Path, rank: int, seed: int) -> Panels:
    """Made-up ones of all rows, of length one: the sum of the centres of a row's labels, and noise.

    An SVD of rows of random features has no structure, and nothing is learned in it.
    """
    shutil.rmtree(folder, ignore_errors=True)
    rng, panels = np.random.default_rng(seed), Panels(str(folder), dataset.n_samples, ((0, rank),))
    centres, _ = clustered_dense(dataset.n_labels, rng, 1, rank)
    scale = np.float32(0.7) / np.sqrt(1 + np.arange(rank, dtype=np.float32))
    for block in dataset.Y_rows().blocks(1 << 20):
        own = sp.csr_matrix(
            (np.ones(len(block.indices), np.float32), block.indices, block.indptr), (block.n, len(centres))
        )
        x = own @ centres + scale * rng.standard_normal((block.n, rank), np.float32)
        panels.write((0, rank), block.start, x / np.linalg.norm(x, axis=1, keepdims=True))
    return panels


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--labels", "sizes", multiple=True, type=int, default=(1000, 4000, 16_000, 64_000), show_default=True)
@click.option("--warm", default=100, show_default=True, help="Steps before those that are timed.")
@click.option("--steps", default=10, show_default=True, help="That are timed.")
@click.option("--rank", default=256, show_default=True)
@click.option("--times", default=5.0, show_default=True, help="As fast as this must simple-lsh be at the most classes.")
@click.option("--seed", default=0, show_default=True)
def growth(folder: Path, sizes: tuple[int, ...], warm: int, steps: int, rank: int, times: float, seed: int) -> None:
    """Seconds of a default step, of 1,000 draws, as the classes grow, with the exponents.

    The first steps are made with the approximate oracle. Then each oracle takes over from the same W. Ends with exit code 1
    if simple-lsh is not --times as fast as the exact search.
    """
    about(seed=seed, warm=warm, steps=steps, rank=rank)
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[float]] = {}
    head("K", "oracle", "ms a step", "us a draw", "classes not zero", "weights")
    for k in sizes:
        data = folder / f"growth-{k}.xmc"
        if not data.exists():
            shape = f"--samples {max(20_000, 2 * k)} --features 50000 --features-per-sample 30 --labels {k}".split()
            subprocess.run([sys.executable, GENERATOR, data, *shape], check=True, stdout=subprocess.DEVNULL)
        dataset = Dataset(data)
        learned = dataset.label_counts() > 0
        for variant, oracles_ in (("l2", ("sw-graph", "exact")), ("lsh", ("simple-lsh", "exact"))):
            reduced = coordinates(dataset, folder / "growth-coordinates", rank, seed) if variant == "lsh" else None
            for oracle in oracles_:
                p = MEMOIRParameters(variant=variant, oracle=oracle).resolved(k, dataset.n_samples)
                learner = learner_of(dataset, p, reduced, learned, seed, StepsPlan(4 << 30, 1))
                first, state = warm, folder / f"growth-{variant}.state"
                if oracle == oracles_[0]:
                    seconds_a_step(dataset, learner, p, 0, warm, seed)
                    learner.store(state, {})
                else:
                    learner.load(state)
                    seconds_a_step(dataset, learner, p, first, first + 1, seed)  # compiled
                    first += 1
                took = seconds_a_step(dataset, learner, p, first, first + steps, seed)
                found.setdefault(f"{variant} {oracle}", []).append(took)
                there = np.count_nonzero(~learner.weights.vectors.zero) / k
                clock = f"{1e3 * took:.1f}", f"{1e6 * took / p.draws:.1f}"
                row(k, f"{variant} {oracle}", *clock, f"{there:.0%}", f"{learner.nnz:,}")
    click.echo()
    for name, line in found.items():
        exponent = np.polyfit(np.log(sizes), np.log(line), 1)[0] if len(sizes) > 1 else float("nan")
        click.echo(f"{name}: a step grows as K^{exponent:.2f}")
    faster = [k for k, one, other in zip(sizes, found["l2 sw-graph"], found["l2 exact"], strict=True) if one < other]
    click.echo(f"sw-graph is faster than exact at K = {faster or 'none of these'}")
    ratio = found["lsh exact"][-1] / found["lsh simple-lsh"][-1]
    click.echo(f"simple-lsh at K = {sizes[-1]:,}: {ratio:.1f} times as fast as exact")
    if ratio < times:
        sys.exit(f"simple-lsh is less than {times:g} times as fast as the exact search")


# linear SVMs


def peak() -> int:
    """VmHWM of this process, bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def ours_alone(train: Path, test: Path, options: dict[str, Any]) -> tuple[Done, int]:
    """In a process of its own."""
    return measured(train, test, **options), peak()


def theirs_alone(train: Path, test: Path, name: str, seed: int) -> tuple[Done, int]:
    """scikit-learn one-vs-rest, in a process of its own. X in memory is part of what it takes."""
    from sklearn.linear_model import SGDClassifier
    from sklearn.svm import LinearSVC

    sets = [Dataset(path) for path in (train, test)]
    (X, y), (X_test, y_test) = (
        (in_memory(dataset.X_rows()), in_memory(dataset.Y_rows()).indices.astype(np.int64)) for dataset in sets
    )
    made: Any = LinearSVC(random_state=seed) if name == "LinearSVC" else SGDClassifier(random_state=seed)
    began = time.process_time()
    made.fit(X, y)
    between = time.process_time()
    predicted = made.predict(X_test)
    ended = time.process_time()
    return Done(between - began, ended - between, *macro_f1(y_test, predicted, sets[0].n_labels), {}), peak()


@main.command()
@common("udhr_langid")
def svm(folder: Path, sets: list[str], seed: int) -> None:
    """Train and predict time, memory, accuracy and macro-F1, as the paper's Table 3, beside scikit-learn.

    Each is a process of its own, one after the other. Memory is the peak of the whole process, Python and libraries with it.
    """
    import sklearn

    about(seed=seed, scikit_learn=sklearn.__version__)
    head("set", "method", "train s", "predict s", "memory MB", "accuracy", "macro-F1")
    for name in sets:
        paths = prepared(folder, name)
        cases: list[tuple[str, Any]] = [(each, None) for each in ("SGDClassifier", "LinearSVC")]
        cases += [(f"MEMOIR {variant}", {"variant": variant, "seed": seed}) for variant in ("l1", "l2", "lsh")]
        alone({"variant": "lsh", "steps": 2, "rank": 8}, paths)  # kernels are compiled
        alone({"steps": 2}, paths)
        for said, options in cases:
            done, memory = alone(options, paths, said, seed)
            row(
                name, said, f"{done.trained:.1f}", f"{done.predicted:.1f}", f"{memory / 1e6:.0f}", f"{done.accuracy:.2f}",
                f"{done.f1:.2f}",
            )  # fmt: skip


def alone(options: Any, paths: tuple[Path, Path], name: str = "", seed: int = 0) -> tuple[Done, int]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        if options is None:
            return pool.submit(theirs_alone, *paths, name, seed).result()
        return pool.submit(ours_alone, *paths, options).result()


# the paper's ablations


@main.command()
@common("20news_bydate,udhr_langid")
@click.option("--shares", default="0.25,1,4,16", show_default=True, help="Times the default batch.")
def batch(folder: Path, sets: list[str], seed: int, shares: str) -> None:
    """Batch size against accuracy, macro-F1 and time, as the paper's Table 2. The number of draws stays."""
    about(seed=seed)
    figure, (quality, clock) = pictures(2)
    head("set", "batch", "accuracy", "macro-F1", "train s", "steps")
    for name, marker in zip(sets, "osD^", strict=False):
        train, test = prepared(folder, name)
        dataset = Dataset(train)
        default = MEMOIRParameters().resolved(dataset.n_labels, dataset.n_samples).draws
        sizes = [max(1, round(float(share) * default)) for share in shares.split(",")]
        runs = [measured(train, test, seed=seed, batch=size) for size in sizes]
        for size, done in zip(sizes, runs, strict=True):
            quality_cells = f"{done.accuracy:.2f}", f"{done.f1:.2f}", f"{done.trained:.1f}"
            row(name, size, *quality_cells, done.report["steps"])
        [line] = quality.semilogx(sizes, [done.accuracy for done in runs], f"{marker}-", label=f"{name}: accuracy")
        quality.semilogx(
            sizes, [done.f1 for done in runs], f"{marker}--", color=line.get_color(), fillstyle="none",
            label=f"{name}: macro-F1",
        )  # fmt: skip
        clock.loglog(sizes, [done.trained for done in runs], f"{marker}-", label=name)
    quality.set(xlabel="draws of a step", ylabel="per cent of the test set", title="quality")
    clock.set(xlabel="draws of a step", ylabel="processor seconds", title="training")
    saved(figure, (quality, clock), folder / "memoir-batch.png")


@main.command()
@common("20news_bydate,udhr_langid")
@click.option("--gammas", default="0,0.01,0.03,0.1,0.3,1", show_default=True)
def lam(folder: Path, sets: list[str], seed: int, gammas: str) -> None:
    """Of l1: gamma, the weight of the penalty beside lam, against non-zero weights and macro-F1 (the paper's Figure 1)."""
    about(seed=seed)
    figure, (weights, quality) = pictures(2)
    head("set", "gamma", "weights", "accuracy", "macro-F1", "train s")
    values = [float(gamma) for gamma in gammas.split(",")]
    for name, marker in zip(sets, "osD^", strict=False):
        train, test = prepared(folder, name)
        runs = [measured(train, test, seed=seed, variant="l1", gamma=gamma) for gamma in values]
        for gamma, done in zip(values, runs, strict=True):
            nnz = f"{done.report['nnz']:,}"
            row(name, f"{gamma:g}", nnz, f"{done.accuracy:.2f}", f"{done.f1:.2f}", f"{done.trained:.1f}")
        weights.plot(values, [done.report["nnz"] for done in runs], f"{marker}-", label=name)
        quality.plot(values, [done.f1 for done in runs], f"{marker}-", label=name)
    for axis, said in ((weights, "non-zero weights"), (quality, "macro-F1, per cent of the test set")):
        axis.set_xscale("symlog", linthresh=min(value for value in values if value))
        axis.set(xlabel="gamma", ylabel=said)
    weights.set_yscale("log")
    saved(figure, (weights, quality), folder / "memoir-lam.png")


def saved(figure: Any, axes: tuple[Any, ...], path: Path) -> None:
    for axis in axes:
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    click.echo(f"{path} written")


if __name__ == "__main__":
    main()
