"""The group lasso beside lightning, its algorithms and losses beside each other, and an array larger than memory.

    XMC_STREAM_DATA=... python benchmarks/group_lasso.py lightning FOLDER
    XMC_STREAM_DATA=... python benchmarks/group_lasso.py algorithms FOLDER --sets rcv1_multiclass_sub --lams 1e-3,1e-5
    XMC_STREAM_DATA=... python benchmarks/group_lasso.py losses FOLDER
    XMC_STREAM_DATA=... python benchmarks/group_lasso.py lowest FOLDER
    python benchmarks/group_lasso.py big FOLDER

XMC_STREAM_DATA has a folder for each set, with train.txt.gz and test.txt.gz in XMLRepo text. Rows are l2-normalised, classes
without a training row left out (lightning does not see them). FOLDER keeps converted sets, models, pictures, and the
environment of lightning. All runs are on one thread, seconds are of the clock on the wall, and each command prints machine,
versions and options first.
"""

from __future__ import annotations

import os

os.environ.update(
    dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
)  # before numpy loads

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import scipy.sparse as sp
from commands import machine, run
from lightning_fits import LIGHTNING, Lightning, environment
from watch import Watched, watch

import xmc_stream as xs
from xmc_stream.runtime.events import read_events

HERE = Path(__file__).resolve().parent
SETS = "20news_bydate,news20,rcv1_multiclass_sub,mnist,letter"
CLOSE = 1e-4  # as near as this to an objective is there
TOLS = tuple(a * 10.0**b for b in range(-2, -8, -1) for a in (1.0, 0.3))  # of ours, from the loosest on
PASSES = 20_000
# of ours; the paper's Figures 2 and 3 have these six
ALGORITHMS: dict[str, dict[str, Any]] = {
    "bcd-ls": {"algorithm": "bcd-ls"}, "bcd-cst": {"algorithm": "bcd-cst"}, "fista": {"algorithm": "fista"},
    "fista, constant step": {"algorithm": "fista", "line_search": False}, "sparsa": {"algorithm": "sparsa"},
    "fobos": {"algorithm": "fobos"},
}  # fmt: skip
LOSSES = ("multiclass", "multitask", "logistic")
LOWEST = (
    ("rcv1_multiclass_sub", 1e-3, 1.800581),
    ("20news_bydate", 1e-4, 0.442541),
    ("sector_partial", 1e-3, 1.659317),
)
FLOOR = 1e-7  # of a relative difference in a picture: objectives are sums of float32 losses


def print_row(*cells: Any) -> None:
    click.echo("| " + " | ".join(map(str, cells)) + " |")


def print_head(*cells: str) -> None:
    print_row(*cells)
    print_row(*["---"] * len(cells))


def about(**options: Any) -> None:
    """Machine, versions and options."""
    names = "xmc_stream", "numpy", "scipy", "numba", "zarr"
    click.echo(
        f"{machine()}; Python {sys.version.split()[0]}, " + ", ".join(f"{name} {version(name)}" for name in names)
    )
    click.echo(shlex.join(sys.argv[1:]) + "; " + ", ".join(f"{name} {value}" for name, value in options.items()) + "\n")


def classes_of(dataset: xs.Dataset) -> np.ndarray:
    return np.asarray(dataset.Y_rows().block(0, dataset.n_samples).indices)


def matrix_of(dataset: xs.Dataset) -> sp.csr_matrix:
    """X in memory, in float64."""
    block = dataset.X_rows().block(0, dataset.n_samples)
    data = np.ones(len(block.indices)) if block.data is None else block.values.astype(np.float64)
    return sp.csr_matrix((data, block.indices, block.indptr), (dataset.n_samples, dataset.n_features))


