"""PD-Sparse measured: accuracy, time against Crammer and Singer's machine, growth with the labels, sparsity against lam.

    python benchmarks/pdsparse.py accuracy FOLDER NAME ...      # NAME.xmc and NAME-test.xmc in FOLDER
    python benchmarks/pdsparse.py crammer rcv1.xmc rcv1-test.xmc
    python benchmarks/pdsparse.py growth FOLDER --labels 1000 --labels 4000 --labels 16000 --labels 64000
    python benchmarks/pdsparse.py sparsity FOLDER NAME ... --out sparsity.png

Commands of the library run one by one in processes of their own, on one thread. `sparsity` takes the extra `plot`.
"""

from __future__ import annotations

import math
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import scipy.sparse as sp
from commands import machine, run

from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.system.memory import format_size

GENERATOR = Path(__file__).resolve().parent.parent / "tools" / "make_synthetic.py"
PATH = click.Path(path_type=Path)


def train(data: Path, model: Path, settings: Sequence[str], limit: str) -> dict[str, Any]:
    shutil.rmtree(model, ignore_errors=True)
    options = [word for setting in settings for word in ("--set", setting)]
    return run("train", data, model, "--solver", "pdsparse", "--memory-limit", limit, "--threads", 1, *options)


def in_memory(matrix: SparseMatrix) -> sp.csr_matrix:
    block = matrix.block(0, matrix.n_lines)
    data = np.ones(len(block.indices), np.float32) if block.data is None else block.data
    return sp.csr_matrix((data, block.indices, block.indptr), matrix.shape)


@click.group()
def main() -> None:
    pass


@main.command()
@click.argument("folder", type=PATH)
@click.argument("names", nargs=-1, required=True)
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE")
@click.option("--limit", default="1GB", show_default=True)
def accuracy(folder: Path, names: tuple[str, ...], settings: tuple[str, ...], limit: str) -> None:
    """P@1, P@3, P@5 on test sets, passes, seconds, peak memory, sizes; then each pass's dual objective."""
    print(f"{machine()}; limit {limit}; {' '.join(settings) or 'defaults'}")
    for name in names:
        model = folder / f"{name}-pds.model"
        figures = train(folder / f"{name}.xmc", model, settings, limit)
        ranked = run("evaluate", model, folder / f"{name}-test.xmc", "--memory-limit", limit)
        print(
            f"{name:22} lam {figures['lam']:g}: P@1/3/5 {ranked['P@1']:.2f} {ranked['P@3']:.2f} {ranked['P@5']:.2f}; "
            f"best pass {figures['best_pass']} of {figures['rounds']}, {figures['seconds']:.1f} s, peak "
            f"{format_size(figures['peak_rss'])}, {figures['nnz']:,} weights, {format_size(figures['model_bytes'])}",
            flush=True,
        )
        for done in figures["history"]:
            held = f", P@1 {done['held_out_P@1']:.2f}" if "held_out_P@1" in done else ""
            print(f"    {done['stage']} {done['pass']}: dual {done['dual']:.0f}{held}, {done['nnz']:,} weights")
        shutil.rmtree(model)


@main.command()
@click.argument("data", type=PATH)
@click.argument("test", type=PATH)
@click.option("--limit", default="1GB", show_default=True)
@click.option(
    "--runs", default=5, show_default=True, help="In turn; scikit-learn's draws differ, and its time with them."
)
def crammer(data: Path, test: Path, limit: str, runs: int) -> None:
    """Time and accuracy against scikit-learn's LinearSVC(multi_class="crammer_singer"), both on one thread."""
    from sklearn.svm import LinearSVC

    print(machine())
    model = data.with_name("crammer.model")
    X, Y, X_test, Y_test = (
        in_memory(matrix) for path in (data, test) for matrix in (Dataset(path).X_rows(), Dataset(path).Y_rows())
    )
    y, y_test = (np.asarray(labels.argmax(axis=1)).ravel() for labels in (Y, Y_test))
    ratios = []
    for seed in range(runs):
        figures = train(data, model, (), limit)
        ours = run("evaluate", model, test, "--memory-limit", limit)["P@1"]
        shutil.rmtree(model)
        began = time.perf_counter()
        peer = LinearSVC(multi_class="crammer_singer", fit_intercept=False, C=1.0, random_state=seed)
        peer.fit(X.astype(np.float64), y)
        seconds = time.perf_counter() - began
        theirs = 100.0 * float((peer.predict(X_test.astype(np.float64)) == y_test).mean())
        ratios.append(figures["seconds"] / seconds)
        print(
            f"PD-Sparse {figures['seconds']:.1f} s, accuracy {ours:.2f}; crammer_singer {seconds:.1f} s, {theirs:.2f}: "
            f"{ratios[-1]:.2f} of its time",
            flush=True,
        )
    print(f"{statistics.median(ratios):.2f} of its time, median of {runs}")


