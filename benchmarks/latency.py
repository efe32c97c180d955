"""How long one row and one text take, asked by one thread and by eight, and a fit of a small set; beside other programs.

    pip install -e '.[peers]'
    XMC_STREAM_DATA=... python benchmarks/latency.py [--repeats 3] [--only PROGRAM]

Rows are those of bibtex. Texts are made of 20news_bydate, which has no raw text: every feature of a row is a word, written
once. Each program fits and answers in a process of its own, one after another, and the whole so often again; a program that
is not installed is left out with a line. The notes under the tables say what is measured.
"""

from __future__ import annotations

import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np
import scipy.sparse
from commands import machine
from peer_programs import BEAM, PEERS, TOP, Clock, as_scipy, napkinxc_model
from peers import prepare

import xmc_stream as xs

ROWS, TEXTS = "bibtex", "20news_bydate"
PROGRAMS = ("napkinxc", "pecos", "sklearn")
CALLS, AT_ONCE, FITS = 1000, 8, 5
OURS = f"xmc-stream {version('xmc-stream')}"
NOTES = f"""
p50, p99: milliseconds of a call that has one row, or one text, and gives the best {TOP} labels; of {CALLS:,} calls, each of
another row, by one thread, then by {AT_ONCE} threads at once. cpu: processor time of a call of one thread, on average.
calls/s: of {AT_ONCE} threads. P@1: of the rows that were asked. first fit, fit: seconds of a fit from matrices in memory, the
first of a process, and the median of {FITS} that follow; fit cpu: the processor time of these; of the others the call that
fits (napkinXC saves as it fits). Each figure is the median of {{repeats}} runs. The others get their rows of a text by
scikit-learn's TfidfVectorizer, which makes the same features; each program uses one thread a call. Rows of a matrix are cut
out before."""

Ranker = Callable[[Any], Any]  # a row, or texts, to what has labels


def ours(data: Path, model: Path) -> tuple[list[Clock], Ranker, Ranker]:
    """Clocks of fits; the estimator, and the model that was saved."""
    texts, taken = (data / "train.xmc").exists(), []
    X, Y = (scipy.sparse.csr_matrix(scipy.sparse.load_npz(data / f"{name}.npz")) for name in ("X", "Y"))
    for _ in range(1 if texts else 1 + FITS):
        clock = Clock()
        with clock:
            clf = xs.PPDSparse(threads=1).fit(*((xs.open_dataset(data / "train.xmc"),) if texts else (X, Y)))
        taken.append(clock)
    saved = clf.save(model)

    def labels(answer: Any) -> Any:
        return answer[0][0]

    return taken, lambda x: labels(clf.predict_topk(x, TOP)), lambda x: labels(saved.predict_topk(x, TOP, threads=1))


def theirs(key: str, data: Path, model: Path) -> tuple[list[Clock], Ranker]:
    """Clocks of fits; what ranks."""
    texts, taken = (data / "vectorizer").exists(), []
    for i in range(1 if texts else 1 + FITS):
        clock = Clock()
        PEERS[key].fit(data, model.with_name(f"{model.name}-{i}"), 1, clock)
        taken.append(clock)
    rank = {"napkinxc": _napkinxc, "pecos": _pecos, "sklearn": _sklearn}[key](data, model.with_name(f"{model.name}-0"))
    if not texts:
        return taken, rank
    transform = pickle.loads((data / "vectorizer").read_bytes()).transform
    return taken, lambda x: rank(transform(x))


def _napkinxc(data: Path, model: Path) -> Ranker:
    program = napkinxc_model("one-vs-rest", data, model, 1)
    program.load()
    return lambda x: program.predict(x, top_k=TOP)[0]


def _pecos(data: Path, model: Path) -> Ranker:
    from pecos.xmc.xlinear.model import XLinearModel

    trained = XLinearModel.load(str(model), is_predict_only=True)

    def rank(x: Any) -> Any:
        found = trained.predict(x, beam_size=BEAM, only_topk=TOP, threads=1)
        return found.indices[np.argsort(-found.data, kind="stable")]

    return rank


def _sklearn(data: Path, model: Path) -> Ranker:
    classifier = pickle.loads((model / "model.pickle").read_bytes())

    def rank(x: Any) -> Any:
        scores = classifier.decision_function(x)[0]
        best = np.argpartition(-scores, TOP - 1)[:TOP]
        return best[np.argsort(-scores[best], kind="stable")]

    return rank


def clocked(rank: Ranker, asked: Sequence[Any], truth: Any) -> dict[str, float]:
    """The figures of one who ranks."""
    for x in asked[:20]:
        rank(x)

    def call(x: Any) -> tuple[float, Any]:
        began = time.perf_counter()
        labels = rank(x)
        return 1000 * (time.perf_counter() - began), labels

    before = time.process_time()
    alone = [call(x) for x in asked]
    processor = 1000 * (time.process_time() - before) / len(asked)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(rank, asked[: 2 * AT_ONCE]))
        began = time.perf_counter()
        together = list(pool.map(call, asked))
        seconds = time.perf_counter() - began
    best = [labels[0] for _, labels in alone]
    if [labels[0] for _, labels in together] != best:
        raise SystemExit("threads were given other answers")
    (p50, p99), (p50_8, p99_8) = (np.percentile([ms for ms, _ in calls], [50, 99]) for calls in (alone, together))
    right = np.asarray(truth[np.arange(len(best)), best]).ravel() > 0
    return {
        "p50": p50, "p99": p99, "cpu": processor, "8 p50": p50_8, "8 p99": p99_8, "calls/s": len(asked) / seconds,
        "P@1": 100 * float(right.mean()),
    }  # fmt: skip


