"""LEML: the paper's tables in form, the speed of an alternation beside scipy's, two worker processes beside one.

    python benchmarks/leml.py lam FOLDER bibtex corel5k delicious
    python benchmarks/leml.py tables bibtex.xmc bibtex-test.xmc --percent 40 --lam 1 --lam 3 --lam 10
    python benchmarks/leml.py missing bibtex.xmc bibtex-test.xmc --percent 40 --loss squared --lam 1 --lam 3 --no-bias
    python benchmarks/leml.py speed wordnet_hypernyms.xmc --rank 100 --rank 200
    python benchmarks/leml.py workers big.xmc --rank 50 --rank 100 --cg 5 --alternations 2
    python benchmarks/leml.py jobs big.xmc --rank 50 --rank 100 --cg 3

`lam` trains with the lam that is made of the data (FOLDER has bibtex.xmc and bibtex-test.xmc), with parts and multiples of
it, and with lam=1, ten alternations and no rows held out, which were the defaults once. `tables` trains at each rank and
loss, with the lam and the number of alternations that are best on a tenth of the rows.
`missing` gives a random part of the pairs (--observed 0.2), with each lam: beside it the same with the other pairs taken as
0, and ridge regression label by label on the same pairs. `speed` takes one alternation, and the same
algebra with the same number of conjugate gradient steps by scipy's sparse products in memory. `workers` takes W steps on a
dask cluster of one process and of two, and on one thread and two. `jobs` takes the processor seconds of these W steps' jobs,
one after another, for machines that are busy.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy.linalg
import scipy.sparse as sp

import xmc_stream as xs
from xmc_stream.lowrank.leml import LEMLRun
from xmc_stream.lowrank.parameters import LEMLParameters
from xmc_stream.runtime.job import Notes
from xmc_stream.runtime.plan import MemoryPlan
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.model import begin_model
from xmc_stream.system.memory import parse_size


def matrices(path: Path) -> tuple[Any, Any]:
    """X and Y of a dataset, in memory."""
    dataset, out = xs.open_dataset(path), []
    for matrix in (dataset.X_rows(), dataset.Y_rows()):
        block = matrix.block(0, matrix.n_lines)
        data = np.ones(len(block.indices), np.float32) if block.data is None else block.data
        out.append(sp.csr_matrix((data, block.indices, block.indptr.astype(np.int32)), shape=matrix.shape))
    return out[0], out[1]


def events(model: Path) -> list[dict[str, Any]]:
    """The jobs of a run, as its event log has them."""
    lines = (json.loads(line) for line in (model / "events.jsonl").read_text().splitlines())
    return [line for line in lines if "job" in line]


def alternation(X: Any, Y: Any, H: Any, lam: float, steps: int) -> tuple[Any, Any]:
    """W by so many conjugate gradient steps on (X^T X W M + lam W = X^T Y H), M = H^T H, from 0; then H in closed form."""
    Xt, M = X.T.tocsr(), H.T @ H
    W = np.zeros((X.shape[1], H.shape[1]), np.float32)
    residual = Xt @ (Y @ H)
    direction, square = residual.copy(), float(np.vdot(residual, residual))
    for _ in range(steps):
        image = Xt @ ((X @ direction) @ M) + np.float32(lam) * direction
        alpha = square / float(np.vdot(direction, image))
        W += np.float32(alpha) * direction
        residual -= np.float32(alpha) * image
        after = float(np.vdot(residual, residual))
        direction = residual + np.float32(after / square) * direction
        square = after
    A = X @ W
    gram = (A.T @ A).astype(np.float64) + lam * np.eye(A.shape[1])
    return W, scipy.linalg.cho_solve(scipy.linalg.cho_factor(gram), (Y.T @ A).T).T.astype(np.float32)


def speed(path: Path, ranks: list[int], threads: int, limit: str) -> None:
    """Seconds of one alternation, ours and scipy's, in turn."""
    X, Y = matrices(path)
    for rank in ranks:
        H = np.random.default_rng(0).normal(size=(Y.shape[1], rank)).astype(np.float32) / np.float32(rank**0.5)
        for _ in range(3):
            with tempfile.TemporaryDirectory() as folder:
                clf = xs.LEML(
                    rank=rank, lam=1.0, alternations=1, cg=20, cg_tol=0.0, held_out=0.0, memory_limit=limit,
                    threads=threads,
                )  # fmt: skip
                clf.fit(path, model=Path(folder) / "m", check=False)
                jobs = [job for job in events(Path(folder) / "m") if not job["job"].startswith(("start", "finalise"))]
                ours = jobs[-1]["time"] - min(job["time"] - job["seconds"] for job in jobs)
                products = clf.report_["history"][0]["products"]
            began = time.perf_counter()
            alternation(X, Y, H, 1.0, products)
            theirs = time.perf_counter() - began
            print(json.dumps({"rank": rank, "cg": products, "seconds": round(ours, 3), "scipy": round(theirs, 3),
                              "ratio": round(ours / theirs, 3)}), flush=True)  # fmt: skip


