"""Raw text to features, against scikit-learn's vectorizers, whatever the parts and the memory."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import text_files
from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer, TfidfVectorizer
from sklearn.preprocessing import MultiLabelBinarizer

from xmc_stream.convert.formats import jsonl
from xmc_stream.convert.lines import files as texts
from xmc_stream.convert.options import ConvertOptions, Like, TextOptions
from xmc_stream.convert.source import Settled
from xmc_stream.convert.tfidf import records, vocabulary
from xmc_stream.errors import InputError
from xmc_stream.store.names import VOCABULARY, Names, open_vectorizer
from xmc_stream.store.places import copy_folders

DOCUMENTS = text_files.documents(400)
TEXTS = [f"{d['title']}\n{d['content']}" for d in DOCUMENTS]


@pytest.fixture
def jsonl_file(tmp_path: Path) -> Path:
    return text_files.write_jsonl(tmp_path / "train.jsonl", DOCUMENTS)


def convert(
    path: Path, work: Path, text: TextOptions, like: Like | None = None, part_bytes: int = 2**26, **options: Any
):
    """The settled source and its X and Y."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "_PART", part_bytes)
        source = jsonl.open_source([path], ConvertOptions(text=text, **options), like)
        result = text_files.settled(source, work)
    return (
        result,
        text_files.matrix(result.x, result.n_features),
        text_files.matrix(result.y, result.n_labels, result.y_base),
    )


def names(result: Settled, kind: str) -> list[str]:
    return list(Names(result.folders[f"names/{kind}"]))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "document frequencies": ({"min_df": 3, "max_df": 0.2}, {"min_df": 3, "max_df": 0.2}),
    "shares": ({"min_df": 0.01, "max_df": 50}, {"min_df": 0.01, "max_df": 50}),
    "word pairs": ({"ngrams": (1, 2), "min_df": 2}, {"ngram_range": (1, 2), "min_df": 2}),
    "characters": ({"analyzer": "char", "ngrams": (2, 3)}, {"analyzer": "char", "ngram_range": (2, 3)}),
    "characters in words": ({"analyzer": "char_wb", "ngrams": (3, 3)}, {"analyzer": "char_wb", "ngram_range": (3, 3)}),
    "case kept, counts": ({"lowercase": False, "sublinear_tf": False}, {"lowercase": False, "sublinear_tf": False}),
    "without idf": ({"idf": False}, {"use_idf": False}),
    "stop words": ({"stop_words": "english"}, {"stop_words": "english"}),
    "token pattern": ({"token_pattern": r"[^\s,]+"}, {"token_pattern": r"[^\s,]+"}),
}


@pytest.mark.parametrize("case", CASES)
def test_features_are_those_of_tfidf_vectorizer(case: str, jsonl_file: Path, tmp_path: Path) -> None:
    ours, theirs = CASES[case]
    oracle = TfidfVectorizer(**{"sublinear_tf": True, "norm": None, **theirs})
    expected = oracle.fit_transform(TEXTS)
    result, X, Y = convert(jsonl_file, tmp_path / "work", TextOptions(**ours))
    assert names(result, "features") == oracle.get_feature_names_out().tolist()
    assert (X.indptr == expected.indptr).all()
    assert X.has_sorted_indices
    expected.sort_indices()
    assert (X.indices == expected.indices).all()
    np.testing.assert_allclose(X.data, expected.data, rtol=2e-7)
    binarizer = MultiLabelBinarizer()
    assert (Y.toarray() == binarizer.fit_transform([d["labels"] for d in DOCUMENTS])).all()
    assert names(result, "labels") == binarizer.classes_.tolist()
    assert result.normalize == "l2"


def test_the_most_frequent_words_are_kept_and_ties_go_to_the_first(jsonl_file: Path, tmp_path: Path) -> None:
    result, X, _ = convert(jsonl_file, tmp_path / "all", TextOptions(sublinear_tf=False, idf=False))
    times = np.asarray(X.sum(0)).ravel()
    every = names(result, "features")
    for most in (1, 100, 777, len(every), len(every) + 1):
        order = np.lexsort((np.arange(len(every)), -times))[:most]
        few, _, _ = convert(jsonl_file, tmp_path / str(most), TextOptions(max_features=most))
        assert names(few, "features") == [every[i] for i in sorted(order)]


