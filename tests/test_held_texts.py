"""Few texts are predicted in memory, by a vocabulary that is held: the bits of a conversion, whatever the text."""

from __future__ import annotations

import random
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import text_files
from helpers.problems import LIMIT
from helpers.row_sparse import weights, written

import xmc_stream as xs
from xmc_stream.convert.options import Like, TextOptions, taken_over
from xmc_stream.convert.tfidf.vectorizer import TextRows
from xmc_stream.errors import InputError, StoreError
from xmc_stream.models import Execution, held
from xmc_stream.models.prediction import predict_topk
from xmc_stream.models.samples import samples
from xmc_stream.store.names import new_names, new_vectorizer

EXECUTION = Execution(LIMIT, 1)
TRAIN = text_files.documents(250)
ODD = [
    "", " ", "neverseen Neverseen", "\0", "ba\0be bi\nbo\r\nbu", "日本 𐐷x ñe ß STRASSE ﬁ \ufeff", "e\u0301 é É",
    "ba " * 300, "\u2028ba\u0085be", "a", "İstanbul \u017f", "ba" * 4000, '{"text": "\\u0000"} \\ "',
]  # fmt: skip
ASKED = [f"{d['title']}\n{d['content']}" for d in text_files.documents(370)[250:]] + ODD
WAYS: dict[str, dict[str, Any]] = {
    "words": {},
    "word pairs": {"ngrams": (1, 2), "min_df": 2},
    "characters": {"analyzer": "char", "ngrams": (2, 3), "max_features": 900},
    "characters in words": {"analyzer": "char_wb", "ngrams": (3, 3)},
    "case kept, counts": {"lowercase": False, "sublinear_tf": False, "stop_words": "english"},
    "without idf": {"idf": False, "token_pattern": r"[^\s,]+"},
    "hashes": {"hash_features": 256},
    "as they are": {"normalize": "none"},
}


def learned(folder: Path, way: dict[str, Any]) -> xs.Model:
    source = text_files.write_jsonl(folder / "train.jsonl", TRAIN)
    more = {name: value for name, value in way.items() if name == "normalize"}
    text = TextOptions(**{name: value for name, value in way.items() if name not in more})
    train = xs.convert(source, folder / "train.xmc", text=text, memory_limit=LIMIT, **more)
    clf = xs.PPDSparse(max_rounds=1, normalize=None, memory_limit=LIMIT, threads=1)
    return clf.fit(train, model=folder / "m").model_