def w_steps(path: Path, n: int, processes: bool, parameters: dict[str, Any]) -> tuple[float, str]:
    """Seconds of the W steps but the first on so many workers of one thread, or threads of this process; the digest."""
    from cluster import Workers

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=path.parent.absolute()))
        where: dict[str, Any] = {"threads": n}
        if processes:
            where = {"scheduler": stack.enter_context(Workers(Path(folder), n, "8GB")).client}
        clf = xs.LEML(lam=1.0, cg_tol=0.0, tol=0.0, held_out=0.0, **parameters, **where)
        clf.fit(path, model=Path(folder) / "m", check=False)
        spans: dict[str, tuple[float, float]] = {}
        for job in events(Path(folder) / "m"):
            if job["job"].startswith("w/"):
                step = job["job"].split("/")[1]
                low, high = spans.get(step, (job["time"], job["time"]))
                spans[step] = min(low, job["time"] - job["seconds"]), max(high, job["time"])
        return sum(high - low for step, (low, high) in spans.items() if step != "1"), clf.model_.digest()


def workers(path: Path, ranks: list[int], cg: int, alternations: int, times: int, limit: str) -> None:
    """Seconds of W steps on one and two workers, and threads, in turn; the best of each, and whether models are the same."""
    for rank in ranks:
        parameters = {"rank": rank, "cg": cg, "alternations": alternations, "memory_limit": limit}
        found: dict[tuple[bool, int], float] = {}
        digests = set()
        for _, processes, n in itertools.product(range(times), (True, False), (1, 2)):
            seconds, digest = w_steps(path, n, processes, parameters)
            found[processes, n] = min(found.get((processes, n), seconds), seconds)
            digests.add(digest)
            what = "workers" if processes else "threads"
            print(json.dumps({"rank": rank, what: n, "W steps, seconds": round(seconds, 3)}), flush=True)
        ratios = {what: round(found[of, 1] / found[of, 2], 3) for what, of in (("workers", True), ("threads", False))}
        print(json.dumps({"rank": rank, "two against one": ratios, "same digest": len(digests) == 1}), flush=True)


