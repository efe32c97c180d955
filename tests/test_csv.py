"""CSV and TSV: the rows that JSONL of the same records gives, wherever the file is cut; what is wrong is named by its line."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import text_files
from helpers.commands import cli_command, environment
from helpers.conversions import BOM, cut_into, refused
from hypothesis import given
from hypothesis import strategies as st
from reference.records import record_starts

import xmc_stream as xs
from xmc_stream.convert.formats import delimited
from xmc_stream.convert.formats.registry import open_source
from xmc_stream.convert.kernels.records import BEGIN, next_record
from xmc_stream.convert.options import ConvertOptions, TextOptions
from xmc_stream.errors import InputError, MemoryLimitError

DOCUMENTS = text_files.documents(300)
for document in DOCUMENTS[::3]:  # what must be in quotes
    document["content"] += ' she said "no",\nand\tthen; a | b\r\n\n"'
LABELLED = TextOptions(label_delimiter="|")


def csv_bytes(rows: list[list[str]], delimiter: str = ",", end: str = "\n") -> bytes:
    """Rows as Python's csv writes them."""
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter, lineterminator=end).writerows(rows)
    return text.getvalue().encode()


def table(documents: list[dict[str, Any]], *columns: str) -> list[list[str]]:
    """A header and a row a document."""
    values = [["|".join(d[c]) if isinstance(d[c], list) else d[c] for c in columns] for d in documents]
    return [list(columns), *values]


def converted(path: Path, **options: Any) -> xs.Dataset:
    target = path.with_name(f"{path.name}-{len(list(path.parent.iterdir()))}.xmc")
    return xs.convert(path, target, memory_limit="2GB", **options)


def same(one: xs.Dataset, other: xs.Dataset) -> bool:
    """X, Y and all names."""
    names = [
        [None if found is None else list(found) for found in (of.feature_names(), of.label_names(), of.row_ids())]
        for of in (one, other)
    ]
    return one.fingerprint == other.fingerprint and names[0] == names[1]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> xs.Dataset:
    path = tmp_path_factory.mktemp("jsonl") / "in.jsonl"
    return converted(text_files.write_jsonl(path, DOCUMENTS), text=TextOptions(id_field="uid"))


FORMS: dict[str, Callable[[list[list[str]]], bytes]] = {
    "csv": csv_bytes,
    "tsv": lambda rows: csv_bytes(rows, "\t"),
    "semicolons": lambda rows: csv_bytes(rows, ";"),
    "bars": lambda rows: csv_bytes(rows, "|"),
    "windows": lambda rows: BOM + csv_bytes(rows, end="\r\n"),
    "no last newline": lambda rows: csv_bytes(rows)[:-1],
    "blank lines": lambda rows: csv_bytes(rows).replace(b"\n0,", b"\n\n\r\n0,", 1) + b"\n",
    "gzip": lambda rows: gzip.compress(csv_bytes(rows)),
    "bzip2": lambda rows: bz2.compress(csv_bytes(rows)),
}


