"""Inner-product search: recall@1, candidates scored, time of a query, of building and of updating, for each oracle.

    python benchmarks/mips.py sets FOLDER NAME ... --scratch FOLDER
    python benchmarks/mips.py growth
    python benchmarks/mips.py training FOLDER NAME ...

`sets`: FOLDER holds NAME.train.xmc and NAME.test.xmc (or NAME.xmc and NAME-test.xmc), rows of length one. PPDSparse trains
two rounds into the scratch folder. Its weights are the class vectors, without the bias; test rows are the queries, each
without its rarest label. The hashing oracle works on W and X reduced to `--rank` coordinates by a truncated SVD of the
training rows, and is compared with the exact answer there. `growth`: made-up classes in clusters, for 1k to 64k classes.
`training`: steps w_y += x, w_r -= x from W = 0, r from a graph that is refreshed after each batch, for values of `drift`.
Processor seconds of one thread, the second of two queries; a row's share of them in microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
import scipy.sparse as sp
from commands import machine
from numpy.typing import NDArray

import xmc_stream as xs
from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.mips.exact import DenseExact, Exact
from xmc_stream.mips.kernels.classvectors import RankedRows
from xmc_stream.mips.kernels.innerproducts import Best
from xmc_stream.mips.lsh import SimpleLSH
from xmc_stream.mips.oracle import Oracle
from xmc_stream.mips.smallworld import SmallWorld
from xmc_stream.mips.vectors import ClassVectors, DenseVectors, ranked

T = TypeVar("T")
HEAD = f"{'classes':>18} {'oracle':28} {'recall@1':>8} {'scored':>8} {'us/query':>9} {'build s':>8} {'us/update':>9}"


def seconds(work: Callable[[], T]) -> tuple[T, float]:
    """A result, and the processor's seconds for it."""
    began = time.process_time()
    result = work()
    return result, time.process_time() - began


def sparse_vectors(W: sp.csr_matrix) -> ClassVectors:
    """Class vectors of the rows of a matrix."""
    vectors = ClassVectors(*W.shape, most_bytes=24 * W.nnz + 200 * W.shape[0])
    vectors.put(np.arange(W.shape[0]), rows_of(W))
    return vectors


def rows_of(X: sp.csr_matrix) -> RankedRows:
    """The rows of a matrix as oracles take them."""
    return ranked(CSR(X.indptr.astype(np.int64), X.indices, X.data))


def measure(
    what: str, name: str, make: Callable[[], Oracle], rows: Any, excluded: Labels, truth: Best | None = None
) -> tuple[Best, float]:
    """Build, query, update all classes, print a line; returns the answers, and microseconds a query."""
    make()  # compiles
    oracle, built = seconds(make)
    oracle.query(rows, excluded)
    oracle.scored = 0
    answers, took = seconds(lambda: oracle.query(rows, excluded))
    n = len(answers.classes)
    recall = (
        "exact" if truth is None else f"{np.mean(answers.scores >= truth.scores - 1e-5 * np.abs(truth.scores)):.3f}"
    )
    if isinstance(oracle, SmallWorld):
        oracle.drift = -1.0  # every class is linked anew
    _, updated = seconds(lambda: oracle.refresh(np.arange(oracle.n_classes)))
    print(
        f"{what:>18} {name:28} {recall:>8} {oracle.scored / n:8.0f} {took / n * 1e6:9.1f} {built:8.2f} "
        f"{updated / oracle.n_classes * 1e6:9.1f}",
        flush=True,
    )
    return answers, took / n * 1e6


def matrix(block: Any, width: int, ones: bool = False) -> sp.csr_matrix:
    """A block of rows, or of a matrix of ones."""
    values = np.ones(len(block.indices), np.float32) if ones else block.values
    return sp.csr_matrix((values, block.indices, block.indptr), shape=(len(block.indptr) - 1, width))


def reduced(train: sp.csr_matrix, rank: int, *others: sp.csr_matrix) -> list[NDArray[np.float32]]:
    """Matrices in the coordinates of a truncated SVD of the training rows."""
    from sklearn.decomposition import TruncatedSVD

    if train.shape[1] <= rank:
        return [other.toarray().astype(np.float32) for other in others]
    svd = TruncatedSVD(rank, n_iter=2, random_state=0).fit(train)
    return [svd.transform(other).astype(np.float32) for other in others]