def prepared(folder: Path, name: str) -> tuple[Path, Path]:
    """Training and test set, made once, with X by columns. Classes without a training row are left out, and their test rows."""
    train, test = folder / f"{name}.xmc", folder / f"{name}-test.xmc"
    if not test.exists():
        folder.mkdir(parents=True, exist_ok=True)
        text = Path(os.environ["XMC_STREAM_DATA"]) / name
        whole = folder / "whole.xmc", folder / "whole-test.xmc"
        run("convert", text / "train.txt.gz", whole[0], "--normalize", "l2", "--overwrite")
        run("convert", text / "test.txt.gz", whole[1], "--like", whole[0], "--overwrite")
        present = np.unique(classes_of(xs.open_dataset(whole[0])))
        for source, target in zip(whole, (train, test), strict=True):
            dataset = xs.open_dataset(source)
            y = classes_of(dataset)
            kept = np.isin(y, present)
            y = np.searchsorted(present, y[kept])
            Y = sp.csr_matrix((np.ones(len(y)), (np.arange(len(y)), y)), (len(y), len(present)))
            xs.convert(matrix_of(dataset)[kept].astype(np.float32), target, labels=Y, overwrite=True)
        xs.open_dataset(train).X_columns(1 << 30)
    return train, test


def objective_of(X: sp.csr_matrix, y: np.ndarray, W: np.ndarray, lam: float) -> float:
    """(1/N) sum_i sum_{r != y_i} max(0, 1 - (w_{y_i}.x_i - w_r.x_i))^2 + lam sum_j ||W_j||, in float64."""
    loss = 0.0
    for first in range(0, X.shape[0], 4096):
        scores, mine = np.asarray(X[first : first + 4096] @ W), y[first : first + 4096]
        at = np.arange(len(mine))
        margins = np.maximum(0.0, 1.0 + scores - scores[at, mine][:, None])
        margins[at, mine] = 0.0
        loss += float(np.square(margins).sum())
    return loss / X.shape[0] + lam * float(np.linalg.norm(W, axis=1).sum())


def weights_of(model: Path) -> np.ndarray:
    W: np.ndarray = xs.load_model(model).to_scipy().toarray().astype(np.float64)
    return W


def train_command(data: Path, model: Path, limit: str, seed: int, **settings: Any) -> Watched:
    """Ours as a command, in a process of its own."""
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    solver = "--solver", "group-lasso", "--seed", seed, "--threads", 1, "--memory-limit", limit
    return watch("train", data, model, *solver, "--overwrite", *words)


def working_seconds(model: Path) -> float:
    """Seconds of the run that made a model, from its first reading of the data until the model is written."""
    events = list(read_events(model / "events.jsonl"))
    return float(events[-1]["time"] - next(event["time"] for event in events if event["phase"]))


def solving_seconds(model: Path) -> float:
    """Seconds of its jobs, without checks of the data."""
    jobs = (event for event in read_events(model / "events.jsonl") if event["event"] == "job")
    return float(sum(event["seconds"] for event in jobs if not event["phase"].startswith("check ")))


def train_here(data: Path, model: Path, seed: int, **settings: Any) -> tuple[dict[str, Any], float]:
    """Ours in this process, where kernels are loaded: its report, and seconds of solving."""
    report: dict[str, Any] = (
        xs.GroupLasso(**settings, seed=seed, threads=1).fit(data, model=model, overwrite=True).report_
    )
    return report, solving_seconds(model)