def processor_seconds(path: Path, rank: int, cg: int, threads: int, limit: str) -> float:
    """Of the W step of an alternation planned for so many threads: in each phase those of the thread that has most to do.

    Its jobs run one after another, so that what else the machine does counts little.
    """
    p = LEMLParameters(rank=rank, lam=1.0, alternations=1, cg=cg, cg_tol=0.0, held_out=0.0)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        begin_model(Path(folder) / "m")
        size, notes = parse_size(limit), Notes()
        plan = MemoryPlan(size, size // 2, threads)
        loop = LEMLRun(Dataset(path), Path(folder) / "m", p, 0, plan, notes).loop()
        total = 0.0
        receipts: Any = None  # which begins it
        while notes.get("h/1") is None:
            phase, receipts, busy = loop.send(receipts), [], [0.0] * threads
            for job in phase.jobs:
                began = time.thread_time()
                receipts.append(job.run())
                busy[busy.index(min(busy))] += time.thread_time() - began
                if phase.kept:
                    notes.add(job.key, receipts[-1])
            total += max(busy) if phase.name.endswith(", W") else 0.0
    return total


def jobs(path: Path, ranks: list[int], cg: int, times: int, limit: str) -> None:
    """Processor seconds of W steps planned for one thread and for two, in turn; the best of each."""
    for rank in ranks:
        found = {1: float("inf"), 2: float("inf")}
        for _, threads in itertools.product(range(times), found):
            found[threads] = min(found[threads], processor_seconds(path, rank, cg, threads, limit))
        seconds = {f"threads {n}": round(of, 2) for n, of in found.items()}
        print(json.dumps({"rank": rank, **seconds, "ratio": round(found[1] / found[2], 3)}), flush=True)


def ridge_by_label(X: Any, Y: Any, mask: Any, lam: float) -> Any:
    """Weights (D x K): of each label, ridge regression on its known pairs."""
    W, known = np.zeros((X.shape[1], Y.shape[1])), mask.tocsc()
    for k in range(Y.shape[1]):
        rows = known.indices[known.indptr[k] : known.indptr[k + 1]]
        if len(rows):
            A, y = X[rows], np.asarray(Y[rows, k].todense()).ravel()
            gram = np.asarray((A @ A.T).todense()) + lam * np.eye(len(rows))
            W[:, k] = A.T @ np.linalg.solve(gram, y)
    return W


def train_and_test(
    folder: Path, data: Path, test: Path, parameters: dict[str, Any], limit: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures of the test set; the report."""
    shutil.rmtree(folder / "model", ignore_errors=True)
    clf = xs.LEML(memory_limit=limit, **parameters).fit(data, model=folder / "model")
    figures = xs.evaluate(folder / "model", xs.open_dataset(test))
    kept = {name: round(figures[name], 4) for name in ("P@1", "P@3", "P@5", "hamming_loss", "average_auc")}
    return kept, clf.report_


def chosen(folder: Path, data: Path, parameters: dict[str, Any], lams: list[float], limit: str) -> dict[str, Any]:
    """The lam, and the number of alternations, that are best on a tenth of the rows by P@1 + P@3 + P@5."""
    found: dict[float, dict[str, Any]] = {}
    for lam in lams:
        shutil.rmtree(folder / "model", ignore_errors=True)
        clf = xs.LEML(memory_limit=limit, lam=lam, held_out=0.1, refit=False, **parameters)
        clf.fit(data, model=folder / "model")
        score = sum(clf.report_[f"held_out_P@{k}"] for k in (1, 3, 5))
        found[lam] = {"score": score, "lam": lam, "alternations": clf.report_["best_pass"]}
    best = max(found.values(), key=lambda entry: entry["score"])
    return {**parameters, "lam": best["lam"], "alternations": best["alternations"], "tol": 0.0, "held_out": 0.0}


def lams(folder: Path, names: list[str], rank: int, losses: list[str], limit: str) -> None:
    """Figures of the test set and processor seconds, a line for each set, loss and lam."""
    for name, loss in itertools.product(names, losses):
        data, test = folder / f"{name}.xmc", folder / f"{name}-test.xmc"
        found = None
        for times in (1.0, 0.1, 0.3, 3.0, 10.0, None):
            options: dict[str, Any] = {"rank": rank, "loss": loss, "threads": 1}
            if times is None:
                options |= {"lam": 1.0, "held_out": 0.0}
            elif found is not None:
                options["lam"] = times * found
            with tempfile.TemporaryDirectory() as made:
                began = time.process_time()
                figures, report = train_and_test(Path(made), data, test, options, limit)
                seconds = time.process_time() - began
            found = found or report["lam"]
            about = {"times": times, "lam": float(f"{report['lam']:.3g}"), "alternations": report["best_pass"]}
            print(
                json.dumps({"set": name, "loss": loss, **about, **figures, "processor s": round(seconds, 1)}),
                flush=True,
            )


def tables(
    train: Path, test: Path, ranks: list[int], lams: list[float], losses: list[str], bias: bool, limit: str
) -> None:
    """Figures of the test set, a line for each rank and loss, lam and alternations by a tenth of the rows."""
    for rank, loss in itertools.product(ranks, losses):
        with tempfile.TemporaryDirectory() as name:
            asked = {"rank": rank, "loss": loss, "bias": bias}
            parameters = chosen(Path(name), train, asked, lams, limit)
            figures, report = train_and_test(Path(name), train, test, parameters, limit)
            about = {name: parameters[name] for name in ("rank", "loss", "lam", "alternations")}
            print(json.dumps({"set": test.stem, **about, **figures, "seconds": report["seconds"]}), flush=True)


def missing(
    train: Path,
    test: Path,
    ranks: list[int],
    lams: list[float],
    losses: list[str],
    bias: bool,
    limit: str,
    share: float,
) -> None:
    """Figures of the test set where a random share of the pairs is given, a line for each lam: of these, of these with the

    others taken as 0, of ridge regression label by label.
    """
    with tempfile.TemporaryDirectory() as name:
        mine, zeros = Path(name) / "data.xmc", Path(name) / "zeros.xmc"
        shutil.copytree(train, mine)
        dataset = xs.open_dataset(mine)
        draw = np.random.default_rng(1).random((dataset.n_samples, dataset.n_labels)) < share
        mask = sp.csr_matrix(draw)
        dataset.with_observed(mask, overwrite=True)
        X, Y = matrices(mine)
        xs.convert(X, zeros, labels=Y.multiply(mask).tocsr(), memory_limit=limit)
        for rank, loss, lam in itertools.product(ranks, losses, lams):
            about = {"set": test.stem, "given": share, "rank": rank, "loss": loss, "lam": lam}
            asked = {"rank": rank, "loss": loss, "lam": lam, "bias": bias, "held_out": 0.0}
            for pairs, data, observed in (("given", mine, "given"), ("the others as 0", zeros, "full")):
                figures, _ = train_and_test(Path(name), data, test, {**asked, "observed": observed}, limit)
                print(json.dumps({**about, "pairs": pairs, **figures}), flush=True)
        X_test, Y_test = matrices(test)
        for lam in lams:
            Z = X_test @ ridge_by_label(X, Y, mask, lam)
            print(json.dumps({"set": test.stem, "ridge by label": lam, **dense_figures(Z, Y_test)}), flush=True)


def dense_figures(Z: Any, Y: Any) -> dict[str, float]:
    """P@k and average AUC of scores in memory."""
    true, order = Y.toarray() > 0, np.argsort(-Z, axis=1, kind="stable")
    hits = np.take_along_axis(true, order, axis=1)
    n_true = true.sum(axis=1)
    places = (hits * np.arange(Z.shape[1])).sum(axis=1)  # true labels by rank: wrong pairs are the places before them
    pairs = n_true * (Z.shape[1] - n_true)
    wrong = places - n_true * (n_true - 1) / 2
    auc = np.where(pairs > 0, 1 - wrong / np.maximum(pairs, 1), 0.0).mean()
    return {
        **{f"P@{k}": round(100 * float(hits[:, :k].mean()), 4) for k in (1, 3, 5)},
        "average_auc": round(float(auc), 4),
    }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["lam", "tables", "missing", "speed", "workers", "jobs"])
    parser.add_argument("sets", type=Path, nargs="+", help="datasets; lam: their folder, and names")
    parser.add_argument("--rank", type=int, action="append")
    parser.add_argument("--lam", type=float, action="append")
    parser.add_argument("--loss", action="append")
    parser.add_argument("--percent", type=int, action="append", help="ranks, as parts of the labels")
    parser.add_argument("--observed", type=float, default=0.2)
    parser.add_argument("--no-bias", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cg", type=int, default=20)
    parser.add_argument("--alternations", type=int, default=3)
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--memory-limit", default="2GB")
    o = parser.parse_args()
    ranks = o.rank or [100]
    if o.what == "lam":
        lams(o.sets[0], list(map(str, o.sets[1:])), ranks[0], o.loss or ["squared"], o.memory_limit)
    elif o.what == "speed":
        speed(o.sets[0], ranks, o.threads, o.memory_limit)
    elif o.what == "workers":
        workers(o.sets[0], ranks, o.cg, o.alternations, o.times, o.memory_limit)
    elif o.what == "jobs":
        jobs(o.sets[0], ranks, o.cg, o.times, o.memory_limit)
    else:
        n_labels = xs.open_dataset(o.sets[0]).n_labels
        ranks = [round(n_labels * percent / 100) for percent in o.percent] if o.percent else ranks
        losses = o.loss or ["squared", "logistic", "squared_hinge"]
        common = o.sets[0], o.sets[1], ranks, o.lam or [1.0, 3.0, 10.0], losses, not o.no_bias, o.memory_limit
        if o.what == "tables":
            tables(*common)
        else:
            missing(*common, o.observed)


if __name__ == "__main__":
    main()