@click.group()
def main() -> None:
    """Oracles of maximum inner products."""


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.argument("names", nargs=-1, required=True)
@click.option("--scratch", type=click.Path(path_type=Path), help="Folder of the models; FOLDER if not given.")
@click.option("--rows", default=8192, show_default=True, help="Queries, at most.")
@click.option("--rank", default=256, show_default=True, help="Coordinates of the reduced space.")
@click.option("--dense/--no-dense", default=True, show_default=True, help="The reduced space too.")
def sets(folder: Path, names: tuple[str, ...], scratch: Path | None, rows: int, rank: int, dense: bool) -> None:
    """Trained weights of real sets."""
    print(machine())
    print(HEAD)
    for name in names:
        data, test = folder / f"{name}.train.xmc", folder / f"{name}.test.xmc"
        if not data.exists():
            data, test = folder / f"{name}.xmc", folder / f"{name}-test.xmc"
        model = (scratch or folder) / f"{name}-two-rounds.model"
        if not model.exists():
            xs.PPDSparse(threads=1, memory_limit="4GB", max_rounds=2).fit(xs.open_dataset(data), model=model)
        W = xs.load_model(model).to_scipy().T.tocsr()
        queries, training = xs.open_dataset(test), xs.open_dataset(data)
        n = min(rows, queries.n_samples)
        X, Y = (
            matrix(queries.X_rows().block(0, n), W.shape[1]),
            matrix(queries.Y_rows().block(0, n), W.shape[0], ones=True),
        )
        excluded = rarest(Y, training.label_counts())
        vectors, queried = sparse_vectors(W), rows_of(X)
        print(
            f"{name}: K {W.shape[0]:,}, D {W.shape[1]:,}, {W.nnz:,} weights, {X.nnz / n:.1f} entries a row, {n:,} rows"
        )
        truth, _ = measure(name, "exact", partial(Exact, vectors), queried, excluded)
        measure(name, "sw-graph", partial(SmallWorld, vectors), queried, excluded, truth)
        if dense:
            some = matrix(training.X_rows().block(0, min(training.n_samples, 20000)), W.shape[1])
            w, x = reduced(some, rank, W, X)
            dense_lines(name, w, x, excluded)


def rarest(Y: sp.csr_matrix, counts: NDArray[np.int64]) -> Labels:
    """Of each row the label with the fewest samples, if it has any."""
    kept = [line[[np.argmin(counts[line])]] if len(line) else line for line in np.split(Y.indices, Y.indptr[1:-1])]
    return Labels(np.concatenate([[0], np.cumsum([len(line) for line in kept])]), np.concatenate(kept).astype(np.int32))


