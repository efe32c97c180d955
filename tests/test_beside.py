"""Matrices beside an input: their columns behind its own, scaled each by itself; so of test sets and for predictions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import text_files
from helpers.commands import environment
from helpers.conversions import cut_into, dense, refused
from scipy import sparse
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.preprocessing import normalize

import xmc_stream as xs
from xmc_stream.convert.matrices import sides
from xmc_stream.convert.options import TextOptions
from xmc_stream.convert.pieces import PieceRows
from xmc_stream.errors import InputError
from xmc_stream.models import Execution
from xmc_stream.models.samples import samples
from xmc_stream.store.names import open_vectorizer

N, D = 300, 9
DOCUMENTS = text_files.documents(N)
DOCUMENTS[5]["title"] = DOCUMENTS[5]["content"] = ""  # a row without words
TEXTS = [f"{d['title']}\n{d['content']}" for d in DOCUMENTS]
EXECUTION = Execution("2GB", threads=1)


def vectors(n: int = N, seed: int = 0) -> Any:
    V = np.random.default_rng(seed).normal(size=(n, D)).astype(np.float32) * 7
    V[3] = 0
    V[4, ::2] = 0
    return V


def saved(folder: Path, form: str, V: Any, name: str = "v") -> Path:
    if form == "npy":
        np.save(folder / f"{name}.npy", V)
        return folder / f"{name}.npy"
    path = folder / f"{name}.npz"
    if form == "stored":
        np.savez(path, V)
    elif form == "deflated":
        np.savez_compressed(path, X=V)
    elif form == "csr stored":
        sparse.save_npz(path, sparse.csr_matrix(V), compressed=False)
    else:
        sparse.save_npz(path, sparse.csr_matrix(V).asformat(form))
    return path


def converted(source: Path, name: str, **options: Any) -> xs.Dataset:
    return xs.convert(source, source.parent / name, memory_limit="2GB", **options)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return text_files.write_jsonl(tmp_path / "in.jsonl", DOCUMENTS)


FORMS = ["npy", "stored", "deflated", "csr stored", "csr", "csc"]


@pytest.mark.parametrize("form", FORMS)
def test_columns_stand_behind_the_words(
    form: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    V = vectors()
    path = saved(tmp_path, form, V)
    whole = converted(source, "whole.xmc", beside=path)
    oracle = TfidfVectorizer(sublinear_tf=True)
    expected = np.hstack([oracle.fit_transform(TEXTS).toarray(), normalize(V)])
    np.testing.assert_allclose(dense(whole)[0], normalize(expected), rtol=3e-6, atol=1e-9)
    n_words = len(oracle.vocabulary_)
    names = list(whole.feature_names() or ())
    assert names == [*oracle.get_feature_names_out(), *(f"{path.name}:{i}" for i in range(D))]
    assert whole.attributes["beside"] == [{"source": path.name, "n_features": D}]
    assert xs.verify(whole.path, memory_limit="2GB", threads=1)["sound"]
    _, idf = open_vectorizer(whole.path) or ({}, None)
    assert idf is not None
    np.testing.assert_allclose(idf.read(0, idf.size), [*oracle.idf_, *[1.0] * D])
    cut_into(monkeypatch, 20_000)
    monkeypatch.setattr(sides, "BLOCK", 40)
    monkeypatch.setattr(PieceRows, "ENTRIES", 64)
    monkeypatch.setattr(PieceRows, "ROWS", 11)
    cut = converted(source, "cut.xmc", beside=path)
    assert cut.fingerprint == whole.fingerprint
    assert n_words + D == cut.n_features


def test_values_stay_where_rows_are_not_scaled(tmp_path: Path) -> None:
    """XMLRepo text with ids from one, and two matrices."""
    rng = np.random.default_rng(1)
    X = sparse.random_array((40, 12), density=0.3, rng=rng, dtype=np.float32).toarray()
    lines = [" ".join(f"{j + 1}:{v!r}" for j, v in enumerate(row.tolist()) if v) for row in X]
    (tmp_path / "x.txt").write_text("40 12 3\n" + "".join(f"1 {line}\n" for line in lines))
    V, W = vectors(40), vectors(40, 1)[:, :2]
    paths = [saved(tmp_path, "npy", V), saved(tmp_path, "csr", W, "w")]
    dataset = converted(tmp_path / "x.txt", "d.xmc", beside=paths, base=1)
    assert (dense(dataset)[0] == np.hstack([X, V, W])).all()
    assert dataset.feature_names() is None
    again = converted(tmp_path / "x.txt", "again.xmc", beside=paths, like=dataset)
    assert again.fingerprint == dataset.fingerprint
    scaled = converted(tmp_path / "x.txt", "scaled.xmc", beside=paths, base=1, normalize="l2")
    parts = [normalize(part) for part in (X, V, W)]
    np.testing.assert_allclose(dense(scaled)[0], normalize(np.hstack(parts)), rtol=1e-6)


def test_a_matrix_in_memory_has_a_file_beside(tmp_path: Path) -> None:
    X = sparse.csr_matrix(np.random.default_rng(2).random((N, 4)).astype(np.float32))
    dataset = xs.convert(X, tmp_path / "d.xmc", labels=X, beside=saved(tmp_path, "csr", vectors()), memory_limit="2GB")
    assert (dense(dataset)[0] == np.hstack([X.toarray(), vectors()])).all()
    with pytest.raises(
        InputError, match=r"beside must be paths of files here, not ndarray: save a matrix by numpy\.save"
    ):
        xs.convert(X, tmp_path / "no.xmc", labels=X, beside=vectors())


def test_a_test_set_needs_the_same_matrices(source: Path, tmp_path: Path) -> None:
    train = converted(source, "train.xmc", beside=saved(tmp_path, "npy", vectors()), text=TextOptions(min_df=2))
    others = text_files.write_jsonl(tmp_path / "test.jsonl", DOCUMENTS[:20])
    V = saved(tmp_path, "stored", vectors()[:20], "other")
    test = converted(others, "test.xmc", beside=V, like=train)
    assert test.n_features == train.n_features
    assert list(test.feature_names() or ()) == list(train.feature_names() or ())
    assert (dense(test)[0] == dense(train)[0][:20]).all()
    again = converted(others, "again.xmc", beside=V, like=test)
    assert again.fingerprint == test.fingerprint
    for options, message in (
        ({"like": train}, r"train.xmc has 9 features of matrices beside, and 0 are given: name a matrix for each"),
        ({"like": train, "beside": [V, V]}, "and 2 are given"),
        (
            {"like": train, "beside": saved(tmp_path, "npy", vectors()[:20, :4], "few")},
            "few.npy has 4 columns and what",
        ),
        (
            {"like": train, "beside": saved(tmp_path, "npy", vectors()[:19], "short")},
            "has 19 rows and the input 20: a row",
        ),
        ({"beside": V, "skip": True}, "bad rows cannot be left out"),
        ({"beside": others}, "test.jsonl is not a matrix to stand beside others"),
        ({"beside": tmp_path / "none.npy"}, "none.npy"),
        ({"beside": saved(tmp_path, "npy", vectors()[:20] * np.nan, "nan")}, r"row 0 \(from 0\) is not finite"),
    ):
        with pytest.raises(InputError, match=message):
            converted(others, "no.xmc", **options)
        assert not list(tmp_path.glob("no.xmc*"))
    plain = converted(others, "plain.xmc")
    assert "plain.xmc has no features of a matrix beside, and 1 are given" in refused(
        tmp_path / "no", others, like=plain, beside=V
    )


def test_a_word_that_is_called_as_a_column_is_a_word(tmp_path: Path) -> None:
    text = TextOptions(token_pattern=r"[^\s]+")
    source = text_files.write_jsonl(tmp_path / "in.jsonl", [{"text": "a word", "labels": ["x"]}])
    train = converted(source, "train.xmc", beside=saved(tmp_path, "npy", np.ones((1, D))), text=text)
    other = text_files.write_jsonl(tmp_path / "other.jsonl", [{"text": "word v.npy:0 zebra", "labels": ["x"]}])
    test = converted(other, "test.xmc", beside=saved(tmp_path, "npy", np.ones((1, D))), like=train)
    assert test.attributes["unknown_words"] == 2
    assert (dense(test)[0] > 0).tolist() == [[False, True, *[True] * D]]


def test_hashed_words_beside_vectors(source: Path, tmp_path: Path) -> None:
    path = saved(tmp_path, "npy", vectors())
    train = converted(source, "train.xmc", beside=path, text=TextOptions(hash_features=64))
    assert train.n_features == 64 + D
    assert train.feature_names() is None
    assert converted(source, "again.xmc", beside=path, like=train).fingerprint == train.fingerprint
    assert xs.verify(train.path, memory_limit="2GB", threads=1)["sound"]


def test_a_text_and_a_vector_predict_together(tmp_path: Path) -> None:
    """Labels that only both together tell."""
    n = 400
    marks, places = np.arange(n) % 2, np.arange(n) // 2 % 3
    rows = [{"text": f"about mark{m}", "labels": [f"{m}-{p}"]} for m, p in zip(marks, places, strict=True)]
    source = text_files.write_jsonl(tmp_path / "in.jsonl", rows)
    path = saved(tmp_path, "npy", np.eye(3, dtype=np.float32)[places])
    train = converted(source, "train.xmc", beside=path)
    model = xs.PPDSparse(memory_limit="2GB", threads=1).fit(train, model=tmp_path / "m").model_
    new = text_files.write_jsonl(
        tmp_path / "new.jsonl", [{"text": "on mark1"}, {"text": "on mark1"}, {"text": "mark0"}]
    )
    V = saved(tmp_path, "npy", np.eye(3)[[0, 2, 1]], "new")
    with samples(new, model, tmp_path, EXECUTION, beside=V) as dataset:
        xs.predict(model, dataset, tmp_path / "p.jsonl", 1, memory_limit="2GB", threads=1)
    told = [json.loads(line)["labels"] for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert told == [["1-0"], ["1-2"], ["0-1"]]
    with (
        pytest.raises(InputError, match="m has 3 features of matrices beside, and 0 are given"),
        samples(new, model, tmp_path, EXECUTION),
    ):
        pass
    parts = xs.split(train, tmp_path / "a.xmc", tmp_path / "b.xmc", memory_limit="2GB")
    with pytest.raises(InputError, match="3 features of matrices beside"):
        xs.convert(new, tmp_path / "c.xmc", like=parts["train"], memory_limit="2GB")


@pytest.mark.slow
def test_the_commands(source: Path, tmp_path: Path, commands: Callable[..., Any]) -> None:
    path = saved(tmp_path, "npy", vectors())
    planned = commands("plan", "convert", source, tmp_path / "x", "--beside", path)
    assert planned["fits"]
    told = commands("convert", source, tmp_path / "d.xmc", "--beside", path)
    assert told["bytes_in"] == source.stat().st_size + path.stat().st_size
    assert "beside 9 features of v.npy" in told["said"]
    assert planned["nnz_features"] == told["nnz_features"] or planned["nnz_features"] > 0
    message = commands("convert", source, tmp_path / "no.xmc", "--like", tmp_path / "d.xmc", fails=True)
    assert "name a matrix for each by --beside" in message


@pytest.mark.slow
def test_a_killed_conversion_goes_on_to_the_same_dataset(source: Path, tmp_path: Path) -> None:
    path = saved(tmp_path, "stored", vectors())
    whole = converted(source, "whole.xmc", beside=path)
    script = (
        "import os, sys, xmc_stream as xs\n"
        "from xmc_stream.convert.formats.beside import BesideSource, Join\n"
        "def killed(before):\n"
        "    def run(*args):\n"
        "        before(*args)\n"
        "        os._exit(9)\n"
        "    return run\n"
        "if sys.argv[4] == 'join': Join.run = killed(Join.run)\n"
        "if sys.argv[4] == 'names': BesideSource._named = killed(BesideSource._named)\n"
        "xs.convert(sys.argv[1], sys.argv[2], beside=sys.argv[3], memory_limit='2GB')\n"
    )
    for job in ("join", "names", "none"):
        command = [sys.executable, "-c", script, str(source), str(tmp_path / "cut.xmc"), str(path), job]
        assert subprocess.run(command, check=False, env=environment()).returncode == (0 if job == "none" else 9)
    assert xs.open_dataset(tmp_path / "cut.xmc").fingerprint == whole.fingerprint
