"""Threads that call one estimator, or one model, at once from cold: the serial answers, one loading, not a word, no leaks."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers import text_files
from helpers.commands import environment
from helpers.soak import first

import xmc_stream as xs
from xmc_stream.convert.options import TextOptions

CALLS = 48  # of each round

# of a pickle or a path, what is asked, and where answers go: several rounds of calls by threads, from cold
CHILD = """
import os, pickle, sys, threading, time
from pathlib import Path
import xmc_stream as xs
from xmc_stream.models import prediction

one, asked, out, n_threads, calls = (*sys.argv[1:4], *map(int, sys.argv[4:]))
asked = pickle.loads(Path(asked).read_bytes())
model = xs.load_model(one) if Path(one).is_dir() else pickle.loads(Path(one).read_bytes())
predicts = [model.predict_topk] + ([model.predict] if hasattr(model, "model_") else [])
kind = type(getattr(model, "model_", model))
prediction.predict_to = None  # which an engine runs
held, hold = [], kind.hold
kind.hold = lambda self, room: held.append(1) or hold(self, room)
answers, errors, counts, begin = {}, [], [], threading.Barrier(n_threads)

def tasks():
    before = counts[0][1] if counts else 0
    for _ in range(500):  # one that was joined may still be on its way out
        n = len(os.listdir("/proc/self/task"))
        if before and n <= before:
            break
        time.sleep(0.01 if before else 0.001)
    return n

def work(thread):
    begin.wait()
    try:
        for i in range(thread, calls, n_threads):
            for p, predict in enumerate(predicts):
                answers[p, i] = predict(asked[i % len(asked)])
    except BaseException as error:
        errors.append(repr(error))

for _ in range(3):
    threads = [threading.Thread(target=work, args=(i,)) for i in range(n_threads)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    counts.append([len(os.listdir("/proc/self/fd")), tasks()])
Path(out).write_bytes(pickle.dumps((answers, errors, counts, len(held))))
"""


def asked_in_threads(one: Path, asked: list[Any], folder: Path, n_threads: int) -> Any:
    (folder / "asked").write_bytes(pickle.dumps(asked))
    words = [sys.executable, "-c", CHILD, one, folder / "asked", folder / "out", n_threads, CALLS]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, env=environment(), check=True)
    assert (done.stdout, done.stderr) == ("", "")
    answers, errors, counts, n_held = pickle.loads((folder / "out").read_bytes())
    assert errors == []
    assert n_held == 1
    assert counts[-1] <= counts[0]
    return answers


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    return (one != other).nnz == 0 if sp.issparse(one) else np.array_equal(one, other)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts files and threads in /proc")
@pytest.mark.parametrize(("n_threads", "kind"), first([(8, "linear"), (6, "low-rank")]))
def test_matrices(n_threads: int, kind: str, tmp_path: Path) -> None:
    X = sp.random(400, 60, 0.2, format="csr", dtype=np.float32, random_state=0)
    Y = sp.csr_matrix((X @ np.random.default_rng(0).normal(size=(60, 30)) > 1.5).astype(np.float32))
    clf = (xs.PPDSparse() if kind == "linear" else xs.LEML(rank=5, alternations=1)).fit(X, Y)
    (tmp_path / "clf").write_bytes(pickle.dumps(clf))
    asked = [X[i] for i in range(20)] + [X[5:25], X[:3].toarray()]
    answers = asked_in_threads(tmp_path / "clf", asked, tmp_path, n_threads)
    assert len(answers) == 2 * CALLS
    for (p, i), found in answers.items():
        rows = asked[i % len(asked)]
        assert equal(found, clf.predict(rows) if p else clf.predict_topk(rows)), i


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts files and threads in /proc")
@pytest.mark.parametrize(("n_threads", "hashed"), first([(6, False), (8, True)]))
def test_texts(n_threads: int, hashed: bool, tmp_path: Path) -> None:
    documents = text_files.documents(200)
    source = text_files.write_jsonl(tmp_path / "train.jsonl", documents)
    how = TextOptions(hash_features=512) if hashed else None
    train = xs.convert(source, tmp_path / "train.xmc", text=how, memory_limit="2GB")
    model = xs.PPDSparse(max_rounds=1, memory_limit="2GB").fit(train, model=tmp_path / "m").model_
    asked = [[document["content"]] for document in documents[:20]] + [[json.dumps(document) for document in documents]]
    for (_, i), found in asked_in_threads(model.path, asked, tmp_path, n_threads).items():
        assert equal(found, model.predict_topk(asked[i % len(asked)])), i