def dense_lines(
    name: str,
    w: NDArray[np.float32],
    x: NDArray[np.float32],
    excluded: Labels,
    shares: tuple[int, ...] = (32, 128, 512),
) -> tuple[float, float]:
    """The exact oracle and the hashing one with some numbers of candidates; microseconds of exact and default."""
    vectors = DenseVectors(len(w), w.shape[1], most_bytes=w.size * 4 + 9 * len(w))
    vectors.put(np.arange(len(w)), w)
    truth, exact = measure(name, f"exact, dense {w.shape[1]}", lambda: DenseExact(vectors), x, excluded)
    _, default = measure(name, "simple-lsh", lambda: SimpleLSH(vectors), x, excluded, truth)
    if len(w) > 1000:
        for bits in (64, 128, 256):
            for share in shares:
                measure(
                    name, f"simple-lsh, {bits} bits, 1/{share}",
                    partial(SimpleLSH, vectors, bits=bits, candidates=len(w) // share),
                    x, excluded, truth,
                )  # fmt: skip
        measure(name, "simple-lsh, no hubs", lambda: SimpleLSH(vectors, hubs=0), x, excluded, truth)
    return exact, default


def clustered(K: int, rng: np.random.Generator, n: int, D: int = 50_000) -> tuple[sp.csr_matrix, sp.csr_matrix]:
    """Classes of 96 weights, 2 in 3 of them on the 128 features of their cluster of 32 classes, and rows near classes.

    Features are drawn with frequencies like those of words: feature j in proportion to 1 / (j + 10).
    """
    frequency = np.cumsum(1.0 / (np.arange(D) + 10.0))

    def drawn(*size: int) -> NDArray[np.int64]:
        return np.asarray(np.searchsorted(frequency, rng.random(size) * frequency[-1]).clip(0, D - 1))

    features = drawn(-(-K // 32), 128)
    shared = np.take_along_axis(features[np.arange(K) // 32], rng.integers(0, 128, (K, 64)), axis=1)
    columns: NDArray[np.int64] = np.hstack([shared, drawn(K, 32)])
    values = rng.normal(0.3, 1.0, columns.shape).astype(np.float32) * rng.lognormal(0, 0.5, (K, 1)).astype(np.float32)
    W = sp.csr_matrix((values.ravel(), columns.ravel(), 96 * np.arange(K + 1)), shape=(K, D))
    W.sum_duplicates()
    of = rng.integers(0, K, n)
    picked = np.take_along_axis(columns[of], rng.integers(0, 96, (n, 20)), axis=1)
    both = np.hstack([picked, drawn(n, 10)])
    weights = np.hstack([np.take_along_axis(values[of], rng.integers(0, 96, (n, 20)), axis=1), np.zeros((n, 10))])
    weights = np.abs(weights) + rng.random(weights.shape) * 0.5
    X = sp.csr_matrix((weights.ravel().astype(np.float32), both.ravel(), 30 * np.arange(n + 1)), shape=(n, D))
    X.sum_duplicates()
    return W, X


def clustered_dense(
    K: int, rng: np.random.Generator, n: int, r: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Classes around the centres of K / 32 clusters, coordinates of falling scale, and rows near classes."""
    scale = (1.0 / np.sqrt(1.0 + np.arange(r))).astype(np.float32)
    centres = rng.standard_normal((-(-K // 32), r), np.float32)
    w = (centres[np.arange(K) // 32] + 0.7 * rng.standard_normal((K, r), np.float32)) * scale
    x = w[rng.integers(0, K, n)] + 0.7 * rng.standard_normal((n, r), np.float32) * scale
    return w, x


@main.command()
@click.option("--rows", default=2048, show_default=True, help="Queries; a tenth of them in the dense space.")
@click.option("--rank", default=256, show_default=True, help="Coordinates of the dense space.")
@click.option("--most", default=64, show_default=True, help="Classes, in thousands.")
def growth(rows: int, rank: int, most: int) -> None:
    """Time of a query as the classes grow, and its exponent."""
    print(machine())
    print(HEAD)
    times: dict[str, list[float]] = {}
    sizes = [K for K in (1000, 4000, 16_000, 64_000) if most * 1000 >= K]
    for K in sizes:
        rng = np.random.default_rng(K)
        W, X = clustered(K, rng, rows)
        vectors, queried, nobody = (
            sparse_vectors(W),
            rows_of(X),
            Labels(np.zeros(rows + 1, np.int64), np.empty(0, np.int32)),
        )
        truth, took = measure(f"{K:,}", "exact", partial(Exact, vectors), queried, nobody)
        times.setdefault("exact", []).append(took)
        _, took = measure(f"{K:,}", "sw-graph", partial(SmallWorld, vectors), queried, nobody, truth)
        times.setdefault("sw-graph", []).append(took)
        n = max(rows // 10, 64)
        w, x = clustered_dense(K, rng, n, rank)
        nobody = Labels(np.zeros(n + 1, np.int64), np.empty(0, np.int32))
        both = dense_lines(f"{K:,}", w, x, nobody, shares=(32, 128, 512) if sizes[-1] == K else ())
        for name, took in zip(("exact, dense", "simple-lsh"), both, strict=True):
            times.setdefault(name, []).append(took)
    for name, line in times.items():
        exponent = np.polyfit(np.log(sizes), np.log(line), 1)[0] if len(sizes) > 1 else float("nan")
        print(f"{name:14} us a query for K = {sizes}: {[round(t, 1) for t in line]}; grows as K^{exponent:.2f}")


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.argument("names", nargs=-1, required=True)
@click.option("--steps", default=12, show_default=True)
def training(folder: Path, names: tuple[str, ...], steps: int) -> None:
    """A graph that follows a training."""
    print(machine())
    print(f"{'set':>18} {'drift':>6} {'linked':>8} {'recall@1 of every third step':40} {'query s':>8} {'refresh s':>9}")
    for name in names:
        data = xs.open_dataset(folder / f"{name}.train.xmc")
        K, batch = data.n_labels, 100 * int(np.sqrt(data.n_labels))
        n = min(data.n_samples, batch * steps)
        X = matrix(data.X_rows().block(0, n), data.n_features)
        Y = matrix(data.Y_rows().block(0, n), K, ones=True)
        for drift in (0.0, 0.1, 0.25, 0.5):
            vectors = ClassVectors(K, data.n_features, 1 << 30)
            graph, reference = SmallWorld(vectors, drift=drift), Exact(vectors)
            recalls, took, touched = [], np.zeros(2), 0
            for step in range(steps):
                first = step * batch % n
                some, labels = rows_of(X[first : first + batch]), Y[first : first + batch]
                excluded = rarest(labels, data.label_counts())
                answers, a = seconds(partial(graph.query, some, excluded, step))
                if step % 3 == 2:
                    truth = reference.query(some, excluded, step)
                    recalls.append(np.mean(answers.scores >= truth.scores - 1e-5 * np.abs(truth.scores)))
                lines = np.flatnonzero(np.diff(excluded.indptr) & (answers.classes >= 0))
                own, wrong = excluded.indices[excluded.indptr[lines]], answers.classes[lines]
                one = np.ones(len(lines), np.float32)
                vectors.add(np.concatenate([own, wrong]), np.tile(lines, 2), np.concatenate([one, -one]), some)
                changed = np.unique(np.concatenate([own, wrong]))
                _, b = seconds(partial(graph.refresh, changed))
                took, touched = took + np.array([a, b]), touched + len(changed)
            shown = " ".join(f"{recall:.3f}" for recall in recalls)
            print(
                f"{name:>18} {drift:6} {graph.linked_anew / touched:8.2f} {shown:40} {took[0]:8.2f} {took[1]:9.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
