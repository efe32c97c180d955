"""Kernels that read raw text, against Python's re, json and csv: they leave much to these, and never say another thing."""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import records as reference_records
from reference import words as reference

from xmc_stream.convert.formats.delimited import CsvRows, Dialect
from xmc_stream.convert.formats.jsonl import JsonLines
from xmc_stream.convert.kernels.jsonlines import read_objects
from xmc_stream.convert.kernels.records import read_records
from xmc_stream.convert.kernels.tokens import BLANK, HARD, KIND, LIST, SOUND, WHOLE
from xmc_stream.convert.kernels.words import FIRST, ROWS, TIMES
from xmc_stream.convert.lines.files import TextRange
from xmc_stream.convert.options import TextOptions
from xmc_stream.convert.tfidf.block import Block
from xmc_stream.convert.tfidf.table import Rule, WordTable, characters, terms_of, texts_of

# characters that case, words and the scans treat apart
ODD = "aAb1_ \n\t.,'éÉßẞΣσςİıǅÅK日本𐐀𐐨\u0307\u00a0\u2003\u200d\u0345ﬁⅣ²"  # noqa: RUF001
texts = st.text(st.sampled_from(ODD) | st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60)


def words_of(table: WordTable) -> list[str]:
    """The words of a table by their numbers."""
    order = table.order()
    blob, lengths = table.gather(order)
    ends = np.cumsum(lengths)
    found = [blob[end - n : end].tobytes().decode() for end, n in zip(ends, lengths, strict=True)]
    assert found == sorted(found)
    return [word for _, word in sorted(zip(order.tolist(), found, strict=True))]


@given(
    st.lists(texts, max_size=8), st.sampled_from([(1, 1), (1, 2), (2, 3)]), st.booleans(),
    st.sampled_from([(), ("aa", "éa", "b1")]),
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_words_are_those_of_python(
    rows: list[str], ngrams: tuple[int, int], lowercase: bool, stops: tuple[str, ...]
) -> None:
    left_out = WordTable()
    left_out.numbers(terms_of(stops))
    table = WordTable(1, 1)  # which must grow
    rule = Rule(characters(lowercase), left_out.words, ngrams)
    halves = [table.count_texts(terms_of(part), rule) for part in (rows[:3], rows[3:])]
    words = words_of(table)
    counted = [
        Counter(dict(zip([words[i] for i in indices[a:b]], counts[a:b].astype(int).tolist(), strict=True)))
        for indptr, indices, counts in halves
        for a, b in itertools.pairwise(indptr)
    ]
    expected = [reference.terms(row, ngrams, stops, lowercase) for row in rows]
    assert counted == expected
    assert table.words.counts[: len(table), TIMES].tolist() == [sum(row[word] for row in expected) for word in words]
    assert table.words.counts[: len(table), ROWS].tolist() == [sum(word in row for row in expected) for word in words]


def test_lower_case_of_every_character_is_that_of_python() -> None:
    """Alone, and behind a letter, where a sigma ends a word; what the table passes on to Python is in lower case then."""
    everything = [chr(i) for i in range(sys.maxunicode + 1) if not 0xD800 <= i < 0xE000 and i]
    rows = ["".join(f" a{c}b {c}c a{c}" for c in everything[i : i + 500]) for i in range(0, len(everything), 500)]
    table = WordTable()
    rule = Rule(characters(True), WordTable().words, (1, 1))
    table.count_texts(terms_of(rows), rule)
    expected: Counter[str] = Counter()
    for row in rows:
        expected.update(reference.terms(row, (1, 1)))
    assert dict(zip(words_of(table), table.words.counts[: len(table), TIMES].tolist(), strict=True)) == expected


@given(
    st.lists(st.lists(st.text(max_size=12).filter(lambda text: "\0" not in text and text.isprintable()), max_size=6))
)
@settings(max_examples=100, deadline=None)
def test_terms_that_are_cut_already_are_numbered_as_they_come(rows: list[list[str]]) -> None:
    table = WordTable(1, 1)
    flat = [term for row in rows for term in row]
    lengths = np.array([len(row) for row in rows], np.int64)
    indptr, numbers, counts = table.count_terms(terms_of(flat), lengths, np.arange(7, 7 + len(rows)))
    words = list(dict.fromkeys(flat))
    assert words_of(table) == words
    for row, a, b in zip(rows, indptr, indptr[1:], strict=False):
        assert Counter(row) == dict(zip([words[i] for i in numbers[a:b]], counts[a:b].tolist(), strict=True))
    firsts = [next(i for i, row in enumerate(rows, 7) if word in row) for word in words]
    assert table.words.counts[: len(table), FIRST].tolist() == firsts
    assert table.numbers(terms_of(flat)).tolist() == [words.index(term) for term in flat]


FIELDS = ("text", "é", "labels", "")
values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**20) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), values, max_size=5)
blanks = st.text(" \t\r", max_size=2)