def common(sets: str | None, lams: str | None, repeats: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Arguments that all commands have."""

    def numbers(context: click.Context, parameter: click.Parameter, value: str) -> list[float]:
        return [float(word) for word in value.split(",")]

    def names(context: click.Context, parameter: click.Parameter, value: str) -> list[str]:
        return value.split(",")

    def add(command: Callable[..., None]) -> Callable[..., None]:
        command = click.option("--seed", default=0, show_default=True)(command)
        command = click.option("--repeats", default=repeats, show_default=True, help="Of which the median counts.")(
            command
        )
        if lams is not None:
            command = click.option("--lams", default=lams, callback=numbers, show_default=True)(command)
        if sets is not None:
            command = click.option("--sets", default=sets, callback=names, show_default=True)(command)
        return click.argument("folder", type=click.Path(path_type=Path))(command)

    return add


@click.group(help=str(__doc__).replace("    XMC", "\b\n    XMC", 1))  # these lines stay as they are
def main() -> None:
    """What is measured."""


# lightning


@main.command()
@common(SETS, "1e-3,1e-4,1e-5", 1)
@click.option("--tol", default=1e-5, show_default=True, help="Of lightning.")
@click.option("--passes", default=10_000, show_default=True, help="Of lightning, at most.")
@click.option("--cap", default=900.0, show_default=True, help="Processor seconds that a fit of lightning may take.")
@click.option("--memory-limit", default="320MB", show_default=True, help="Of ours.")
@click.option("--environment", "place", type=click.Path(path_type=Path), help="Instead of FOLDER/lightning.")
def lightning(
    folder: Path, sets: list[str], lams: list[float], repeats: int, seed: int, tol: float, passes: int, cap: float,
    memory_limit: str, place: Path | None,
) -> None:  # fmt: skip
    """Time to lightning's objective, and memory, both programs in turns.

    Lightning's objective is that of the fit at its tight tolerance. It was reached with the first pass that ended within
    1e-4 of it (as if one had known the tolerance for that). Ours reaches it with the first of the tolerances 1e-2, 3e-3,
    1e-3, ... whose model is within 1e-4 of it or below, and takes the seconds of that whole training. Both objectives
    are worked out here, from the weights, in float64.

    Seconds: lightning's are of `fit`, with X in memory as it wants it. Ours are from the first reading of the data until the
    model is written; the process's start, imports and kernels stand beside. The ratio of processor seconds counts all of our
    process. Memory "above bare" is beyond the peak of the same program on a set of eight rows.
    """
    python = environment(place or folder / "lightning")
    if python is None:
        click.echo("skipped: lightning cannot be installed here")
        return
    about(
        seed=seed,
        limit_of_ours=memory_limit,
        lightning=f"{LIGHTNING} (tol {tol:g}, {passes} passes, {cap:g} s at most)",
    )
    program, memory = Lightning(python, folder, tol, passes, cap, seed), []
    model = folder / "lightning.model"
    bare = bare_peaks(program, memory_limit)
    print_head(
        "set", "lam", "lightning: whole fit s", "reached s", "objective", "features", "ours: tol", "s", "start s", "relative",
        "features", "violation", "ratio of s", "of s with start", "of processor s",
    )  # fmt: skip
    for name in sets:
        train, _ = prepared(folder, name)
        dataset = xs.open_dataset(train)
        X, y = matrix_of(dataset), classes_of(dataset)
        for lam in lams:
            fits = [program.fit(X, y, lam)]
            best = objective_of(X, y, fits[0].W, lam)
            wanted, at = best * (1 + CLOSE), fits[0].reached(best * (1 + CLOSE))
            for own in TOLS:
                settings = {"lam": lam, "tol": own, "max_passes": PASSES}
                done = train_command(train, model, memory_limit, seed, **settings)
                W = weights_of(model)
                ours = objective_of(X, y, W, lam)
                if ours <= wanted:
                    break
            runs = [(done, working_seconds(model))]
            for _ in range(repeats - 1):
                fits.append(program.fit(X, y, lam))
                runs.append((train_command(train, model, memory_limit, seed, **settings), working_seconds(model)))
            theirs = median(fit.seconds[at] for fit in fits)
            seconds, whole = median(s for _, s in runs), median(w.seconds for w, _ in runs)
            processor = median(w.samples[-1][1] for w, _ in runs) / median(fit.processor[at] for fit in fits)
            history = done.figures["history"]
            print_row(
                name, f"{lam:g}", f"{median(fit.seconds[-1] for fit in fits):.1f}" + " (cut)" * bool(fits[0].cut),
                f"{theirs:.1f}", f"{best:.6g}", f"{np.count_nonzero(fits[0].W.any(axis=1)):,}",
                f"{own:.0e}" if ours <= wanted else "NOT REACHED", f"{seconds:.1f}", f"{whole - seconds:.1f}",
                f"{ours / best - 1:+.1e}", f"{np.count_nonzero(W.any(axis=1)):,}",
                f"{history[-1]['violation'] / history[0]['violation']:.0e}", f"{seconds / theirs:.2f}",
                f"{whole / theirs:.2f}", f"{processor:.2f}",
            )  # fmt: skip
            peaks = median(fit.peak for fit in fits), median(w.figures["peak_rss"] for w, _ in runs)
            memory.append((name, lam, *peaks, peaks[0] - bare[0], peaks[1] - bare[1]))
    click.echo()
    print_head("set", "lam", "lightning: peak MB", "above bare", "ours: peak MB", "above bare", "ratio above bare")
    print_row("bare", "-", f"{bare[0] / 1e6:.0f}", "-", f"{bare[1] / 1e6:.0f}", "-", "-")
    for name, lam, theirs, mine, above, own in memory:
        cells = (
            f"{theirs / 1e6:.0f}",
            f"{above / 1e6:.0f}",
            f"{mine / 1e6:.0f}",
            f"{own / 1e6:.0f}",
            f"{own / above:.2f}",
        )
        print_row(name, f"{lam:g}", *cells)


def bare_peaks(program: Lightning, limit: str) -> tuple[float, float]:
    """Peaks of both programs on eight rows: what interpreter, libraries and kernels take."""
    X, y, data = sp.csr_matrix(np.eye(8)), np.arange(8) % 4, program.folder / "bare.xmc"
    Y = sp.csr_matrix((np.ones(8), (np.arange(8), y)))
    xs.convert(X.astype(np.float32), data, labels=Y, overwrite=True)
    runs = [train_command(data, program.folder / "bare.model", limit, 0) for _ in range(2)]  # the first one may compile
    return program.fit(X, y, 1e-3).peak, runs[-1].figures["peak_rss"]


# the paper's figures


def pictures(n: int) -> tuple[Any, Any]:
    """A figure with so many pictures in a row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 11, "axes.grid": True, "grid.alpha": 0.3})
    figure, axes = pyplot.subplots(1, n, figsize=(5.6 * n, 4.4), squeeze=False, layout="constrained")
    return figure, axes[0]