@pytest.fixture(scope="module", params=WAYS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> xs.Model:
    return learned(tmp_path_factory.mktemp("held"), WAYS[request.param])


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> xs.Model:
    return learned(tmp_path_factory.mktemp("held"), {})


def by_disk(model: xs.Model, texts: list[str], folder: Path, k: int = 5) -> Any:
    """Their dataset, and what is predicted for it."""
    folder.mkdir(exist_ok=True)
    with samples(texts, model, folder, EXECUTION) as dataset:
        x = dataset.X_rows().block(0, dataset.n_samples)
        return x, predict_topk(model, dataset, k, EXECUTION)


def same(one: Any, other: Any) -> bool:
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


def text_rows(model: xs.Model) -> TextRows:
    return TextRows(taken_over(model)).load()


def no_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xmc_stream.models.prediction.temporary_folder", None)


def test_rows_labels_and_scores_are_those_of_a_conversion(
    model: xs.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, expected = by_disk(model, ASKED, tmp_path)
    rows = text_rows(model).rows(ASKED)
    assert same(rows, (x.indptr, x.indices, x.values))
    assert len(rows[1]) > 1000
    no_folders(monkeypatch)
    assert same(model.predict_topk(ASKED, memory_limit=LIMIT, threads=1), expected)
    assert same(model.predict_topk(ASKED), expected)
    for i, text in enumerate(ASKED):
        assert same(model.predict_topk([text]), [a[i : i + 1] for a in expected]), text


def test_any_characters_make_the_row_of_a_conversion(words: xs.Model, tmp_path: Path) -> None:
    rng = random.Random(0)
    known = list(words.feature_names() or ())

    def drawn() -> str:
        kind = rng.randrange(4)
        if kind == 0:
            return rng.choice(known).title()
        points = (range(128), range(0x3000), range(0x110000))[kind - 1]
        return "".join(c for c in map(chr, rng.choices(points, k=3)) if not "\ud800" <= c <= "\udfff")

    texts = ["".join(drawn() + rng.choice(["", " ", "."]) for _ in range(rng.randrange(30))) for _ in range(600)]
    x, _ = by_disk(words, texts, tmp_path)
    assert same(text_rows(words).rows(texts), (x.indptr, x.indices, x.values))
    assert x.indptr[-1] > 1000


def test_other_kinds_of_models_take_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = text_files.write_jsonl(tmp_path / "train.jsonl", TRAIN)
    train = xs.convert(source, tmp_path / "train.xmc", text=TextOptions(min_df=10), memory_limit=LIMIT)
    how = {"memory_limit": LIMIT, "threads": 1}
    made = {
        "low-rank": xs.LEML(rank=4, alternations=1, **how).fit(train, model=tmp_path / "low").model_,
        "row-sparse": written(tmp_path / "sparse", train, weights(train.n_features, train.n_labels, 100)),
    }
    for kind, model in made.items():
        assert model.kind == kind
        _, expected = by_disk(model, ASKED, tmp_path)
        with monkeypatch.context() as patch:
            no_folders(patch)
            assert same(model.predict_topk(ASKED, **how), expected)


def test_an_estimator_takes_one_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = text_files.write_jsonl(tmp_path / "train.jsonl", TRAIN)
    train = xs.convert(source, tmp_path / "train.xmc", memory_limit=LIMIT)
    clf = xs.PPDSparse(max_rounds=1).fit(train, model=tmp_path / "m")
    _, (labels, scores) = by_disk(clf.model_, ASKED, tmp_path, train.n_labels)
    clf.predict(ASKED[:1])
    no_folders(monkeypatch)
    monkeypatch.setattr("xmc_stream.system.memory.available_memory", None)  # few texts do not ask the system
    assert same(clf.predict_topk(ASKED[3:4], 2), (labels[3:4, :2], scores[3:4, :2]))
    given = clf.predict(ASKED[:4])
    assert [row.nonzero()[1].tolist() for row in given] == [sorted(labels[i][scores[i] > 0].tolist()) for i in range(4)]


def test_what_is_no_text_of_the_model_is_refused(words: xs.Model, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"text 1 \(from 0\) has half a surrogate pair"):
        words.predict_topk(["ba", "b\ud800a"], 1)
    with pytest.raises(InputError, match=r"text 1 \(from 0\) has half a surrogate pair"):
        xs.predict(words, ["ba", "b\ud800a"], tmp_path / "p")
    with pytest.raises(InputError, match="got an empty list"):
        words.predict_topk([])
    with pytest.raises(InputError, match="between 1 and"):
        words.predict_topk(["ba"], words.n_labels + 1)
    X = np.repeat(np.eye(3), 10, axis=0)
    numbers = xs.PPDSparse().fit(X, np.arange(30) // 10).model_
    with pytest.raises(InputError, match="was not made from text"):
        numbers.predict_topk(["ba"], 1)
    with pytest.raises(InputError, match="was not made from text"):
        xs.predict(numbers, ["ba"], tmp_path / "p", 1)
    np.save(tmp_path / "v.npy", np.ones((len(TRAIN), 2)))
    source = text_files.write_jsonl(tmp_path / "train.jsonl", TRAIN)
    train = xs.convert(source, tmp_path / "train.xmc", beside=tmp_path / "v.npy", memory_limit=LIMIT)
    beside = xs.PPDSparse(max_rounds=1, memory_limit=LIMIT).fit(train, model=tmp_path / "m").model_
    for ask in (lambda: beside.predict_topk(["ba"], 1), lambda: xs.predict(beside, ["ba"], tmp_path / "p", 1)):
        with pytest.raises(InputError, match="2 features of matrices beside, and 0 are given"):
            ask()


def test_a_vocabulary_without_room_goes_the_way_by_disk(words: xs.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = words.predict_topk(ASKED, memory_limit=LIMIT, threads=1)
    held._let_go()
    monkeypatch.setattr(TextRows, "needs", 2**40)
    monkeypatch.setattr(TextRows, "load", None)
    assert same(words.predict_topk(ASKED, memory_limit=LIMIT, threads=1), expected)


@pytest.mark.parametrize("limit", [LIMIT, None])
def test_texts_without_room_go_the_way_by_disk(
    limit: str | None, words: xs.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = words.predict_topk(ASKED, memory_limit=limit, threads=1)
    monkeypatch.setattr(TextRows, "bytes_of", lambda *_: 2**40)
    monkeypatch.setattr(TextRows, "rows", None)
    assert same(words.predict_topk(ASKED, memory_limit=limit, threads=1), expected)


def test_a_vocabulary_is_read_once_and_goes_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = learned(tmp_path, {"min_df": 2})
    loads = []
    load = TextRows.load
    monkeypatch.setattr(TextRows, "load", lambda self: loads.append(1) or load(self))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda text: model.predict_topk([text]), ASKED[:64]))
    assert len(loads) == 1
    for text, mine in zip(ASKED, found, strict=False):
        assert same(mine, model.predict_topk([text]))
    xs.convert(tmp_path / "train.jsonl", tmp_path / "again.xmc", memory_limit=LIMIT)  # for which it gives way
    model.predict_topk(["ba"])
    assert len(loads) == 2
    (tmp_path / "other").mkdir()
    other = learned(tmp_path / "other", {"analyzer": "char"})
    train = xs.open_dataset(tmp_path / "other" / "train.xmc")
    xs.PPDSparse(max_rounds=1, memory_limit=LIMIT).fit(train, model=model.path, overwrite=True)
    assert same(model.predict_topk(ASKED[:9]), other.predict_topk(ASKED[:9]))


def vocabulary(folder: Path, names: list[str], n_idf: int | None = None) -> Like:
    with new_names(folder / "names" / "features") as writer:
        writer.append([name.encode() for name in names])
    with new_vectorizer(folder / "vectorizer", TextOptions(text_fields=("text",)).attributes()) as idf:
        idf.append(np.ones(len(names) if n_idf is None else n_idf))
    return Like("m", folder, len(names), 2, "l2")


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="counts the bytes of its objects")
@pytest.mark.parametrize("letters", ["abcdefghij", "日本語文字列ひらがな", "𐐷abcdefghi"])
def test_it_takes_no_more_than_it_says(letters: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    names = sorted({letters[0] + "".join(rng.choice(list(letters), 6)) for _ in range(40_000)})
    texts = TextRows(vocabulary(tmp_path, names))
    asked = [" ".join(names[i : i + 3000]) for i in range(0, len(names), 3000)]
    tracemalloc.start()
    try:
        texts.load()
        kept, peak = tracemalloc.get_traced_memory()
        assert peak < texts.needs
        assert texts.needs < 4 * kept
        tracemalloc.reset_peak()
        indptr, _, _ = texts.rows(asked)
        assert tracemalloc.get_traced_memory()[1] - kept < texts.bytes_of(asked)
    finally:
        tracemalloc.stop()
    assert indptr[-1] == len(names)


def test_a_damaged_vocabulary_is_noticed(tmp_path: Path) -> None:
    names = ["ba", "be", "bi"]
    with pytest.raises(StoreError, match="fewer words than features"):
        TextRows(vocabulary(tmp_path / "idf", names, 2)).load()
    few = vocabulary(tmp_path / "few", names)
    with pytest.raises(StoreError, match="fewer words than features"):
        TextRows(Like("m", few.path, 4, 2, "l2")).load()