@st.composite
def json_lines(draw: st.DrawFn) -> bytes:
    """Objects with white space, escapes or none, and with bytes that are changed, cut out, doubled."""
    separators = (draw(blanks) + "," + draw(blanks), draw(blanks) + ":" + draw(blanks))
    line = json.dumps(draw(objects), ensure_ascii=draw(st.booleans()), separators=separators)
    data = bytearray((draw(blanks) + line + draw(blanks)).encode("utf-8", "surrogatepass"))
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        at, n = draw(st.integers(0, len(data))), draw(st.integers(0, 4))
        data[at : at + n] = draw(
            st.sampled_from([b"", b'"', b"\\", b"\\u00", b"\\ud83d", b"{}", b"[", b"1e", b",", b"\xff", b"\0"])
        )
    return bytes(data).replace(b"\n", b" ")


def read_json(lines: list[bytes], fields: tuple[str, ...] = FIELDS) -> Block:
    text = np.frombuffer(bytearray(b"".join(line + b"\n" for line in lines)), np.uint8)
    names = [field.encode() for field in fields]
    begins, status = np.empty(len(lines) + 1, np.int64), np.empty(len(lines), np.uint8)
    places = np.full((len(lines), len(fields), 3), -1, np.int32)
    wanted = np.frombuffer(bytearray(b"".join(names)), np.uint8)
    n = read_objects(text, 0, wanted, np.cumsum([0, *map(len, names)]), begins, status, places)
    assert n == len(lines)
    assert begins.tolist() == [0, *np.cumsum([len(line) + 1 for line in lines]).tolist()]
    return Block(np.arange(1, n + 1), text, status, places, False, lambda i: reference.json_line(lines[i]))


def value_at(block: Block, row: int, column: int) -> Any:
    """What stands at a place, by json; a place that is missing raises KeyError."""
    kind, start, stop = block.places[row, column].tolist()
    if kind == 0:
        raise KeyError(column)
    content = block.text[start:stop].tobytes().decode()
    return json.loads(
        {LIST: f"[{content}]", WHOLE: content}.get(kind, f'"{content}"') if kind < 6 and kind else content
    )


@given(st.lists(json_lines(), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_a_sound_line_is_what_json_reads(lines: list[bytes]) -> None:
    block = read_json(lines)
    for row, line in enumerate(lines):
        if block.status[row] == BLANK:
            assert not line.strip()
        if block.status[row] != SOUND:
            continue
        expected = reference.json_line(line)
        assert expected is not None
        for column, field in enumerate(FIELDS):
            if field in expected:
                # by their JSON, in which NaN is NaN
                assert json.dumps(value_at(block, row, column)) == json.dumps(expected[field])
            else:
                assert block.places[row, column, KIND] == 0


keys = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_characters='"\\'), max_size=4)


@given(st.lists(st.dictionaries(keys, values, max_size=4), min_size=1, max_size=3), st.booleans())
@settings(max_examples=200, deadline=None)
def test_plain_lines_are_not_left_to_python(rows: list[dict[str, Any]], spaced: bool) -> None:
    lines = [json.dumps(row, ensure_ascii=False, separators=(" ,\t", " : ") if spaced else None) for row in rows]
    lines = [line.replace("NaN", "1.5e-3").replace("Infinity", "0") for line in lines]  # which JSON does not have
    assert (read_json([line.encode() for line in lines]).status == SOUND).all()


sound_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(st.lists(st.tuples(sound_texts, sound_texts), min_size=1, max_size=5), st.booleans())
@settings(max_examples=200, deadline=None)
def test_texts_of_fields_are_joined_as_they_mean(rows: list[tuple[str, str]], escaped: bool) -> None:
    lines = [json.dumps({"labels": b, "text": a}, ensure_ascii=escaped).encode() for a, b in rows]
    block = read_json(lines)
    assert (block.status == SOUND).all()
    found = texts_of(block.texts(0, len(rows), np.array([0, 2])))
    assert found == [f"{a}\n{b}".replace("\0", " ") for a, b in rows]


labels = (
    st.lists(st.integers(-2, 12) | st.just(10**18), max_size=5) | st.integers(-1, 9) | st.just("a") | st.just([1.0])
)


@given(st.lists(labels, min_size=1, max_size=6), st.sampled_from([(0, 2**62), (1, 10)]))
@settings(max_examples=200, deadline=None)
def test_ids_of_labels_are_sorted_and_in_range(rows: list[Any], bounds: tuple[int, int]) -> None:
    block = read_json([json.dumps({"labels": row}).encode() for row in rows])
    ids, indptr = block.label_ids(2, *bounds)
    for i, row in enumerate(rows):
        found = ids[indptr[i] : indptr[i + 1]].tolist()
        own = [row] if isinstance(row, int) else row if isinstance(row, list) else ["a"]
        fits = all(type(x) is int and bounds[0] <= x < min(bounds[1], 10**17) for x in own) and len(set(own)) == len(
            own
        )
        assert (block.status[i] == SOUND) == fits
        assert found == (sorted(own) if fits else [])


names = st.text(st.sampled_from('ab é;\u00a0\u3000\u2009\x1c日\0\\"'), max_size=5)


