"""The group lasso beside lightning, its algorithms and losses beside each other, and an array larger than memory.

    python benchmarks/group_lasso.py lightning DATA letter mnist 20news_bydate --lam 1e-3 --lam 1e-4
    python benchmarks/group_lasso.py algorithms DATA rcv1_multiclass_sub --lam 1e-3 --lam 1e-5 --plot algorithms.png
    python benchmarks/group_lasso.py losses DATA 20news_bydate letter --plot losses.png
    python benchmarks/group_lasso.py big FOLDER

DATA has a folder for each set, with train.txt.gz and test.txt.gz in XMLRepo text. `lightning` makes an environment for
CDClassifier, which needs numpy < 1.24, in --environment; where it cannot be had, it says so and ends. Both programs run
on one thread, in processes of their own, in turns; the objective of both is worked out here, in float64. `algorithms`
draws the paper's Figures 2 and 3: how far the objective is above the lowest one found, by seconds. `losses` draws Figure
5, accuracy by share of non-zero rows, and prints Table 2, seconds for each loss over the path of lam. `big` trains on a
synthetic set (500,000 rows, 200 classes) whose array of margins is 400 MB, with a limit of 512 MB and of 8 GB.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import scipy.sparse as sp

import xmc_stream as xs

HERE = Path(__file__).resolve().parent
NEEDED = ["numpy==1.23.5", "scipy==1.10.1", "scikit-learn==1.2.2", "joblib", "cython<3", "setuptools<60", "wheel"]
LIGHTNING = "sklearn-contrib-lightning==0.6.2.post0"
THREAD = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")}
LOSSES = ("multiclass", "multitask", "logistic")
ALGORITHMS = ("bcd-ls", "bcd-cst", "fista", "sparsa", "fobos")
TOLS = (1e-3, 1e-4, 1e-5, 1e-6)


def xmc(*words: Any) -> dict[str, Any]:
    """A command of xmc-stream in a process of its own; its report."""
    code = "import sys; from xmc_stream.cli import main; sys.argv[0] = 'xmc-stream'; main()"
    command = [sys.executable, "-c", code, *map(str, words), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=THREAD)
    if done.returncode:
        raise click.ClickException(done.stderr.strip().splitlines()[-1])
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def converted(data: Path, name: str, folder: Path) -> tuple[Path, Path]:
    """Training and test set, converted into a folder, once."""
    train, test = folder / f"{name}.xmc", folder / f"{name}-test.xmc"
    if not train.exists():
        xmc("convert", data / name / "train.txt.gz", train, "--normalize", "l2")
        xmc("convert", data / name / "test.txt.gz", test, "--like", train)
    return train, test


def matrix(block: xs.Dataset | Any, n_columns: int) -> sp.csr_matrix:
    """A block of rows in memory."""
    values = np.ones(len(block.indices)) if block.data is None else block.values
    return sp.csr_matrix((values, block.indices, block.indptr), (len(block.indptr) - 1, n_columns))


def in_memory(path: Path) -> tuple[sp.csr_matrix, np.ndarray]:
    """X in float64, and the class of each row."""
    dataset = xs.open_dataset(path)
    X = matrix(dataset.X_rows().block(0, dataset.n_samples), dataset.n_features).astype(np.float64)
    return X, np.asarray(dataset.Y_rows().block(0, dataset.n_samples).indices)


def objective(X: sp.csr_matrix, y: np.ndarray, W: np.ndarray, lam: float) -> float:
    """(1/N) sum_i sum_{r != y_i} max(0, 1 - (w_{y_i}.x_i - w_r.x_i))^2 + lam sum_j ||W_j||, in float64."""
    total = 0.0
    for start in range(0, X.shape[0], 4096):
        scores, mine = np.asarray(X[start : start + 4096] @ W), y[start : start + 4096]
        at = np.arange(len(mine))
        margins = np.maximum(0.0, 1.0 + scores - scores[at, mine][:, None])
        margins[at, mine] = 0.0
        total += float(np.square(margins).sum())
    return total / X.shape[0] + lam * float(np.linalg.norm(W, axis=1).sum())


def accuracy(model: Path, test: Path) -> float:
    """P@1, in per cent."""
    merit: float = xs.evaluate(model, xs.open_dataset(test), ks=(1,), execution=xs.Execution(threads=1))["P@1"]
    return merit


def ours(train: Path, model: Path, lam: float, tol: float, passes: int, **more: Any) -> dict[str, Any]:
    """A training on one thread; its report."""
    settings = {"lam": lam, "tol": tol, "max_passes": passes, **more}
    options = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    return xmc("train", train, model, "--solver", "group-lasso", "--threads", 1, "--overwrite", *options)


def environment(path: Path) -> Path | None:
    """The interpreter of an environment with lightning, made where it is not there; None where it cannot be had."""
    python = path / "bin" / "python"
    if not python.exists():
        venv.create(path, with_pip=True)
    if subprocess.run([python, "-c", "import lightning"], capture_output=True, check=False).returncode:
        for words in (["--only-binary", ":all:", *NEEDED[:4]], NEEDED[4:], ["--no-build-isolation", LIGHTNING]):
            install = [python, "-m", "pip", "install", "--quiet", *words]
            if subprocess.run(install, capture_output=True, check=False).returncode:
                return None
    return python


def theirs(python: Path, data: Path, lam: float, tol: float, passes: int, out: Path, seconds: float) -> dict[str, Any]:
    """A fit of lightning: weights, seconds, memory."""
    command = [python, HERE / "lightning_program.py", data, lam, tol, passes, out]
    try:
        subprocess.run([*map(str, command)], check=True, capture_output=True, env=THREAD, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {}
    with np.load(out) as arrays:
        return {name: arrays[name] for name in arrays.files}


def print_line(cells: Sequence[str]) -> None:
    click.echo("| " + " | ".join(cells) + " |")


def print_head(cells: Sequence[str]) -> None:
    print_line(cells)
    print_line(["---"] * len(cells))


@click.group(help=__doc__)
def main() -> None:
    """What is measured."""


@main.command()
@click.argument("data", type=click.Path(path_type=Path, exists=True))
@click.argument("names", nargs=-1, required=True)
@click.option("--lam", "lams", type=float, multiple=True, default=(1e-3, 1e-4), show_default=True)
@click.option("--tol", type=float, default=1e-5, show_default=True, help="Of lightning.")
@click.option("--passes", type=int, default=1000, show_default=True, help="Of lightning, at most.")
@click.option("--timeout", type=float, default=900, show_default=True, help="Seconds that a fit of lightning may take.")
@click.option(
    "--environment", "place", type=click.Path(path_type=Path), default=Path("lightning-venv"), show_default=True
)
def lightning(
    data: Path, names: tuple[str, ...], lams: tuple[float, ...], tol: float, passes: int, timeout: float, place: Path
) -> None:
    """Time and memory to lightning's objective, both programs in turns.

    Ours takes the first of the tolerances 1e-3, 1e-4, ... that ends at lightning's objective or below it (1e-4 relative).
    """
    python = environment(place)
    if python is None:
        click.echo(f"skipped: lightning cannot be installed into {place}")
        return
    print_head([
        "set", "lam", "lightning s", "objective", "features", "peak MB (above bare)", "ours s", "tol", "objective",
        "features", "peak MB (above bare)", "time", "memory",
    ])  # fmt: skip
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        bare = bare_process()
        for name in names:
            train, _ = converted(data, name, folder)
            X, y = in_memory(train)
            if len(np.unique(y)) < y.max() + 1:  # lightning leaves classes without rows out, which we count
                y = np.unique(y, return_inverse=True)[1]
                train = folder / f"{name}-classes.xmc"
                xs.convert(X.astype(np.float32), train, labels=sp.csr_matrix((np.ones(len(y)), (np.arange(len(y)), y))))
            arrays = folder / f"{name}.npz"
            np.savez(arrays, data=X.data, indices=X.indices, indptr=X.indptr, shape=X.shape, y=y)
            for lam in lams:
                fit = theirs(python, arrays, lam, tol, passes, folder / "out.npz", timeout)
                if not fit:
                    print_line([name, f"{lam:g}", f"> {timeout:.0f}"])
                    continue
                wanted = objective(X, y, fit["W"], lam)
                for own in TOLS:
                    report = ours(train, folder / "model", lam, own, 2000)
                    W = xs.load_model(folder / "model").to_scipy().toarray().astype(np.float64)
                    reached = objective(X, y, W, lam)
                    if reached <= wanted * (1 + 1e-4):
                        break
                peaks = float(fit["peak"]), float(report["peak_rss"])
                above = peaks[0] - float(fit["bare"]), peaks[1] - bare
                print_line([
                    name, f"{lam:g}", f"{float(fit['seconds']):.2f}", f"{wanted:.6f}",
                    f"{int(np.any(fit['W'] != 0, axis=1).sum()):,}", f"{peaks[0] / 1e6:.0f} ({above[0] / 1e6:.0f})",
                    f"{report['seconds']:.2f}", f"{own:g}", f"{reached:.6f}", f"{report['n_selected']:,}",
                    f"{peaks[1] / 1e6:.0f} ({above[1] / 1e6:.0f})", f"{report['seconds'] / float(fit['seconds']):.2f}",
                    f"{above[1] / above[0]:.2f}",
                ])  # fmt: skip


def bare_process() -> float:
    """Peak memory of a training on next to nothing: what libraries and kernels take."""
    with tempfile.TemporaryDirectory() as folder:
        X = sp.csr_matrix(np.eye(8, dtype=np.float32))
        xs.convert(X, Path(folder) / "bare.xmc", labels=X)
        for _ in range(2):  # the first one may compile
            report = ours(Path(folder) / "bare.xmc", Path(folder) / "model", 1e-3, 1e-3, 5)
        return float(report["peak_rss"])


def trace(report: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Seconds and objectives along a training. A pass takes its share of the time by what it reads."""
    history = [line for line in report["history"] if line.get("objective") is not None]
    last = max(history[-1]["passes"], 1e-9)
    return [report["seconds"] * line["passes"] / last for line in history], [line["objective"] for line in history]


