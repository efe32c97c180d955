"""How labels were understood is said, and what seems to be meant where several stand in one text."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.conversions import cut_into
from helpers.forked import forked_command
from helpers.inputs import TEXTS, K, N, an_input, matrices, rows_of_text

import xmc_stream as xs
from xmc_stream.convert import conversion
from xmc_stream.convert.formats.registry import FORMATS
from xmc_stream.convert.labels import LIST, SEPARATOR, understood
from xmc_stream.convert.options import TextOptions
from xmc_stream.convert.tfidf.counting import BadRowError, listed
from xmc_stream.errors import InputError

pytestmark = [
    pytest.mark.filterwarnings("ignore::Warning:anndata"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

PAIRS = list(itertools.combinations(["red", "green", "it's", "blue é", "x-1", "7"], 2))


def tags(i: int) -> list[str]:
    """Two labels of each row but for one in ten, which has one."""
    return list(PAIRS[i % len(PAIRS)])[: 1 if i % 10 == 9 else 2]


def written(form: str, folder: Path, labels: Callable[[int], Any]) -> Path:
    TEXTS[form](folder / f"in.{form}", rows_of_text(labels))
    return folder / f"in.{form}"


def converted(path: Path, name: str = "d.xmc", **text: Any) -> xs.Dataset:
    options = TextOptions(label_field="tags", **text)
    return xs.convert(path, path.with_name(name), memory_limit="2GB", text=options, overwrite=True)


def positives(dataset: xs.Dataset) -> list[set[str]]:
    """The names of the labels of each row."""
    names, rows = list(dataset.label_names() or ()), dataset.Y_rows().block(0, dataset.n_samples)
    return [{names[j] for j in rows.indices[a:b]} for a, b in itertools.pairwise(rows.indptr.tolist())]


@pytest.mark.parametrize("form", TEXTS)
@pytest.mark.parametrize("between", ["|", "; ", ",", ", ", "\t", "\n", " / "])
def test_a_separator_that_most_labels_hold_is_named(
    form: str, between: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, separator = written(form, tmp_path, lambda i: between.join(tags(i))), between.strip(" ")
    with caplog.at_level(logging.INFO, "xmc_stream"):
        dataset = converted(path)
    assert dataset.attributes[SEPARATOR] == separator
    (record,) = [record for record in caplog.records if "tags" in record.message]
    assert (record.name, record.levelno) == ("xmc_stream", logging.INFO)
    assert f"TextOptions(label_delimiter=...) {separator!r}" in record.message
    assert "\n" not in record.message
    again = converted(path, label_delimiter=separator)
    assert SEPARATOR not in again.attributes
    assert positives(again) == [set(tags(i)) for i in range(N)]


@pytest.mark.parametrize("form", TEXTS)
@pytest.mark.parametrize(
    "write", [str, json.dumps, lambda of: json.dumps(of, ensure_ascii=False), lambda of: str(tuple(of))]
)
def test_lists_in_texts_are_named_and_read(form: str, write: Callable[[Any], str], tmp_path: Path) -> None:
    path = written(form, tmp_path, lambda i: write(tags(i)))
    dataset = converted(path)
    about = understood(dataset)
    assert about["separator"] == dataset.attributes[SEPARATOR] == LIST
    assert about["examples"][0] == next(name for name in dataset.label_names() or () if name[0] in "[(")
    assert "--label-lists" in about["said"]
    again = converted(path, label_lists=True)
    assert SEPARATOR not in again.attributes
    assert positives(again) == [set(tags(i)) for i in range(N)]


def test_words_that_blanks_separate_are_named_where_they_differ(tmp_path: Path) -> None:
    """Not where a few names of several words come again and again."""
    words = written("csv", tmp_path, lambda i: f"w{i % 7} v{i % 5} u{i % 3}")
    assert converted(words).attributes[SEPARATOR] == " "
    assert converted(words, label_delimiter=" ").n_labels == 15
    assert SEPARATOR not in converted(written("csv", tmp_path, lambda i: f"new city / {i % K}")).attributes


@pytest.mark.parametrize("form", TEXTS)
def test_where_few_labels_hold_a_separator_none_is_named(form: str, tmp_path: Path) -> None:
    path = written(form, tmp_path, lambda i: ["one", "two", "three", "four, five"][i % 4])
    assert understood(converted(path))["separator"] is None


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_names_in_lists_are_names(form: str, tmp_path: Path) -> None:
    """No option would part them."""
    dataset = converted(written(form, tmp_path, lambda i: [f"city {i % 4}, state"]))
    assert (understood(dataset)["separator"], dataset.n_labels) == (None, 4)


@pytest.mark.parametrize("form", {**FORMATS, **TEXTS})
def test_the_most_frequent_labels_are_told_of_every_format(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, given, _ = an_input(form, tmp_path)
    with caplog.at_level(logging.INFO, "xmc_stream"):
        dataset = xs.convert(source, tmp_path / "d.xmc", memory_limit="2GB", **given)
    about, counts = understood(dataset), np.bincount(matrices()[1])
    frequent: list[Any] = np.lexsort((np.arange(K), -counts))[:3].tolist()
    if form in TEXTS:
        frequent = [f"label {i}" for i in (0, 1, 2)]  # 8, 8, 7 and 7 rows
    elif form == "anndata":
        frequent = [["red", "green", "blue", "ash tree"][i] for i in frequent]
    assert about["examples"] == frequent
    assert about["kind"] == ("names" if isinstance(frequent[0], str) else "ids")
    assert all(str(one) in about["said"] for one in frequent)
    assert [record.message for record in caplog.records].count(about["said"]) == 1


def test_ids_are_told_as_they_stand_in_the_input(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("3 1:1\n3,2 2:1\n")
    about = understood(xs.convert(tmp_path / "in.txt", tmp_path / "d.xmc", memory_limit="2GB"))
    assert (about["kind"], about["examples"]) == ("ids", [3, 2])
    assert "2, 3" not in about["said"]
    dataset = converted(written("jsonl", tmp_path, lambda i: []))
    assert (understood(dataset)["kind"], understood(dataset)["examples"]) == ("none", [])


@pytest.mark.parametrize("form", ["csv", "tsv", "jsonl"])
def test_it_does_not_depend_on_parts_and_threads(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(form, tmp_path, lambda i: "|".join(tags(i)))
    whole = converted(path)
    cut_into(monkeypatch, 300)
    monkeypatch.setattr(conversion, "_SMALL", 0)
    options = TextOptions(label_field="tags")
    for threads in (1, 2):
        parts = xs.convert(path, tmp_path / f"{threads}.xmc", memory_limit="2GB", text=options, threads=threads)
        assert understood(parts) == understood(whole)
        assert parts.fingerprint == whole.fingerprint


def test_the_command_says_it_in_a_line_and_in_json(tmp_path: Path, commands: Callable[..., Any]) -> None:
    path = written("csv", tmp_path, lambda i: "|".join(tags(i)))
    fields = ["--label-field", "tags", "--memory-limit", "2GB"]
    for quiet in ([], ["--quiet"]):
        with forked_command("convert", path, tmp_path / "d.xmc", *fields, *quiet, "--overwrite") as command:
            assert command.wait() == 0
            lines = [line for line in command.stderr.splitlines() if "--label-delimiter '|'" in line]
            assert len(lines) == (0 if quiet else 1)
            assert "--label-delimiter" not in command.stdout
    for _ in range(2):  # the second time from what stands there
        told = commands("convert", path, tmp_path / "d.xmc", *fields)["labels"]
        assert (told["kind"], told["separator"], len(told["examples"])) == ("names", "|", 3)
        assert "--label-delimiter '|'" in told["said"]
    again = commands("convert", path, tmp_path / "e.xmc", *fields, "--label-delimiter", "|")
    assert (again["n_labels"], again["labels"]["separator"]) == (6, None)
    listed_path = written("tsv", tmp_path, lambda i: str(tags(i)))
    again = commands("convert", listed_path, tmp_path / "f.xmc", *fields, "--label-lists")
    assert (again["n_labels"], again["labels"]["separator"]) == (6, None)
    tabs = written("jsonl", tmp_path, lambda i: "\t".join(tags(i)))
    assert commands("convert", tabs, tmp_path / "g.xmc", *fields, "--label-delimiter", r"\t")["n_labels"] == 6


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("['a', 'b']", ["a", "b"]), ('["a", "it\'s"]', ["a", "it's"]), ("[]", []), ("  ", []), ("('a',)", ["a"]),
        ("('a')", ["a"]), ("{'b', 'a'}", ["b", "a"]), ("[1, 20]", [1, 20]),
        (r"['a\'b', 'c\\d', '\xa0\u20ac']", ["a'b", "c\\d", "\xa0€"]),
        (' ["\\u00e9", "x"] ', ["é", "x"]), ("['a, b', ]", ["a, b"]),
    ],
)  # fmt: skip
def test_lists_of_labels(text: str, labels: Any) -> None:
    assert listed(text) == labels


@pytest.mark.parametrize(
    "text",
    [
        "['a' 'b']",
        "a",
        "['a'",
        "[a, b]",
        "['a'; 'b']",
        "[f()]",
        "['a', ['b'] + []]",
        "['a'] ['b']",
        "[,]",
        "'ab'",
        "[" * 9999,
    ],
)
def test_what_is_no_list_of_labels_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(BadRowError, match="no list of labels"):
        listed(text)
    path = written("csv", tmp_path, lambda i: text if i == 3 else "['a']")
    with pytest.raises(InputError, match=r"in\.csv:5: .* is no list of labels"):
        converted(path, label_lists=True)


def test_labels_are_written_in_one_way() -> None:
    with pytest.raises(InputError, match="label_lists and label_delimiter"):
        TextOptions(label_lists=True, label_delimiter=",")


@pytest.mark.parametrize("text", ["['a',\u00a0'b']", "['a\\x00b\x00']", "['a', 'b')", "['a' 'b']"])
def test_what_only_looks_like_a_list_is_a_bad_row(text: str, tmp_path: Path) -> None:
    path = written("csv", tmp_path, lambda i: text if i == 3 else "['a', 'b']")
    with pytest.raises(xs.InputError, match=rf"{path.name}:"):
        converted(path, label_lists=True)


def test_names_of_labels_are_not_worded_as_flags(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written("csv", tmp_path, lambda i: "--force" if i % 2 else "--overwrite")
    with caplog.at_level(logging.INFO, "xmc_stream"):
        converted(path)
    (record,) = [record for record in caplog.records if "tags" in record.message]
    assert "'--force'" in record.message
