"""The other programs, at their defaults and at published settings: what benchmarks/peers.py runs, each in a process.

    python benchmarks/peer_programs.py fit|predict PROGRAM DATA MODEL OUT THREADS

DATA is a folder with X.npz and Y.npz (training set), test.npz (features of the test set) and train.txt (the training
set as text). `fit` leaves MODEL; `predict` writes the best five labels of each row to OUT.npy, -1 where fewer. Both
write seconds and peak memory to OUT.json. Only the clocked line of a function is measured.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse

from xmc_stream.system.memory import peak_resident

if TYPE_CHECKING:  # where programs run, there is little else
    from xmc_stream.store.dataset import Dataset
    from xmc_stream.store.matrix import SparseMatrix

TOP = 5
BEAM = 10
TREES = 3
_SCORED = 1 << 24  # scores that scikit-learn's matrices of them hold at a time


def as_scipy(matrix: SparseMatrix, n_columns: int) -> scipy.sparse.csr_matrix:
    """A stored matrix in memory, the very float32 values."""
    block = matrix.block(0, matrix.n_lines)
    data = np.ones(len(block.indices), np.float32) if block.data is None else block.data
    return scipy.sparse.csr_matrix((data, block.indices, block.indptr), shape=(block.n, n_columns))


def write_matrices(
    train: Dataset, test: Dataset, folder: Path
) -> tuple[scipy.sparse.csr_matrix, scipy.sparse.csr_matrix]:
    """What programs read, but the text, into a new folder; returns X and Y of the training set."""
    folder.mkdir(parents=True)
    X, Y = as_scipy(train.X_rows(), train.n_features), as_scipy(train.Y_rows(), train.n_labels)
    for name, matrix in (("X", X), ("Y", Y), ("test", as_scipy(test.X_rows(), train.n_features))):
        scipy.sparse.save_npz(folder / f"{name}.npz", matrix, compressed=False)
    return X, Y


class Clock:
    """`with clock:` around what is measured."""

    seconds = processor = 0.0

    def __enter__(self) -> None:
        self._began, self._before = time.perf_counter(), time.process_time()

    def __exit__(self, *_: object) -> None:
        self.seconds, self.processor = time.perf_counter() - self._began, time.process_time() - self._before


def _load(data: Path, name: str) -> scipy.sparse.csr_matrix:
    return scipy.sparse.csr_matrix(scipy.sparse.load_npz(data / f"{name}.npz"))


def _padded(ranked: list[Any]) -> np.ndarray:
    """Labels of each row, best first, as one array (n, 5)."""
    labels = np.full((len(ranked), TOP), -1, np.int64)
    for row, best in zip(labels, ranked, strict=True):
        row[: len(best)] = best[:TOP]
    return labels


def napkinxc_model(name: str, data: Path, model: Path, threads: int) -> Any:
    from napkinxc import models

    if name == "one-vs-rest":
        # its two forms train the same classifiers; OVR is the one for a single label a row
        single = np.all(np.diff(_load(data, "Y").indptr) == 1)
        return (models.OVR if single else models.BR)(str(model), threads=threads)
    # of the final results of "Probabilistic Label Trees for Extreme Multi-label Classification": napkinXC,
    # experiments/plt_jmlr/plt_final.sh, with the C that it gives where it names none for a set
    final = {"ensemble": 3, "arity": 16, "kmeans_balanced": False, "liblinear_eps": 0.1} if name == "plt-final" else {}
    return models.PLT(str(model), threads=threads, seed=1, **final)


def _fit_napkinxc(name: str) -> Callable[..., None]:
    def fit(data: Path, model: Path, threads: int, clock: Clock) -> None:
        program = napkinxc_model(name, data, model, threads)
        X, Y = _load(data, "X"), _load(data, "Y")
        with clock:
            program.fit(X, Y)

    return fit


def _predict_napkinxc(name: str) -> Callable[..., np.ndarray]:
    def predict(data: Path, model: Path, threads: int, clock: Clock) -> np.ndarray:
        program, X = napkinxc_model(name, data, model, threads), _load(data, "test")
        program.load()
        with clock:
            ranked = program.predict(X, top_k=TOP)
        return _padded(ranked)

    return predict


def _fit_pecos(data: Path, model: Path, threads: int, clock: Clock) -> None:
    from pecos.xmc import Indexer, LabelEmbeddingFactory
    from pecos.xmc.xlinear.model import XLinearModel

    X, Y = _load(data, "X"), _load(data, "Y").tocsc()
    with clock:
        features = LabelEmbeddingFactory.create(Y, X, method="pifa", threads=threads)
        tree = Indexer.gen(features, indexer_type="hierarchicalkmeans", threads=threads)
        trained = XLinearModel.train(X, Y, C=tree, threads=threads)
    trained.save(str(model))


def _predict_pecos(data: Path, model: Path, threads: int, clock: Clock) -> np.ndarray:
    from pecos.xmc.xlinear.model import XLinearModel

    X = _load(data, "test")
    trained = XLinearModel.load(str(model), is_predict_only=True)
    with clock:
        scores = trained.predict(X, beam_size=BEAM, only_topk=TOP, threads=threads)
    rows = [slice(first, last) for first, last in zip(scores.indptr, scores.indptr[1:], strict=False)]
    return _padded([scores.indices[row][np.argsort(-scores.data[row], kind="stable")] for row in rows])


def _fit_omikuji(**more: Any) -> Callable[..., None]:
    """more: settings that are not the defaults."""

    def fit(data: Path, model: Path, threads: int, clock: Clock) -> None:
        from omikuji import Model

        settings = Model.default_hyper_param()
        settings.n_trees = TREES
        for name, value in more.items():
            setattr(settings, name, value)
        with clock:  # it takes the data from a file only
            trained = Model.train_on_data(str(data / "train.txt"), settings, threads)
        trained.save(str(model))

    return fit


def _predict_omikuji(data: Path, model: Path, threads: int, clock: Clock) -> np.ndarray:
    from omikuji import Model

    X = _load(data, "test")
    trained = Model.load(str(model))
    trained.init_prediction_thread_pool(threads)
    rows = zip(X.indptr, X.indptr[1:], strict=False)
    pairs = [list(zip(X.indices[a:b].tolist(), X.data[a:b].tolist(), strict=True)) for a, b in rows]
    with clock:  # it takes one row a call
        ranked = [trained.predict(row, beam_size=BEAM, top_k=TOP) for row in pairs]
    return _padded([[label for label, _ in best] for best in ranked])


def _fit_sklearn(data: Path, model: Path, threads: int, clock: Clock) -> None:
    from joblib import parallel_config
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.svm import LinearSVC

    X, Y = _load(data, "X"), _load(data, "Y").astype(np.int64)  # int8 overflows in it
    classifier = OneVsRestClassifier(LinearSVC(), n_jobs=threads)
    with clock, parallel_config("threading"):  # LinearSVC gives the interpreter's lock free; one process to measure
        classifier.fit(X, Y)
    model.mkdir()
    (model / "model.pickle").write_bytes(pickle.dumps(classifier, pickle.HIGHEST_PROTOCOL))


def _predict_sklearn(data: Path, model: Path, threads: int, clock: Clock) -> np.ndarray:
    X = _load(data, "test")
    unseen = np.diff(_load(data, "Y").tocsc().indptr) == 0
    classifier = pickle.loads((model / "model.pickle").read_bytes())
    n_labels = len(unseen)
    labels = np.full((X.shape[0], TOP), -1, np.int64)
    step, k = max(_SCORED // n_labels, 1), min(TOP, n_labels)
    with clock:
        for start in range(0, X.shape[0], step):
            scores = classifier.decision_function(X[start : start + step])
            scores[:, unseen] = -np.inf  # its constant classifier would put them above every negative
            best = np.argpartition(-scores, k - 1, axis=1)[:, :k]
            order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1, kind="stable")
            labels[start : start + step, :k] = np.take_along_axis(best, order, axis=1)
    return labels


@dataclass(frozen=True)
class Peer:
    """A program: its name in the table, the package it is in, what fits and predicts; most_labels it is run on.

    text: it reads the training set as text.
    """

    name: str
    module: str
    package: str
    fit: Callable[[Path, Path, int, Clock], None]
    predict: Callable[[Path, Path, int, Clock], np.ndarray]
    most_labels: int | None = None
    text: bool = False

    @property
    def version(self) -> str | None:
        """What is installed, None if it is not."""
        return None if find_spec(self.module) is None else f"{self.package} {version(self.package)}"


PEERS = {
    "napkinxc": Peer(
        "napkinXC one-vs-rest", "napkinxc", "napkinxc", _fit_napkinxc("one-vs-rest"), _predict_napkinxc("one-vs-rest")
    ),
    "napkinxc-plt": Peer("napkinXC PLT", "napkinxc", "napkinxc", _fit_napkinxc("plt"), _predict_napkinxc("plt")),
    "napkinxc-plt-final": Peer(
        "napkinXC 3 PLTs, arity 16", "napkinxc", "napkinxc", _fit_napkinxc("plt-final"), _predict_napkinxc("plt-final")
    ),
    "pecos": Peer(f"PECOS XR-Linear, beam {BEAM}", "pecos", "libpecos", _fit_pecos, _predict_pecos),
    "omikuji": Peer(f"Omikuji Parabel, {TREES} trees", "omikuji", "omikuji", _fit_omikuji(), _predict_omikuji, text=True),
    # the settings of highest precision in its README: "regular k-means for shallow trees", after Bonsai
    "omikuji-bonsai": Peer(
        f"Omikuji Bonsai, {TREES} trees", "omikuji", "omikuji",
        _fit_omikuji(cluster_balanced=False, cluster_k=100, max_depth=3), _predict_omikuji, text=True,
    ),
    "sklearn": Peer("OneVsRest(LinearSVC)", "sklearn", "scikit-learn", _fit_sklearn, _predict_sklearn, 1000),
}  # fmt: skip


def main(action: str, program: str, data: Path, model: Path, out: Path, threads: int) -> None:
    peer, clock = PEERS[program], Clock()
    if action == "fit":
        peer.fit(data, model, threads, clock)
    else:
        np.save(out.with_suffix(".npy"), peer.predict(data, model, threads, clock))
    figures = {"seconds": clock.seconds, "processor": clock.processor, "peak_rss": peak_resident()}
    out.with_suffix(".json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]), int(sys.argv[6]))