def child(key: str, data: Path, out: Path) -> None:
    """Fit and answer: what a process of its own does."""
    if (data / "asked.json").exists():
        asked: list[Any] = [[text] for text in json.loads((data / "asked.json").read_text())]
    else:
        X = scipy.sparse.csr_matrix(scipy.sparse.load_npz(data / "test.npz"))
        asked = [X[i] for i in range(min(CALLS, X.shape[0]))]
    truth = scipy.sparse.csr_matrix(scipy.sparse.load_npz(data / "truth.npz"))
    if key == "xmc_stream":
        taken, estimator, model = ours(data, out.with_name("model"))
        rankers = {"xmc_stream PPDSparse, estimator": estimator, "xmc_stream PPDSparse, load_model": model}
    else:
        taken, rank = theirs(key, data, out.with_name("model"))
        rankers = {PEERS[key].name: rank}
    later = taken[1:] or taken
    fits = {
        "first fit": taken[0].seconds,
        "fit": statistics.median(clock.seconds for clock in later),
        "fit cpu": statistics.median(clock.processor for clock in later),
    }
    figures = {name: {**clocked(rank, asked, truth), **fits} for name, rank in rankers.items()}
    out.write_text(json.dumps(figures))


def add_truth(test: Path, data: Path) -> None:
    """The labels of the rows that are asked, as a file of `data`."""
    opened = xs.open_dataset(test)
    scipy.sparse.save_npz(data / "truth.npz", as_scipy(opened.Y_rows(), opened.n_labels))


def prepare_texts(source: Path, folder: Path) -> Path:
    """The set as texts: for us a dataset of them, for the others matrices and a vectorizer."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    _, test, data = prepare(source, folder, False)
    add_truth(test, data)
    X, T, Y = (scipy.sparse.csr_matrix(scipy.sparse.load_npz(data / f"{name}.npz")) for name in ("X", "test", "Y"))

    def words(matrix: Any) -> list[str]:
        return [" ".join(f"word{j}" for j in matrix.indices[a:b]) for a, b in pairwise(matrix.indptr)]

    texts, of_row = words(X), pairwise(Y.indptr)
    with open(folder / "train.jsonl", "w", encoding="utf-8") as file:
        for text, (a, b) in zip(texts, of_row, strict=True):
            file.write(json.dumps({"text": text, "labels": Y.indices[a:b].tolist()}) + "\n")
    xs.convert(folder / "train.jsonl", data / "train.xmc")
    vectorizer = TfidfVectorizer(sublinear_tf=True, dtype=np.float32)
    scipy.sparse.save_npz(data / "X.npz", vectorizer.fit_transform(texts), compressed=False)
    (data / "vectorizer").write_bytes(pickle.dumps(vectorizer))
    (data / "asked.json").write_text(json.dumps(words(T[:CALLS])))
    return data


@click.command()
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Of the whole.")
@click.option("--only", multiple=True, type=click.Choice(PROGRAMS), help="Not all the others but this one.")
@click.option("--child", "as_child", nargs=3, hidden=True, default=None, type=str)
def main(repeats: int, only: tuple[str, ...], as_child: tuple[str, str, str] | None) -> None:
    if as_child:
        child(as_child[0], Path(as_child[1]), Path(as_child[2]))
        return
    keys = ["xmc_stream"]
    for key in only or PROGRAMS:
        if PEERS[key].version is None:
            print(
                f"{PEERS[key].name}: skipped, {PEERS[key].package} is not installed (pip install 'xmc-stream[peers]')"
            )
        else:
            keys.append(key)
    sources = Path(os.environ["XMC_STREAM_DATA"])
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        _, test, rows = prepare(sources / ROWS, folder / ROWS, False)
        add_truth(test, rows)
        for what, data in (("row", rows), ("text", prepare_texts(sources / TEXTS, folder / TEXTS))):
            found: dict[str, list[dict[str, float]]] = {}
            versions = {}
            for repeat in range(repeats):
                for key in keys:
                    out = folder / f"{what}-{key}-{repeat}"
                    out.mkdir()
                    command = [sys.executable, __file__, "--child", key, str(data), str(out / "figures")]
                    done = subprocess.run(
                        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
                    )
                    if done.returncode:  # napkinXC 0.7.2 crashes when the process ends, its figures written
                        last = (done.stderr.strip().splitlines() or [""])[-1]
                        print(f"{key}: exit code {done.returncode} {last}".strip(), file=sys.stderr)
                    if not (out / "figures").exists():
                        continue
                    for name, figures in json.loads((out / "figures").read_text()).items():
                        found.setdefault(name, []).append({**figures, "load": os.getloadavg()[0]})
                        versions[name] = OURS if key == "xmc_stream" else PEERS[key].version
            show(what, found, versions)
    print(NOTES.format(repeats=repeats), machine(), sep="\n")


def show(what: str, found: dict[str, list[dict[str, float]]], versions: dict[str, Any]) -> None:
    """A table."""
    digits = {"p50": 3, "p99": 3, "cpu": 3, "8 p50": 3, "8 p99": 3, "calls/s": 0, "P@1": 1, "load": 1}
    digits |= {"first fit": 2, "fit": 2, "fit cpu": 2} if what == "row" else {}
    print(f"| one {what} | {' | '.join(digits)} | package |", "|" + "---|" * (len(digits) + 2), sep="\n")
    for name, runs in found.items():
        cells = (f"{statistics.median(run[column] for run in runs):.{n}f}" for column, n in digits.items())
        print(f"| {name} | {' | '.join(cells)} | {versions[name]} |", flush=True)


if __name__ == "__main__":
    main()
