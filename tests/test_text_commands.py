"""Raw text through the commands: convert, train, predict, and back to names."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import text_files
from helpers.forked import Forked

import xmc_stream as xs
from xmc_stream.convert.formats.beside import store_names
from xmc_stream.convert.options import TextOptions
from xmc_stream.convert.tfidf import vocabulary, weigh
from xmc_stream.errors import InputError
from xmc_stream.runtime import making
from xmc_stream.store.names import Names

CLI = Callable[..., Any]


def labelled(n: int, seed: int) -> list[dict[str, Any]]:
    """Documents that say their labels in words of their own."""
    documents = text_files.documents(n, seed)
    for document in documents:
        document["labels"] = document["labels"][:1] or ["Label 0 é"]
        document["content"] += " " + " ".join(f"mark{label.split()[1]}" for label in document["labels"])
    return documents


@pytest.fixture(scope="module")
def trained_on_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    text_files.write_jsonl(folder / "train.jsonl", labelled(600, 0))
    text_files.write_jsonl(folder / "test.jsonl", labelled(100, 1))
    text = TextOptions(min_df=2)
    train = xs.convert(folder / "train.jsonl", folder / "train.xmc", text=text, memory_limit="2GB")
    xs.PPDSparse(memory_limit="2GB").fit(train, model=folder / "m.model")
    return folder


def test_raw_text_in_and_names_out(trained_on_text: Path, commands: CLI, tmp_path: Path) -> None:
    test, model = trained_on_text / "test.jsonl", trained_on_text / "m.model"
    commands("predict", model, test, tmp_path / "out.jsonl", "-k", 3)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    expected = labelled(100, 1)
    assert np.mean([row["labels"][0] in d["labels"] for row, d in zip(rows, expected, strict=True)]) > 0.9
    assert all(row["scores"] == sorted(row["scores"], reverse=True) and len(row["labels"]) == 3 for row in rows)

    commands("convert", test, tmp_path / "test.xmc", "--like", model)
    commands("predict", model, tmp_path / "test.xmc", tmp_path / "pred.txt", "-k", 3)
    names = xs.load_model(model).label_names()
    assert names is not None
    lines = (tmp_path / "pred.txt").read_text().splitlines()
    ids = [[int(pair.split(":")[0]) for pair in line.split()] for line in lines]
    assert [[names.read(i, i + 1)[0] for i in row] for row in ids] == [row["labels"] for row in rows]
    assert not list(tmp_path.glob(".xmc_stream-*"))


@pytest.mark.slow
def test_labels_beside_raw_text_are_not_read(trained_on_text: Path, commands: CLI, tmp_path: Path) -> None:
    plain, strange = labelled(20, 2), labelled(20, 2)
    for document in plain:
        del document["labels"]
    for document in strange:
        document["labels"] = ["never seen"]
    for name, documents in (("plain", plain), ("strange", strange)):
        text_files.write_jsonl(tmp_path / f"{name}.jsonl", documents)
        commands("predict", trained_on_text / "m.model", tmp_path / f"{name}.jsonl", tmp_path / f"{name}.txt")
    assert (tmp_path / "plain.txt").read_text() == (tmp_path / "strange.txt").read_text()


def test_a_dataset_of_text_says_what_its_numbers_mean(trained_on_text: Path) -> None:
    train = xs.open_dataset(trained_on_text / "train.xmc")
    features, labels = train.feature_names(), train.label_names()
    assert features is not None
    assert labels is not None
    assert (len(features), len(labels)) == (train.n_features, train.n_labels)
    assert list(labels) == sorted({label for d in labelled(600, 0) for label in d["labels"]})
    row = int(train.X_rows().indices.read(0, 1)[0])
    document = labelled(1, 0)[0]
    assert features.read(row, row + 1)[0] in f"{document['title']} {document['content']}".lower()
    norms = train.row_norms(0, train.n_samples)
    np.testing.assert_allclose(norms, 1.0, rtol=1e-6)


def test_texts_are_predicted_from_python(trained_on_text: Path) -> None:
    model = xs.load_model(trained_on_text / "m.model")
    labels, scores = model.predict_topk(["words of mark7 mark7", "about mark3", ""], k=1)
    names = model.label_names()
    assert names is not None
    assert [names.read(i, i + 1)[0] for i in labels[:2, 0].tolist()] == ["Label 7 é", "Label 3 é"]
    assert scores.shape == (3, 1)
    assert np.array_equal(model.predict_topk(("words of mark7 mark7",), k=1)[0], labels[:1])


def test_a_string_is_no_list_of_letters(trained_on_text: Path) -> None:
    model = xs.load_model(trained_on_text / "m.model")
    for given in ("words of mark7 mark7", "", str(trained_on_text / "train.xmc"), trained_on_text / "train.xmc"):
        with pytest.raises(
            InputError, match=r"^got .* give texts as a list, also a single one, and a dataset by open_data"
        ):
            model.predict_topk(given)
    with pytest.raises(
        InputError, match=r"text_fields must be a tuple of names, got the string 'text': write \('text',\)"
    ):
        TextOptions(text_fields="text")  # type: ignore[arg-type]


def killed_in(job: str, source: Path, out: Path) -> None:
    """Convert, in a process that ends at the end of a job of this class, or when the dataset is to be published."""

    def killed(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def ends(self: Any) -> None:
            run(self)
            os._exit(9)

        return ends

    def late(store: Path, _: Path) -> None:
        end = time.monotonic() + 60
        while (store.parent / "pieces").exists() and time.monotonic() < end:
            time.sleep(0.01)
        os._exit(9)

    if job == "publish":
        making.publish = late
    elif job != "none":
        of = getattr(weigh if job == "Weigh" else vocabulary, job)
        of.run = killed(of.run)
    xs.convert(source, out, memory_limit="2GB")


@pytest.mark.slow
def test_a_killed_conversion_goes_on_to_the_same_dataset(tmp_path: Path) -> None:
    """Killed in each of its phases in turn, it ends with the dataset of a run in one go."""
    source = text_files.write_jsonl(tmp_path / "in.jsonl", text_files.documents(300))
    whole = xs.convert(source, tmp_path / "whole.xmc", memory_limit="2GB")
    for job in ("Merge", "ChooseFeatures", "ChooseLabels", "Weigh", "publish", "none"):
        with Forked(killed_in, job, source, tmp_path / "cut.xmc") as run:
            assert run.wait() == (0 if job == "none" else 9), run.stderr
        assert (tmp_path / "cut.xmc").exists() == (job == "none")
        assert (tmp_path / "cut.xmc.partial" / "pieces").exists() == (job not in ("publish", "none"))
    assert xs.open_dataset(tmp_path / "cut.xmc").fingerprint == whole.fingerprint


def test_options_reach_the_vectorizer(commands: CLI, tmp_path: Path) -> None:
    source = text_files.write_jsonl(
        tmp_path / "in.jsonl", [{"words": "a-b c-d", "y": "p|q"}, {"words": "c-d", "y": "p"}]
    )
    options = (
        "--text-field words --label-field y --label-delimiter | --token-pattern [^\\s]+ --ngrams 1,2 --max-df 1".split()
    )
    figures = commands("convert", source, tmp_path / "out.xmc", *options)
    dataset = xs.open_dataset(tmp_path / "out.xmc")
    assert list(dataset.feature_names() or ()) == ["a-b", "a-b c-d"]
    assert list(dataset.label_names() or ()) == ["p", "q"]
    assert "text of words, labels of y" in figures["said"]
    commands("plan", "convert", source, tmp_path / "plan.xmc", *options)
    line = commands("convert", source, tmp_path / "no.xmc", "--min-df", "x", fails=True)
    assert line.startswith("error: --min-df x") or "--min-df x" in line


@pytest.mark.slow
def test_a_model_of_numbers_refuses_raw_text(trained: Path, commands: CLI, tmp_path: Path) -> None:
    text = text_files.write_jsonl(tmp_path / "in.jsonl", [{"text": "words"}])
    assert "was not made from text" in commands("predict", trained, text, tmp_path / "out.jsonl", fails=True)


def test_names_from_a_file(tmp_path: Path) -> None:
    plain = tmp_path / "names.txt"
    plain.write_text("one\ntwo words\r\ndrei é\n", encoding="utf-8")
    assert store_names(plain, tmp_path / "a", 3, "labels") == 3
    assert list(Names(tmp_path / "a")) == ["one", "two words", "drei é"]
    objects = text_files.write_jsonl(
        tmp_path / "lbl.json", [{"uid": "1", "title": "First"}, {"uid": "2", "title": "Second"}]
    )
    store_names(objects, tmp_path / "b", None, "labels")
    assert Names(tmp_path / "b").take(np.array([0, 1])) == ["First", "Second"]
    with pytest.raises(InputError, match=r"names.txt:3: there are 3 names for 4 labels"):
        store_names(plain, tmp_path / "c", 4, "labels")
    plain.write_bytes(b"one\n\xff\n")
    with pytest.raises(InputError, match=r"names.txt:2: the name is not readable"):
        store_names(plain, tmp_path / "d", None, "labels")
    assert not (tmp_path / "d").exists()


@pytest.mark.slow
def test_names_are_read_by_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xmc_stream.store import names as module

    expected = [f"name {i} " + "é" * (i % 7) for i in range(20_000)] + ["", "x" * 10**6, ""]
    with module.new_names(tmp_path / "names") as writer:
        for start in range(0, len(expected), 777):
            writer.append([name.encode() for name in expected[start : start + 777]])
    names = Names(tmp_path / "names")
    assert len(names) == len(expected)
    assert list(names) == expected
    assert names.read(0, 3) == expected[:3]
    assert names.read(19_998, 20_003) == expected[19_998:]
    assert names.read(5, 5) == []
    ids = np.array([0, 1, 500, 9_999, 20_000, 20_001, 20_002])
    assert names.take(ids) == [expected[i] for i in ids]
    assert names.take(ids[:0]) == []


@pytest.mark.slow
def test_a_vocabulary_that_memory_would_not_hold(commands: CLI, tmp_path: Path) -> None:
    """A million and a half different words would take more than the limit as a Python dictionary alone."""
    n, step = 1_500_000, 500
    with open(tmp_path / "in.jsonl", "w") as file:
        for start in range(0, n, step):
            words = " ".join(f"{i * 2654435761 % 2**32:08x}" for i in range(start, start + step))
            file.write(f'{{"text": "{words}", "labels": ["label {start % 97}"]}}\n')
    figures = commands("convert", tmp_path / "in.jsonl", tmp_path / "out.xmc", "--memory-limit", "512MB")
    assert (figures["n_features"], figures["n_labels"]) == (n, 97)
    assert figures["peak_rss"] < 512_000_000  # VmHWM of the process
    dataset = xs.open_dataset(tmp_path / "out.xmc")
    names = dataset.feature_names()
    assert names is not None
    expected = sorted(f"{i * 2654435761 % 2**32:08x}" for i in range(n))
    assert names.read(n - 10, n) == expected[-10:]
    assert (dataset.feature_counts() == 1).all()


@pytest.mark.slow
def test_names_of_labels_beside_the_input(commands: CLI, tmp_path: Path) -> None:
    """The Extreme Classification Repository's form: trn.json has ids, lbl.json their titles."""
    rows = [{"title": f"about t{i}", "content": "", "target_ind": [i % 3]} for i in range(9)]
    train = text_files.write_jsonl(tmp_path / "trn.json", rows)
    titles = text_files.write_jsonl(tmp_path / "lbl.json", [{"uid": str(i), "title": f"Title {i}"} for i in range(4)])
    few = tmp_path / "few.txt"
    few.write_text("one\ntwo\n")
    figures = commands("convert", train, tmp_path / "train.xmc", "--label-names", titles)
    assert figures["n_labels"] == 4
    assert list(xs.open_dataset(tmp_path / "train.xmc").label_names() or ()) == [f"Title {i}" for i in range(4)]
    with pytest.raises(InputError, match=r"few.txt:2: there are 2 names for 3 labels"):
        xs.convert(train, tmp_path / "few.xmc", label_names=few, memory_limit="2GB")
    with pytest.raises(InputError, match="the features have names in the input itself"):
        xs.convert(train, tmp_path / "few.xmc", feature_names=titles, memory_limit="2GB")
    (tmp_path / "in.txt").write_text("2 3 2\n0 0:1 2:1\n1 1:1\n")
    dataset = xs.convert(tmp_path / "in.txt", tmp_path / "x.xmc", label_names=few, memory_limit="2GB")
    assert list(dataset.label_names() or ()) == ["one", "two"]