@main.command()
@click.argument("folder", type=PATH)
@click.option("--labels", "sizes", multiple=True, type=int, default=(1000, 4000, 16000, 64000), show_default=True)
@click.option("--samples", default=50_000, show_default=True)
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE")
@click.option("--limit", default="4GB", show_default=True)
def growth(folder: Path, sizes: tuple[int, ...], samples: int, settings: tuple[str, ...], limit: str) -> None:
    """Seconds a pass and in all on generated sets that differ in the number of labels only."""
    folder.mkdir(parents=True, exist_ok=True)
    print(
        f"{machine()}; N = {samples:,}, D = 50,000, 30 features and one label a row; {' '.join(settings) or 'defaults'}"
    )
    before: tuple[int, float, float] | None = None
    for k in sizes:
        data = folder / f"growth-{k}.xmc"
        shape = (
            f"--samples {samples} --features 50000 --labels {k} --features-per-sample 30 --labels-per-sample 1".split()
        )
        subprocess.run([sys.executable, GENERATOR, data, *shape, "--overwrite"], check=True, stdout=subprocess.DEVNULL)
        figures = train(data, folder / "growth.model", settings, limit)
        per_pass = figures["seconds"] / figures["rounds"]
        line = f"K = {k:6,}: {per_pass:6.2f} s a pass, {figures['rounds']} passes, {figures['seconds']:7.1f} s"
        if before is not None:
            times = math.log(k / before[0])
            powers = (
                math.log(new / old) / times for new, old in ((per_pass, before[1]), (figures["seconds"], before[2]))
            )
            line += ", growing as K^{:.2f} a pass, K^{:.2f} in all".format(*powers)
        print(f"{line}; peak {format_size(figures['peak_rss'])}", flush=True)
        before = k, per_pass, figures["seconds"]
        shutil.rmtree(data)
        shutil.rmtree(folder / "growth.model")


@main.command()
@click.argument("folder", type=PATH)
@click.argument("names", nargs=-1, required=True)
@click.option("--lam", "lams", multiple=True, type=float, default=(0.001, 0.01, 0.1, 1.0, 10.0), show_default=True)
@click.option("--out", type=PATH, default=Path("sparsity.png"), show_default=True)
@click.option("--limit", default="1GB", show_default=True)
def sparsity(folder: Path, names: tuple[str, ...], lams: tuple[float, ...], out: Path, limit: str) -> None:
    """Weights, and labels with a != 0 of a row, against lam (Corollary 1 of the paper), as a table and a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    print(machine())
    figure, (both, active, hits) = pyplot.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    for name in names:
        nnz_w, nnz_a, per_row, first, five = [], [], [], [], []
        for lam in lams:
            model = folder / "sparsity.model"
            done = train(folder / f"{name}.xmc", model, (f"lam={lam:g}",), limit)["history"][-1]
            ranked = run("evaluate", model, folder / f"{name}-test.xmc", "--memory-limit", limit)
            nnz_w.append(done["nnz"])
            nnz_a.append(done["nnz_a"] * done["rows"])
            per_row.append(done["nnz_a"])
            first.append(ranked["P@1"])
            five.append(ranked["P@5"])
            print(
                f"{name:22} lam {lam:6g}: {done['nnz']:10,} weights, {nnz_a[-1]:10,.0f} a, {per_row[-1]:6.2f} of a row, "
                f"P@1/3/5 {ranked['P@1']:.2f} {ranked['P@3']:.2f} {ranked['P@5']:.2f}",
                flush=True,
            )
            shutil.rmtree(model)
        [line] = both.loglog(lams, nnz_w, "o-", label=f"{name}: weights")
        both.loglog(lams, nnz_a, "o--", color=line.get_color(), fillstyle="none", label=f"{name}: a")
        active.semilogx(lams, per_row, "o-", label=name)
        hits.semilogx(lams, first, "o-", label=f"{name}: P@1")
        Y = Dataset(folder / f"{name}.xmc").Y_rows()
        if Y.nnz > Y.n_lines:
            hits.semilogx(lams, five, "o--", color=line.get_color(), fillstyle="none", label=f"{name}: P@5")
    both.set(title="not 0 in all", xlabel="lam", ylabel="number")
    active.set(title="labels of a row with a != 0, on average", xlabel="lam", ylabel="labels", ylim=(0, None))
    hits.set(title="test set", xlabel="lam", ylabel="per cent", ylim=(0, 100))
    for part in (both, active, hits):
        part.set_xticks(lams, [f"{lam:g}" for lam in lams])
        part.minorticks_off()
        part.grid(alpha=0.3)
        part.legend(fontsize="small")
    figure.savefig(out, dpi=110)
    print(out)


if __name__ == "__main__":
    main()