@main.command()
@click.argument("data", type=click.Path(path_type=Path, exists=True))
@click.argument("name")
@click.option("--lam", "lams", type=float, multiple=True, default=(1e-3, 1e-5), show_default=True)
@click.option("--passes", type=int, default=200, show_default=True)
@click.option("--plot", type=click.Path(path_type=Path), default=Path("group-lasso-algorithms.png"), show_default=True)
def algorithms(data: Path, name: str, lams: tuple[float, ...], passes: int, plot: Path) -> None:
    """Relative objective against time for the five algorithms."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(lams), figsize=(6 * len(lams), 4), squeeze=False)
    print_head(["lam", "algorithm", "seconds", "passes", "objective", "above the lowest", "features"])
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        train, _ = converted(data, name, folder)
        for lam, axis in zip(lams, axes[0], strict=True):
            reports = {
                algorithm: ours(train, folder / "model", lam, 1e-6, passes, algorithm=algorithm)
                for algorithm in ALGORITHMS
            }
            best = ours(train, folder / "model", lam, 1e-8, 10 * passes)["objective"]
            best = min(best, *(report["objective"] for report in reports.values()))
            for algorithm, report in reports.items():
                seconds, objectives = trace(report)
                axis.semilogy(seconds, [max(value / best - 1, 1e-9) for value in objectives], label=algorithm)
                print_line([
                    f"{lam:g}", algorithm, f"{report['seconds']:.1f}", f"{report['passes']:.0f}",
                    f"{report['objective']:.6f}", f"{report['objective'] / best - 1:.1e}", f"{report['n_selected']:,}",
                ])  # fmt: skip
            axis.set(
                xscale="log",
                xlabel="seconds",
                ylabel="objective above the lowest, relative",
                title=f"{name}, lam {lam:g}",
            )
            axis.legend()
    figure.tight_layout()
    figure.savefig(plot, dpi=120)
    click.echo(f"{plot} written")


@main.command()
@click.argument("data", type=click.Path(path_type=Path, exists=True))
@click.argument("names", nargs=-1, required=True)
@click.option("--steps", type=int, default=10, show_default=True, help="Values of lam, log-spaced.")
@click.option("--from", "highest", type=float, default=1e-3, show_default=True)
@click.option("--to", "lowest", type=float, default=1e-5, show_default=True)
@click.option("--plot", type=click.Path(path_type=Path), default=Path("group-lasso-losses.png"), show_default=True)
def losses(data: Path, names: tuple[str, ...], steps: int, highest: float, lowest: float, plot: Path) -> None:
    """Accuracy against the share of non-zero rows, and seconds of each loss over the path of lam."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(names), figsize=(6 * len(names), 4), squeeze=False)
    print_head(["set", "loss", "seconds: least", "median", "most", "best accuracy"])
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        for name, axis in zip(names, axes[0], strict=True):
            train, test = converted(data, name, folder)
            for loss in LOSSES:
                seconds, shares, merits = [], [], []
                for lam in np.geomspace(highest, lowest, steps):
                    report = ours(train, folder / "model", float(lam), 1e-3, 200, loss=loss)
                    seconds.append(report["seconds"])
                    shares.append(100 * report["n_selected"] / xs.open_dataset(train).n_features)
                    merits.append(accuracy(folder / "model", test))
                axis.plot(shares, merits, marker="o", label=loss)
                print_line([
                    name, loss, f"{min(seconds):.2f}", f"{median(seconds):.2f}", f"{max(seconds):.2f}", f"{max(merits):.2f}",
                ])  # fmt: skip
            axis.set(xlabel="non-zero rows, %", ylabel="accuracy, %", title=name)
            axis.legend()
    figure.tight_layout()
    figure.savefig(plot, dpi=120)
    click.echo(f"{plot} written")


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--lam", type=float, default=1e-3, show_default=True)
@click.option("--passes", type=int, default=5, show_default=True)
def big(folder: Path, lam: float, passes: int) -> None:
    """500,000 rows and 200 classes: an array of 400 MB, under 512 MB and without a limit."""
    folder.mkdir(exist_ok=True)
    train = folder / "wide.xmc"
    if not train.exists():
        subprocess.run(
            [
                sys.executable, HERE.parent / "tools" / "make_synthetic.py", train, "--samples", "500000", "--features",
                "20000", "--features-per-sample", "20", "--labels", "200",
            ],
            check=True,
        )  # fmt: skip
    print_head(["limit", "seconds", "peak MB", "private MB", "objective", "digest"])
    for limit in ("512MB", "8GB"):
        model = folder / f"{limit}.model"
        settings = [
            word for item in (f"lam={lam}", f"max_passes={passes}", "loss=multitask") for word in ("--set", item)
        ]
        report = xmc(
            "train", train, model, "--solver", "group-lasso", "--memory-limit", limit, "--overwrite", *settings
        )
        about = xmc("info", model, "--digest")
        private = about["run"]["peak_private"]
        print_line([
            limit, f"{report['seconds']:.1f}", f"{report['peak_rss'] / 1e6:.0f}", f"{private / 1e6:.0f}",
            f"{report['objective']:.6f}", about["digest"][:16],
        ])  # fmt: skip


if __name__ == "__main__":
    main()