@main.command()
@common("rcv1_multiclass_sub", "1e-3,1e-5", 1)
@click.option("--seconds", "most", default=30.0, show_default=True, help="A curve ends with the first point beyond.")
def algorithms(folder: Path, sets: list[str], lams: list[float], repeats: int, seed: int, most: float) -> None:
    """Relative objective against time, as the paper's Figures 2 and 3.

    A point is a training of its own, of 1, 2, 4, ... passes: seconds of its jobs (kernels loaded, checks of the data left
    out) and its objective. The lowest objective of all, with that of bcd-ls at tol 1e-7, stands for the optimum.
    """
    about(seed=seed, seconds=most, repeats=repeats)
    model = folder / "algorithms.model"
    for name in sets:
        train, _ = prepared(folder, name)
        train_here(train, model, seed, max_passes=1)  # loads kernels
        figure, axes = pictures(len(lams))
        print_head("set", "lam", "algorithm", "passes", "s", "objective", "above the lowest", "features")
        for lam, axis in zip(lams, axes, strict=True):
            best = train_here(train, model, seed, lam=lam, tol=1e-7, max_passes=PASSES)[0]["objective"]
            curves: dict[str, list[tuple[float, dict[str, Any]]]] = {}
            for algorithm, settings in ALGORITHMS.items():
                points = curves[algorithm] = []
                for cut in (2**n for n in range(15)):
                    options = {**settings, "lam": lam, "tol": 1e-9, "max_passes": cut}
                    runs = [train_here(train, model, seed, **options) for _ in range(repeats)]
                    points.append((median(s for _, s in runs), runs[0][0]))
                    if runs[0][0]["objective"] / best - 1 <= FLOOR or points[-1][0] > most:
                        break
            best = min(best, *(report["objective"] for points in curves.values() for _, report in points))
            for marker, (algorithm, points) in zip("os^vDP", curves.items(), strict=True):
                axis.plot(
                    [seconds for seconds, _ in points],
                    [max(report["objective"] / best - 1, FLOOR) for _, report in points],
                    marker=marker, markersize=5, label=algorithm,
                )  # fmt: skip
                seconds, last = points[-1]
                print_row(
                    name, f"{lam:g}", algorithm, f"{last['path'][0]['passes']:.0f}", f"{seconds:.2f}",
                    f"{last['objective']:.6f}", f"{last['objective'] / best - 1:.1e}", f"{last['n_selected']:,}",
                )  # fmt: skip
            axis.set(xscale="log", yscale="log", xlabel="seconds", title=f"{name}, lam = {lam:g}")
            axis.set_ylabel("objective above the lowest, relative")
        axes[0].legend()
        plot = folder / f"algorithms-{name}.png"
        figure.savefig(plot, dpi=120)
        click.echo(f"{plot} written")