def test_neither_parts_nor_memory_show_in_the_result(
    jsonl_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many parts, several dictionaries in each, and levels of merges give the bits of a single one."""
    text = TextOptions(min_df=2, ngrams=(1, 2))
    whole, X, Y = convert(jsonl_file, tmp_path / "whole", text)
    monkeypatch.setattr(vocabulary, "MERGED", 3)
    monkeypatch.setattr(vocabulary, "WINDOW", 50)
    monkeypatch.setattr(records, "_LEAST_DICTIONARY", 10**5)
    monkeypatch.setattr(records, "_MOST_DICTIONARY", 10**5)
    monkeypatch.setattr(records, "_TOKENS", 500)
    monkeypatch.setattr(jsonl, "_WINDOW", 2000)
    cut, X_cut, Y_cut = convert(jsonl_file, tmp_path / "cut", text, part_bytes=20_000)
    assert len(cut.x) > 5
    assert len(list((tmp_path / "cut").glob("part-*/*/words"))) > 2 * len(cut.x)
    levels = tmp_path / "cut" / "settled" / "text" / "merged-words"
    assert len(list(levels.glob("0/*"))) > 3 * len(list(levels.glob("2/*"))) > 0
    for kind in ("features", "labels"):
        assert names(cut, kind) == names(whole, kind)
    for one, other in ((X, X_cut), (Y, Y_cut)):
        for name in ("indptr", "indices", "data"):
            assert getattr(one, name).tobytes() == getattr(other, name).tobytes()


def test_hashed_features_are_those_of_hashing_vectorizer(jsonl_file: Path, tmp_path: Path) -> None:
    counts = HashingVectorizer(n_features=256, alternate_sign=False, norm=None).transform(TEXTS)
    transformer = TfidfTransformer(sublinear_tf=True, norm=None).fit(counts)
    text = TextOptions(hash_features=256)
    result, X, _ = convert(jsonl_file, tmp_path / "train", text, part_bytes=20_000)
    np.testing.assert_allclose(X.toarray(), transformer.transform(counts).toarray(), rtol=2e-7)
    assert "names/features" not in result.folders
    like = store(result, tmp_path / "train.xmc")
    _, X_test, _ = convert(jsonl_file, tmp_path / "test", TextOptions(), like)
    assert X_test.data.tobytes() == X.data.tobytes()


def store(result: Settled, path: Path) -> Like:
    """What a dataset keeps of a vocabulary, as --like has it."""
    for name, folder in result.folders.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        folder.rename(path / name)
    return Like(path.name, path, result.n_features, result.n_labels, "l2")


def test_a_test_set_takes_vocabulary_idf_and_labels_of_its_training_set(jsonl_file: Path, tmp_path: Path) -> None:
    train, _, _ = convert(jsonl_file, tmp_path / "train", TextOptions(min_df=2))
    oracle = TfidfVectorizer(sublinear_tf=True, norm=None, min_df=2).fit(TEXTS)
    like = store(train, tmp_path / "train.xmc")
    others = text_files.documents(100, seed=1)
    others[0]["content"] += " neverseen Neverseen otherword"
    path = text_files.write_jsonl(tmp_path / "test.jsonl", others)
    result, X, Y = convert(path, tmp_path / "test", TextOptions(), like)
    expected = oracle.transform([f"{d['title']}\n{d['content']}" for d in others])
    expected.sort_indices()
    assert X.shape == expected.shape
    assert (X.indices == expected.indices).all()
    np.testing.assert_allclose(X.data, expected.data, rtol=2e-7)
    label_names = names(result, "labels")
    assert [[label_names[i] for i in Y[row].indices] for row in range(100)] == [sorted(d["labels"]) for d in others]
    analyse = oracle.build_analyzer()
    known = set(oracle.vocabulary_)
    unknown = [word for d in others for word in analyse(f"{d['title']}\n{d['content']}") if word not in known]
    assert result.attributes["dropped_features"] == len(unknown)
    assert result.attributes["unknown_words"] == len(set(unknown))
    options, idf = open_vectorizer(tmp_path / "train.xmc") or ({}, None)
    assert options["min_df"] == 2
    assert idf is not None
    np.testing.assert_allclose(idf.read(0, idf.size), oracle.idf_)
    copied = tmp_path / "model"
    copied.mkdir()
    copy_folders(tmp_path / "train.xmc", copied, VOCABULARY)
    again, X_again, _ = convert(path, tmp_path / "again", TextOptions(), Like("m", copied, like.n_features, 40, "l2"))
    assert X_again.data.tobytes() == X.data.tobytes()
    assert names(again, "features") == names(result, "features")


def test_unknown_labels_are_refused_with_their_line_or_dropped_and_counted(jsonl_file: Path, tmp_path: Path) -> None:
    like = store(convert(jsonl_file, tmp_path / "train", TextOptions())[0], tmp_path / "train.xmc")
    others = text_files.documents(50, seed=1)
    others[30]["labels"] = ["Zulu", "Label 3 é"]
    others[17]["labels"] = ["zebra"]
    path = text_files.write_jsonl(tmp_path / "test.jsonl", others)
    with pytest.raises(InputError, match=r"test.jsonl:18: label 'zebra' does not occur in train.xmc: drop_unseen=True"):
        convert(path, tmp_path / "test", TextOptions(), like, part_bytes=2000)
    result, _, Y = convert(path, tmp_path / "drop", TextOptions(), like, part_bytes=2000, drop_unseen=True)
    assert result.attributes["dropped_labels"] == 2
    assert (Y[17].nnz, Y[30].nnz) == (0, 1)


def test_repository_form_has_ids_for_labels(tmp_path: Path) -> None:
    lines = [
        {
            "uid": f"u{i}",
            "title": "a book",
            "content": f"about things {i}",
            "target_ind": [i, 7],
            "target_rel": [1.0, 1.0],
        }
        for i in range(3)
    ]
    path = tmp_path / "trn.json.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    result, X, Y = convert(path, tmp_path / "work", TextOptions())
    assert Y.toarray().nonzero()[1].tolist() == [0, 7, 1, 7, 2, 7]
    assert result.n_labels == 8
    assert "names/labels" not in result.folders
    assert "text of title and content, labels of target_ind (ids from 0)" in result.said
    assert names(result, "features") == ["about", "book", "things"]
    assert X.shape == (3, 3)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a", "labels": ["x"]', "not a JSON object"),
        (b"[1, 2]", "a JSON array"),
        (b"12", "not a JSON object"),
        (b'{"labels": ["x"]}', "no field 'text'"),
        (b'{"text": "a"}', "no field 'labels'"),
        (b'{"text": 3, "labels": []}', "field 'text' is a number, not a text"),
        (b'{"text": null, "labels": []}', "field 'text' is null, not a text"),
        (b'{"text": "a", "labels": ["x\\u0000"]}', "NUL character in field 'labels'"),
        (b'{"text": "a\0", "labels": []}', "NUL byte"),
        (b'{"text": "\xff", "labels": []}', "byte 11 of the line is not UTF-8"),
        (b'{"text": "\\ud800", "labels": []}', "surrogate"),
        (b'{"text": "a", "labels": null}', "field 'labels' is null, not a list"),
        (b'{"text": "a", "labels": ["x", 1]}', "has a number in it"),
        (b'{"text": "a", "labels": [1.5]}', "has a number in it"),
        (b'{"text": "a", "labels": [true]}', "has true or false in it"),
        (b'{"text": "a", "labels": [""]}', "label in field 'labels' is empty"),
        (b'{"text": "a", "labels": ["x", "x"]}', "label 'x' stands twice"),
        (b'{"text": "a", "labels": [3]}', "labels are ids here and names elsewhere"),
        (b"[" * 100_000, "the line is not a"),
        (b'{"text": "a", "labels": [' + b"9" * 5000 + b"]}", "not a usable JSON object"),
    ],
)
def test_bad_lines_are_named_or_skipped_and_listed(line: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    good = b'{"text": "good words", "labels": ["x"]}\n'
    path.write_bytes(b"\xef\xbb\xbf" + good + b"\n" + good + line + b"\r\n" + good[:-1])
    with pytest.raises(InputError) as caught:
        convert(path, tmp_path / "stop", TextOptions(), part_bytes=max(50, len(line) // 4))
    assert str(caught.value).startswith(f"{path}:4: ")
    assert message in str(caught.value)
    result, X, Y = convert(path, tmp_path / "skip", TextOptions(), part_bytes=max(50, len(line) // 4), skip=True)
    assert X.shape == (3, 2)
    assert Y.toarray().tolist() == [[1], [1], [1]]
    assert (result.attributes["skipped"], result.attributes["blank_lines"]) == (1, 1)
    ((file, number, why),) = result.attributes["skipped_rows"]
    assert (file, number) == (str(path), 4)
    assert message in why


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ([-1], {}, "label id -1 is out of range"),
        ([0], {"base": 1}, "label id 0 is out of range: ids count from 1"),
        ([5], {"n_labels": 5}, "label id 5 is not below K = 5, as you gave it"),
        ([2**62], {}, f"label id {2**62} is out of range"),
    ],
)
def test_label_ids_out_of_range_are_refused(labels: Any, options: Any, message: str, tmp_path: Path) -> None:
    rows = [{"text": "some words", "labels": [1]}, {"text": "other words", "labels": labels}]
    path = text_files.write_jsonl(tmp_path / "in.jsonl", rows)
    with pytest.raises(InputError, match=f"in.jsonl:2: {message}"):
        convert(path, tmp_path / "work", TextOptions(), **options)


@pytest.mark.parametrize(
    ("first", "options", "message"),
    [
        ({"words": "a", "labels": []}, {}, "no text field of a common name: it has 'words', 'labels'"),
        ({"text": "a", "y": []}, {}, "no label field: it has 'text', 'y'"),
        ({"text": "a", "labels": []}, {"text_fields": ("body",)}, "no text field 'body': it has 'text', 'labels'"),
    ],
)
def test_fields_that_are_not_there_are_named(first: Any, options: Any, message: str, tmp_path: Path) -> None:
    path = text_files.write_jsonl(tmp_path / "in.jsonl", [first])
    with pytest.raises(InputError, match=message):
        jsonl.open_source([path], ConvertOptions(text=TextOptions(**options)), None)


def test_labels_in_a_delimited_string_and_chosen_fields(tmp_path: Path) -> None:
    path = text_files.write_jsonl(
        tmp_path / "in.jsonl", [{"a": "one two", "b": "three", "y": "p; q"}, {"a": "", "b": "four", "y": " "}]
    )
    text = TextOptions(text_fields=("b", "a"), label_field="y", label_delimiter=";")
    result, _, Y = convert(path, tmp_path / "work", text)
    assert names(result, "labels") == ["p", "q"]
    assert Y.toarray().tolist() == [[1, 1], [0, 0]]
    assert names(result, "features") == ["four", "one", "three", "two"]


@pytest.mark.parametrize(
    "options",
    [
        {"analyzer": "words"}, {"ngrams": (2, 1)}, {"ngrams": (0, 1)}, {"min_df": 0}, {"min_df": 1.5}, {"max_df": 0.0},
        {"max_features": 0}, {"hash_features": 1000}, {"hash_features": 0}, {"hash_features": 4, "min_df": 2},
        {"token_pattern": "("}, {"token_pattern": "(a)(b)"}, {"stop_words": "french"}, {"label_delimiter": ""},
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        TextOptions(**options)


def test_mutated_input_ends_in_rows_or_in_a_line(tmp_path: Path) -> None:
    """Bytes of a file changed, cut out or doubled: an InputError that names the file, or every line a row or skipped."""
    rng = np.random.default_rng(0)
    rows = [{"text": f"wörds {i} of text", "labels": ["a", "b"][: i % 3], "n": i} for i in range(6)]
    whole = text_files.write_jsonl(tmp_path / "whole.jsonl", rows).read_bytes()
    path = tmp_path / "in.jsonl"
    refused = []
    for trial in range(120):
        data = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            at, n = int(rng.integers(len(data))), int(rng.integers(1, 12))
            change = rng.integers(4)
            if change == 0:
                data[at] = rng.integers(256)
            elif change == 1:
                del data[at : at + n]
            elif change == 2:
                data[at:at] = data[at : at + n]
            else:
                data[at:at] = bytes(rng.choice(list(b'{}[]",:\\u0\n1-e\xff')) for _ in range(n))
        path.write_bytes(data)
        for skip in (False, True):
            try:
                source = jsonl.open_source([path], ConvertOptions(skip=skip), None)
                source.fit(2**26)
                (part,) = source.parts()
                notes: dict[str, Any] = {"folder": str(tmp_path / "own")}
                n_rows = sum(len(block[0][0]) - 1 for block in part.blocks(notes))
            except InputError as error:
                refused.append(str(error))
            else:
                n_lines = data.count(b"\n") + (not data.endswith(b"\n"))
                assert n_rows + notes["skipped"] + notes["blank_lines"] == n_lines, trial
    assert all(message.startswith(f"{path}:") for message in refused)
    assert 30 < len(refused) < 210