@given(
    st.lists(names | st.lists(names, max_size=4), min_size=1, max_size=5),
    st.sampled_from([None, ";", "é;"]),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_names_of_labels_are_those_of_python(rows: list[Any], delimiter: str | None, escaped: bool) -> None:
    block = read_json([json.dumps({"labels": row}, ensure_ascii=escaped).encode() for row in rows])
    terms, indptr = block.label_names(2, delimiter)
    found = texts_of(terms)
    for i, row in enumerate(rows):
        own = row if isinstance(row, list) else reference.label_names(row, delimiter) if delimiter else [row]
        fits = all(name and "\0" not in name for name in own) and len(set(own)) == len(own)
        assert (block.status[i] == SOUND) == fits
        assert found[indptr[i] : indptr[i + 1]] == (own if fits else [])


cells = st.text(st.sampled_from('ab,;"\n\ré日\0 '), max_size=6)
raw_rows = st.binary(max_size=30).map(lambda data: data.replace(b"\xfe", b'"').replace(b"\xfd", b","))


@st.composite
def csv_files(draw: st.DrawFn) -> bytes:
    """Rows of three columns as csv writes them, others, and broken ones."""
    rows = []
    for _ in range(draw(st.integers(0, 5))):
        if draw(st.integers(0, 3)):
            own = draw(st.lists(cells, min_size=2, max_size=4))
            own = ['"' + cell.replace('"', '""') + '"' if set(cell) & set(',"\n\r') else cell for cell in own]
            rows.append(",".join(own).encode() + draw(st.sampled_from([b"\n", b"\r\n"])))
        else:
            rows.append(draw(st.text(st.sampled_from('a,"\n\ré'), max_size=12)).encode() + b"\n")
        if draw(st.integers(0, 9)) == 0:
            rows.append(draw(raw_rows) + b"\n")
    return b"".join(rows)


@given(csv_files(), st.sampled_from(['"', None]))
@settings(max_examples=300, deadline=None)
def test_a_sound_row_is_what_csv_reads(data: bytes, quote: str | None) -> None:
    text = np.frombuffer(bytearray(data + b"\n"), np.uint8)[: len(data)]
    room = data.count(b"\n") + 1
    begins, lines = np.empty(room + 1, np.int64), np.ones(room + 1, np.int64)
    status, places = np.empty(room, np.uint8), np.full((room, 2, 3), -1, np.int32)
    columns = np.array([1, -1, 0])
    n = read_records(text, 0, ord(","), ord(quote) if quote else -1, columns, begins, lines, status, places)
    assert begins[1 : n + 1].tolist() == reference_records.record_starts(data, ",", quote)
    block = Block(lines[:n], text, status[:n], places[:n], True, str)
    for row in range(n):
        content = data[begins[row] : begins[row + 1]]
        assert lines[row] == 1 + data[: begins[row]].count(b"\n")
        expected = reference.csv_row(content, ",", quote)
        if b"\r\r" in content and status[row] == HARD:
            continue  # a row that csv may take, which ends in several carriage returns
        assert (status[row] == BLANK) == (expected == [])
        plain = expected is not None and len(expected) == 3 and b"\0" not in content
        assert (status[row] == SOUND) == plain
        if expected and plain:
            found = texts_of(block.texts(row, row + 1, np.array([1, 0])))
            assert found == [f"{expected[0]}\n{expected[2]}"]


@pytest.mark.parametrize("window", [60, 300, 2**19])
def test_rows_are_read_across_windows(window: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of any length, and a last one without a newline, come in order with the lines that they begin in."""
    from xmc_stream.convert.formats import delimited, jsonl

    monkeypatch.setattr(delimited, "_WINDOW", window)
    monkeypatch.setattr(jsonl, "_WINDOW", window)
    bodies = [f"{i}\n" + "long\n" * (i % 40) + "end" for i in range(50)]
    path = tmp_path / "in.csv"
    path.write_text("text,n\n" + "\n".join(f'"{body}",{i}' for i, body in enumerate(bodies)), newline="")
    rows = CsvRows(TextRange(path), Dialect(",", '"'), ("text", "n"), True)
    found, at, line = [], [], 2
    for block in rows.read(2**12, {}, TextOptions(text_fields=("text",), label_field="")):
        assert isinstance(block, Block)
        for status, start, stop in block.runs():
            if status == SOUND:
                found += texts_of(block.texts(start, stop, np.zeros(1, np.int64)))
                at += block.numbers[start:stop].tolist()
            assert status != HARD
    assert found == bodies
    for body, number in zip(bodies, at, strict=True):
        assert number == line
        line += 1 + body.count("\n")
    path.write_text("\n".join(json.dumps({"text": body}) for body in bodies), newline="")
    found = []
    for block in JsonLines(TextRange(path)).read(2**12, {}, TextOptions(text_fields=("text",), label_field="")):
        assert (block.status == SOUND).all()
        found += texts_of(block.texts(0, len(block.status), np.zeros(1, np.int64)))
    assert found == bodies