@main.command()
@common("20news_bydate,rcv1_multiclass_sub,news20", None, 3)
@click.option("--path", default="1e-3,1e-5,10", show_default=True, help="Largest lam, smallest, how many, log-spaced.")
def losses(folder: Path, sets: list[str], repeats: int, seed: int, path: str) -> None:
    """Accuracy against the share of non-zero rows (the paper's Figure 5), and seconds of each loss (Table 2).

    Each lam is solved by itself, with the paper's tol 1e-3 and 200 passes at most: least, median and most seconds of these,
    and accuracies. Then all of them as a warm-started path: median of the repeats.
    """
    about(seed=seed, repeats=repeats)
    from matplotlib.ticker import LogLocator, NullLocator

    model, (figure, axes) = folder / "losses.model", pictures(len(sets))
    highest, lowest, number = path.split(",")
    lams = tuple(float(lam) for lam in np.geomspace(float(highest), float(lowest), int(number)))
    paths: dict[str, list[float]] = {loss: [] for loss in LOSSES}
    print_head("set", "loss", "one lam: s, least", "median", "most", "path s, median", "passes", "best accuracy")
    for name, axis in zip(sets, axes, strict=True):
        train, test = prepared(folder, name)
        n_features = xs.open_dataset(train).n_features
        train_here(train, model, seed, max_passes=1)  # loads kernels
        rows = {}
        for loss in LOSSES:
            seconds, shares, merits = [], [], []
            for lam in lams:
                report, took = train_here(train, model, seed, lam=lam, loss=loss)
                seconds.append(took)
                shares.append(100 * report["n_selected"] / n_features)
                merits.append(xs.evaluate(model, xs.open_dataset(test), ks=(1,), threads=1)["P@1"])
            axis.plot(shares, merits, marker="os^"[LOSSES.index(loss)], label=loss)
            rows[loss] = seconds, merits
        whole: dict[str, list[float]] = {loss: [] for loss in LOSSES}
        passes = {}
        for _ in range(repeats):
            for loss in LOSSES:
                report, took = train_here(train, model, seed, lam=lams, loss=loss)
                whole[loss].append(took)
                passes[loss] = sum(stage["passes"] for stage in report["path"])
        for loss, (seconds, merits) in rows.items():
            paths[loss].append(median(whole[loss]))
            print_row(
                name, loss, f"{min(seconds):.2f}", f"{median(seconds):.2f}", f"{max(seconds):.2f}", f"{paths[loss][-1]:.2f}",
                f"{passes[loss]:.0f}", f"{max(merits):.2f}",
            )  # fmt: skip
        axis.set(xlabel="features selected, %", ylabel="accuracy on the test set, %", title=name, xscale="log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_locator(NullLocator())
    axes[0].legend()
    plot = folder / "losses.png"
    figure.savefig(plot, dpi=120)
    ratio = median(mine / other for mine, other in zip(paths["multiclass"], paths["logistic"], strict=True))
    click.echo(f"{plot} written\nmulticlass / logistic, median over sets of the seconds of a path: {ratio:.2f}")
    if ratio >= 1:
        sys.exit("the multiclass squared hinge is not faster than the logistic loss")


# what must hold


@main.command()
@common(None, None, 1)
@click.option("--tol", default=1e-6, show_default=True)
def lowest(folder: Path, repeats: int, seed: int, tol: float) -> None:
    """Objectives beside the lowest that we know of, worked out in float64. Ends with exit code 1 if one is above."""
    about(seed=seed, tol=tol)
    print_head("set", "lam", "lowest known", "ours", "relative", "features", "s", "passes")
    above = False
    for name, lam, known in LOWEST:
        train, _ = prepared(folder, name)
        dataset, model = xs.open_dataset(train), folder / "lowest.model"
        runs = [train_here(train, model, seed, lam=lam, tol=tol, max_passes=PASSES) for _ in range(repeats)]
        report = runs[0][0]
        ours = objective_of(matrix_of(dataset), classes_of(dataset), weights_of(model), lam)
        above |= ours > known
        print_row(
            name, f"{lam:g}", f"{known:.6f}", f"{ours:.6f}", f"{ours / known - 1:+.1e}", f"{report['n_selected']:,}",
            f"{median(s for _, s in runs):.1f}", f"{report['path'][0]['passes']:.0f}",
        )  # fmt: skip
    if above:
        sys.exit("an objective is above the lowest that is known")


@main.command()
@common(None, "1e-3", 1)
@click.option("--passes", default=5, show_default=True)
@click.option("--limit", default=512, show_default=True, help="MB")
def big(folder: Path, lams: list[float], repeats: int, seed: int, passes: int, limit: int) -> None:
    """500,000 rows and 200 classes: an array of 416 MB, under a limit of 512 MB and of 8 GB; the page cache is not capped.

    Ends with exit code 1 if private memory passes the limit, or the two models differ.
    """
    about(seed=seed, loss="multitask", passes=passes)
    train = folder / "wide.xmc"
    if not train.exists():
        folder.mkdir(parents=True, exist_ok=True)
        shape = "--samples 500000 --features 20000 --features-per-sample 20 --labels 200".split()
        subprocess.run([sys.executable, HERE.parent / "tools" / "make_synthetic.py", train, *shape], check=True)
    xs.open_dataset(train).X_columns(64 << 20)
    print_head(
        "lam", "limit MB", "s", "start s", "processor s", "peak MB", "private MB", "objective", "features", "digest"
    )
    wrong = []
    for lam in lams:
        kept = set()
        for most in (limit, 8000):
            model = folder / f"wide-{most}.model"
            settings = {"lam": lam, "max_passes": passes, "loss": "multitask"}
            runs = [train_command(train, model, f"{most}MB", seed, **settings) for _ in range(repeats)]
            info, report = run("info", model, "--digest"), runs[0].figures
            private, seconds = info["run"]["peak_private"], working_seconds(model)
            kept.add((json.dumps(report["history"]), report["objective"], info["digest"]))
            print_row(
                f"{lam:g}", most, f"{seconds:.1f}", f"{runs[-1].seconds - seconds:.1f}",
                f"{median(r.samples[-1][1] for r in runs):.1f}", f"{report['peak_rss'] / 1e6:.0f}", f"{private / 1e6:.0f}",
                f"{report['objective']:.9g}", f"{report['n_selected']:,}", info["digest"][:16],
            )  # fmt: skip
            if private > most * 1e6:
                wrong.append(f"private memory of {private / 1e6:.0f} MB passes the limit of {most} MB")
        if len(kept) > 1:
            wrong.append(f"lam {lam:g}: the models differ")
    if wrong:
        sys.exit("; ".join(wrong))


if __name__ == "__main__":
    main()