@pytest.mark.parametrize("part", [None, 3000])
@pytest.mark.parametrize("form", FORMS)
def test_csv_is_what_jsonl_is(
    form: str, part: int | None, expected: xs.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if part is not None:
        cut_into(monkeypatch, part)
    path = tmp_path / "in"
    path.write_bytes(FORMS[form](table(DOCUMENTS, "uid", "content", "labels", "title")))
    text = TextOptions(label_delimiter="|", id_field="uid")
    source = open_source([path], ConvertOptions(text=text), None)
    source.fit(2**26)
    assert (len(source.parts()) > 5) == (part is not None and form not in ("gzip", "bzip2"))
    dataset = converted(path, text=text)
    assert dataset.attributes["source_format"] == "CSV"
    assert dataset.attributes.get("blank_lines", 0) == 3 * (form == "blank lines")
    assert same(dataset, expected)
    assert list(dataset.row_ids() or ()) == [d["uid"] for d in DOCUMENTS]


@given(st.binary().map(lambda b: bytes(b'ab,"\n\r'[x % 6] for x in b)), st.integers(0, 30), st.booleans())
def test_rows_begin_where_csv_says(text: bytes, first: int, quotes: bool) -> None:
    starts = [at for at in record_starts(text, ",", '"' if quotes else None) if at >= first]
    array, quote = np.frombuffer(text, np.uint8), 34 if quotes else -1
    at, state = next_record(array, BEGIN, 44, quote, first)
    assert at == (starts[0] if starts else -1)
    for cut in range(len(text)):  # the state goes on in another window
        at, state = next_record(array[:cut], BEGIN, 44, quote, len(text) + 1)
        again, _ = next_record(array[cut:], state, 44, quote, first - cut)
        later = [one for one in starts if one > cut]
        assert again == (later[0] - cut if later else -1)


def test_parts_begin_with_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and parts of any size, rows longer than parts, errors among them."""
    rows = [["text", "label"], *(['x "\n,' * (i % 9), f"a{i}"] for i in range(60)), ["long\n" * 300, "b"], ["c", "d"]]
    content = csv_bytes(rows) + b'"bad" row\n,"\n' + csv_bytes(rows[1:])
    path = tmp_path / "in.csv"
    path.write_bytes(content)
    starts = {0, *record_starts(content, ",", '"')}
    for part, window in ((20, 7), (333, 50), (1000, 2**20)):
        cut_into(monkeypatch, part)
        monkeypatch.setattr(delimited, "_WINDOW", window)
        places = delimited._cuts(path, delimited.Dialect(",", '"'), 0, len(content))
        assert places == sorted(set(places))
        assert set(places) <= starts
        assert len(places) > len(content) / part / 40


GOOD = b"text,labels\ngood words,x\n"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b"one", "the row has 1 columns and the header 2: put a text with ',' in it into quotes"),
        (b"one,two,three", "the row has 3 columns and the header 2"),
        (b'"a" b,x', "text follows a closing quote: write a quote within quotes twice, or quote=''"),
        (b'"a\nb" c,x', "text follows a closing quote: .* \\(the row goes on for 1 lines\\)"),
        (b"a\rb,x", "there is a carriage return within the row"),
        (b"a\0b,x", "there is a NUL byte in the row"),
        (b"a\xffb,x", "byte 2 of the line is not UTF-8"),
        (b'"a\n\xe4",x', "byte 1 of line 2 of the row is not UTF-8"),
        (b'\xff"a",x', "byte 1 of the line is not UTF-8"),
    ],
)
@pytest.mark.parametrize("part", [None, 10])
def test_bad_rows_are_named_or_skipped_and_listed(
    row: bytes, message: str, part: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if part is not None:
        cut_into(monkeypatch, part)
    path = tmp_path / "in.csv"
    path.write_bytes(GOOD + b'"two\nlines",y\n' + row + b"\nlast words,x\n")
    with pytest.raises(InputError, match=f"^{path}:5: {message}") as caught:
        converted(path)
    assert "\n" not in str(caught.value)
    dataset = converted(path, skip=True)
    assert (dataset.n_samples, list(dataset.label_names() or ())) == (3, ["x", "y"])
    assert dataset.attributes["skipped"] == 1
    assert dataset.attributes["skipped_rows"][0][:2] == [str(path), 5]
    assert Path(dataset.path).exists()


def test_quotes_that_do_not_end(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_bytes(GOOD + b'"open,y\n' + b"other words,z\n" * 3)
    with pytest.raises(
        InputError, match=r"in.csv:3: quotes that begin here do not end: .* \(the row goes on for 3 line"
    ):
        converted(path)
    assert converted(path, skip=True).attributes["skipped"] == 1
    assert converted(path, quote="").n_samples == 5
    path.write_bytes(GOOD + b'"open,y\n' + b"other words,z\n" * 2**17)
    source = delimited.open_source([path], ConvertOptions(), None)
    with pytest.raises(MemoryLimitError, match=r"in.csv:3: the row that begins here is longer than 262 kB"):
        list(source._records[0].read(2**18, {}, source.text))


def test_labels_are_names_unless_ids_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_bytes(csv_bytes([["text", "label"], ["one word", "10"], ["two words", "2"], ["none", " "]]))
    names = converted(path)
    assert list(names.label_names() or ()) == ["10", "2"]
    assert names.Y_rows().nnz == 2
    ids = converted(path, text=TextOptions(label_ids=True))
    assert (ids.n_labels, ids.label_names()) == (11, None)
    assert ids.Y_rows().block(0, 3).indices.tolist() == [10, 2]
    assert "labels are ids here" not in refused(tmp_path / "no", path, like=ids, text=TextOptions(label_field="text"))
    path.write_bytes(csv_bytes([["text", "label"], ["one word", "1"], ["two", "1.5"]]))
    with pytest.raises(InputError, match=r"in.csv:3: label '1.5' is no whole number"):
        converted(path, text=TextOptions(label_ids=True))
    path.write_bytes(csv_bytes([["text", "label"], ["one word", "4"]]))
    assert converted(path, like=ids).Y_rows().block(0, 1).indices.tolist() == [4]


def test_columns_that_are_named(tmp_path: Path) -> None:
    path = tmp_path / "in.tsv"
    path.write_bytes(csv_bytes([["head", "body", "class"], ["red", "big shoes", "b c"], ["blue", "", "a"]], "\t"))
    dataset = converted(path, text=TextOptions(text_fields=("head", "body"), label_field="class"))
    assert list(dataset.feature_names() or ()) == ["big", "blue", "red", "shoes"]
    assert list(dataset.label_names() or ()) == ["a", "b c"]
    assert "it has 'head', 'body', 'class': give text=TextOptions" in refused(
        tmp_path / "no", path, text=TextOptions(text_fields=("subject",))
    )
    assert "no id field 'uid'" in refused(tmp_path / "no", path, text=TextOptions(("body",), "class", id_field="uid"))


@pytest.mark.parametrize("blank", [b"\n", b"\r\n", b"\n\n\n"])
def test_blank_lines_before_the_header_are_no_header(tmp_path: Path, blank: bytes) -> None:
    whole = csv_bytes(table(DOCUMENTS[:20], "content", "labels"))
    sets = []
    for name, content in (("plain", whole), ("blank", blank + whole)):
        path = tmp_path / f"{name}.csv"
        path.write_bytes(content)
        sets.append(
            converted(path, text=TextOptions(text_fields=("content",), label_field="labels", label_delimiter="|"))
        )
    assert same(*sets)


def test_a_file_without_a_header(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_bytes(b'3,"a title","a text"\n4,other,text\n')
    text = TextOptions(text_fields=("2", "3"), label_field="1")
    dataset = converted(path, header=False, text=text)
    assert (dataset.n_samples, list(dataset.label_names() or ())) == (2, ["3", "4"])


def test_one_column_of_texts(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_bytes(b'text\nred shoes\n"blue, and\nnew"\n')
    dataset = converted(path, unlabelled=True)
    assert (dataset.n_samples, dataset.n_labels) == (2, 0)
    assert list(dataset.feature_names() or ()) == ["and", "blue", "new", "red", "shoes"]


def test_several_files_have_the_same_columns_in_any_order(tmp_path: Path) -> None:
    one, other = tmp_path / "1.csv", tmp_path / "2.tsv"
    one.write_bytes(csv_bytes(table(DOCUMENTS[:100], "title", "content", "labels")))
    other.write_bytes(csv_bytes(table(DOCUMENTS[100:], "labels", "content", "title"), "\t"))
    both = xs.convert([one, other], tmp_path / "both.xmc", text=LABELLED, memory_limit="2GB")
    one.write_bytes(csv_bytes(table(DOCUMENTS, "title", "content", "labels")))
    assert same(both, converted(one, text=LABELLED))
    other.write_bytes(csv_bytes(table(DOCUMENTS[:9], "labels", "content")))
    message = refused(tmp_path / "no", [one, other], text=LABELLED)
    assert "2.tsv:1: its columns are not those of" in message


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"a,b,a\n1,2,3\n", {}, "two columns 'a': give each a name of its own"),
        (b"a,b\n1,2\n", {}, "no text field of a common name: it has 'a', 'b': give text=TextOptions"),
        (b"text,b\n1,2\n", {}, "no label field: it has 'text', 'b': give text=TextOptions"),
        (b"", {}, "there is no row"),
        (b"te\xffxt,labels\na,b\n", {}, "the header is not UTF-8"),
        (b'"text,labels\na,b\n', {}, "there is no row: give a file with a header of names and rows, quotes closed"),
        (GOOD, {"delimiter": "ab"}, "delimiter must be one ASCII character, got 'ab'"),
        (GOOD, {"delimiter": '"'}, "delimiter must be one ASCII character, and not the quote"),
        (GOOD, {"quote": "é"}, "quote must be one ASCII character"),
        (b"\xff\xfet\0e\0", {}, "UTF-16"),
    ],
)
def test_tables_that_are_none(content: bytes, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_bytes(content)
    assert message in refused(tmp_path / "no", path, format="csv", **options)


@pytest.mark.parametrize(
    "content",
    [
        b"1,2,3\n4,5,6\n",
        b"some prose, with a comma\nand none here\n",
        b"a;b\n",
        b"1,2 x:y\n",
        b"0.1\t0.2\n0.3\t0.4\n",
    ],
)
def test_what_is_no_table_is_not_taken_for_one(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(content)
    assert "the format is not recognised" in refused(tmp_path / "no", path)


def test_options_of_csv_are_refused_elsewhere(tmp_path: Path) -> None:
    path = text_files.write_jsonl(tmp_path / "in.jsonl", DOCUMENTS[:5])
    for options in ({"delimiter": ","}, {"quote": ""}, {"header": False}):
        assert "delimiter, quote and header=False are of csv" in refused(tmp_path / "no", path, **options)


def test_ids_that_are_none(tmp_path: Path) -> None:
    path = text_files.write_jsonl(
        tmp_path / "in.jsonl",
        [{"text": "a word", "labels": ["x"], "id": i} for i in (7, "seven", "", None, True, "a\0b", 1.5)],
    )
    text = TextOptions(id_field="id")
    with pytest.raises(InputError, match=r"in.jsonl:4: field 'id' is null, not an id: a text or a whole number"):
        converted(path, text=text)
    dataset = converted(path, text=text, skip=True)
    assert list(dataset.row_ids() or ()) == ["7", "seven", ""]
    assert [row[1] for row in dataset.attributes["skipped_rows"]] == [4, 5, 6, 7]
    other = text_files.write_jsonl(tmp_path / "other.jsonl", [{"text": "a word", "labels": ["x"]}])
    assert converted(other, like=dataset).row_ids() is None


def test_mutated_tables_end_in_rows_or_in_a_line(tmp_path: Path) -> None:
    """Bytes changed, cut out or doubled: an InputError that names the file, or nothing of it unaccounted for."""
    rng = np.random.default_rng(0)
    rows = [["text", "labels"], *([f'wörds "{i}", of\ntext', "ab"[i % 2]] for i in range(6))]
    whole, path = csv_bytes(rows), tmp_path / "in.csv"
    refusals = []
    for trial in range(150):
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
                data[at:at] = bytes(rng.choice(list(b'",;\n\r\t\xff')) for _ in range(n))
        path.write_bytes(data)
        n_records = len(record_starts(bytes(data) + b'"\n' * (data[-1:] != b"\n"), ",", '"'))
        for skip in (False, True):
            try:
                source = delimited.open_source([path], ConvertOptions(skip=skip, delimiter=","), None)
                source.fit(2**26)
                (part,) = source.parts()
                notes: dict[str, Any] = {"folder": str(tmp_path / "own")}
                n_rows = sum(len(block[0][0]) - 1 for block in part.blocks(notes))
            except InputError as error:
                refusals.append(str(error))
            else:
                seen = n_rows + notes["skipped"] + notes["blank_lines"]
                assert n_records - 2 <= seen <= n_records, trial  # the header, and quotes that do not end
    assert all(message.startswith(f"{path}:") for message in refusals)
    assert 30 < len(refusals) < 290


@pytest.mark.slow
def test_the_commands_take_csv(tmp_path: Path, commands: Callable[..., Any]) -> None:
    rows = [
        ["id", "review", "topics"],
        *([f"r{i}", f"words\nof mark{i % 5}, mark{i % 5}", f"t{i % 5};all"] for i in range(200)),
    ]
    path = tmp_path / "train.csv"
    path.write_bytes(csv_bytes(rows))
    fields = "--text-field review --label-field topics --label-delimiter ; --id-field id --delimiter ,".split()
    planned = commands("plan", "convert", path, tmp_path / "x", *fields)
    assert planned["fits"]
    told = commands("convert", path, tmp_path / "train.xmc", *fields)
    assert "CSV, 200 rows, text of review, labels of topics, ids of id (names)" in told["said"]
    piped = subprocess.run(
        cli_command("convert", "-", tmp_path / "piped.xmc", *fields, "--json"),
        input=gzip.compress(path.read_bytes()), capture_output=True, check=True, env=environment(),
    )  # fmt: skip
    assert json.loads(piped.stdout)["n_samples"] == 200
    assert same(xs.open_dataset(tmp_path / "piped.xmc"), xs.open_dataset(tmp_path / "train.xmc"))
    assert commands("verify", tmp_path / "train.xmc")["sound"]
