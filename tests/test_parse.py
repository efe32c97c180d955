"""The parser against its plain twin: whole matrices, single numbers to the last bit, and bytes that are no text."""

from __future__ import annotations

import random
import re
import time
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from helpers.parsing import NAME, agree, bits, lines_of, read
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import parse as twin

from xmc_stream.convert.kernels.parse import sort_rows
from xmc_stream.convert.lines.parser import UNKNOWN, Dialect, Parser, bom_length
from xmc_stream.errors import InputError


def parsed(text: bytes, n_features: int, n_labels: int, rules: twin.Rules = twin.XMLREPO) -> list[twin.Row]:
    """The rows."""
    return read(text, n_features, n_labels, rules)[0]


def value_of(number: str) -> np.float32:
    [(_, [(_, value)])] = parsed(f" 0:{number}\n".encode(), 1, 1)
    return value


def exactly(number: str) -> None:
    """The value is float32(float(number)), bit for bit, or an error where that is infinite."""
    with np.errstate(over="ignore"):
        expected = np.float32(float(number))
    if np.isinf(expected):
        with pytest.raises(InputError, match="too large for float32"):
            value_of(number)
    else:
        assert value_of(number).view(np.uint32) == expected.view(np.uint32), number


@st.composite
def matrices(draw: st.DrawFn) -> tuple[list[twin.Row], int, int]:
    """Rows with any labels and any finite float32 values, and how many features and labels there are."""
    n_features, n_labels = draw(st.integers(1, 60)), draw(st.integers(1, 40))
    value = st.floats(width=32, allow_nan=False, allow_infinity=False).map(np.float32)
    row = st.tuples(
        st.lists(st.integers(0, n_labels - 1), unique=True),
        st.lists(st.tuples(st.integers(0, n_features - 1), value), unique_by=lambda pair: pair[0]),
    )
    return draw(st.lists(row, max_size=8)), n_features, n_labels


@given(matrices(), st.randoms(use_true_random=False), st.sampled_from(["\n", "\r\n"]), st.booleans())
@settings(deadline=None)
def test_matrices_come_back_from_text_exactly(
    problem: tuple[list[twin.Row], int, int], rng: random.Random, newline: str, ends: bool
) -> None:
    rows, n_features, n_labels = problem
    blanks = [" ", "  ", "\t", " \t "]
    formats = [str, "{:.8e}".format, "{:.17g}".format, "{:.60f}".format, "{:+.9E}".format]
    lines = []
    for labels, pairs in rows:
        comma = rng.choice([",", ", ", ",\t"])
        features = "".join(f"{rng.choice(blanks)}{j}:{rng.choice(formats)(float(v))}" for j, v in pairs)
        lines.append(comma.join(map(str, labels)) + features + rng.choice(["", " ", "\t"]))
    text = newline.join(lines) + (newline if ends and lines else "")
    if lines and not ends and lines[-1] == "":
        rows = rows[:-1]  # an empty last line without its newline is no line
    expected = [(sorted(labels), sorted(pairs, key=lambda pair: pair[0])) for labels, pairs in rows]
    assert bits(parsed(text.encode(), n_features, n_labels)) == bits(expected)


@pytest.mark.parametrize("n", [1, 2, 16, 17, 18, 100, 1000])
@pytest.mark.parametrize("order", ["random", "descending", "ascending", "saw"])
def test_rows_of_any_order_are_sorted(n: int, order: str) -> None:
    rng = random.Random(n)
    ids = sorted(rng.sample(range(10 * n), n))
    if order == "random":
        rng.shuffle(ids)
    elif order == "descending":
        ids.reverse()
    elif order == "saw":
        ids = ids[::2] + ids[1::2]
    line = ",".join(map(str, ids)) + "".join(f" {j}:{j}.5" for j in ids)
    [(labels, pairs)] = parsed(line.encode(), 10 * n, 10 * n)
    assert labels == sorted(ids)
    assert pairs == [(j, j + 0.5) for j in sorted(ids)]
    agree((line + f" {ids[0]}:1").encode(), 10 * n, 10 * n)  # twice, at the far end
    agree(f"{ids[0]},{line}".encode(), 10 * n, 10 * n)


def test_sort_rows_names_the_row_with_an_index_twice() -> None:
    indptr = np.array([0, 2, 2, 5])
    indices, data = np.array([3, 1, 9, 7, 8], np.int32), np.array([1, 2, 3, 4, 5], np.float32)
    assert sort_rows(indptr, indices, data) == -1
    assert indices.tolist() == [1, 3, 7, 8, 9]
    assert data.tolist() == [2, 1, 4, 5, 3]
    assert sort_rows(indptr, np.array([3, 1, 7, 9, 7], np.int32), data) == 2


@st.composite
def numbers(draw: st.DrawFn) -> str:
    """Decimal numbers: few and many digits, exponents near and far, leading and trailing zeros."""
    digits = st.text("0123456789", max_size=draw(st.sampled_from([3, 20, 60])))
    whole, fraction = draw(st.sampled_from(["", "0", "000"])) + draw(digits), draw(digits)
    if not whole and not fraction:
        whole = "7"
    exponent = draw(st.one_of(st.none(), st.integers(-60, 45), st.sampled_from([-400, 400, 10**30, -(10**30)])))
    text = draw(st.sampled_from(["", "-", "+"])) + whole + ("." + fraction if fraction or draw(st.booleans()) else "")
    return text if exponent is None else f"{text}{draw(st.sampled_from('eE'))}{exponent}"


@given(numbers())
@settings(deadline=None, max_examples=400)
def test_numbers_are_exact(number: str) -> None:
    exactly(number)


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(1, 25))
@settings(deadline=None)
def test_doubles_are_exact(number: float, digits: int) -> None:
    exactly(repr(number))
    exactly(f"{number:.{digits}e}")


@given(st.integers(0, 0x7F7FFFFF), st.integers(14, 120), st.integers(-3, 3), st.booleans())
@settings(deadline=None, max_examples=400)
def test_numbers_at_the_middle_of_two_floats_are_exact(pattern: int, digits: int, off: int, point: bool) -> None:
    """The hard ones: a tie, or off it by a unit in the last of many digits (the last pattern ties with infinity)."""
    low = np.uint32(pattern).view(np.float32)
    gap = Fraction(2) ** (max((pattern >> 23) - 1, 0) - 149)
    middle = Fraction(float(low)) + gap / 2
    power = 0
    while middle * 10**power < 10 ** (digits - 1):
        power += 1
    while middle * Fraction(10) ** power >= 10**digits:
        power -= 1
    scaled = round(middle * Fraction(10) ** power) + off
    text = str(scaled)
    exactly(f"{text[0]}.{text[1:]}e{len(text) - 1 - power}" if point else f"{text}e{-power}")


@pytest.mark.parametrize(
    "number",
    ["0", "-0", "00.000", "0e999999999999999999999", "1e-400", "1.", ".5", "-.5e1", "9007199254740993", "16777217",
     "33554433", "1e22", "1e23", "123456789012345678901234567890", "3.4028234663852886e38", "3.4028235677973366e38",
     "3.4028235677973365e38", "3.40282356779733661637539395458142568447e38", "1e39", "1e400", "-1e400", "1.4e-45",
     "7.006492321624085354618e-46", "7.0064923216240853546186479164495806564013097093825788587853e-46", "1e-323",
     "0." + "0" * 400 + "1e401", "1" + "0" * 400 + "e-400", "0.1" + "0" * 1000 + "1"],
)  # fmt: skip
def test_chosen_numbers_are_exact(number: str) -> None:
    exactly(number)


@pytest.mark.parametrize(
    "number",
    ["", "abc", "nan", "NaN", "inf", "-inf", "infinity", "0x1p3", "1_000", "1e", "1e+", "e5", ".", "+", "--1", "+-1",
     "1.2.3", "1,5", "1e5.0", "1d5", "1f", "٣", "1:2", "1\x00", "\x00", "1\r1"],
)  # fmt: skip
def test_what_is_no_decimal_number_is_refused(number: str) -> None:
    reasons = "value .* of feature 3 is not a finite|there is a (NUL byte|carriage return)|.* is not a feature"
    with pytest.raises(InputError, match=rf"^{NAME}:2: ({reasons})"):
        parsed(f"0 1:1\n0 3:{number}\n0 2:1\n".encode(), 5, 5)
    agree(f"0 1:1\n0 3:{number}\n0 2:1\n".encode(), 5, 5)


GOOD = b"0,3 0:1 4:2.5e-1\n 1:-3\n2\n\n5, 1\t7:0.125  2:1e0 \r\n,\n3:1 8:00.50\n7,8 9:3.14159265358979323846"
BYTES = b"0123456789:,.+-eE \t\n\r\x00\xff_naxif#"
RULES = st.builds(
    twin.Rules,
    libsvm=st.booleans(),
    x_base=st.sampled_from([0, 1, None]),
    y_base=st.sampled_from([0, 1, None]),
    skip=st.booleans(),
    sum_duplicates=st.booleans(),
    drop_unseen=st.booleans(),
)


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(["put", "insert", "cut"]), st.sampled_from(BYTES))), RULES
)
@settings(deadline=None, max_examples=600)
def test_mutated_bytes_end_in_the_same_rows_or_in_an_error_of_the_same_line(
    edits: list[tuple[int, str, int]], rules: twin.Rules
) -> None:
    text = bytearray(GOOD.replace(b",\n", b"\n", 1))
    for place, edit, byte in edits:
        at = place % (len(text) + 1)
        text[at : at + (edit != "insert")] = b"" if edit == "cut" else bytes([byte])
    agree(bytes(text), 10, 9, rules)


@given(st.lists(st.sampled_from(BYTES), max_size=30).map(bytes) | st.binary(max_size=60), RULES)
@settings(deadline=None, max_examples=600)
def test_any_bytes_end_in_the_same_rows_or_in_an_error_of_the_same_line(text: bytes, rules: twin.Rules) -> None:
    agree(text, 10, 9, rules)


def test_more_rows_than_planned_for_are_given_in_steps() -> None:
    text = b"\n" * 1000 + b"1 2:3\n" * 1000
    rows = parsed(text, 3, 2)
    assert rows == [([], [])] * 1000 + [([1], [(2, np.float32(3))])] * 1000


def test_a_text_of_the_densest_entries_fits_the_arrays() -> None:
    for n in range(1, 40):
        features = " ".join(["0:1"] + [f"{j}:1" for j in range(1, n)])
        for text in (
            features,
            ",".join(map(str, range(n))),
            features + " 0:",
            "0:1\n" * n,
            "0\n" * n,
            "0:1\n" * n + "0:",
        ):
            agree(text.encode(), 50, 50)


def test_ids_of_many_digits_are_beyond_any_bound() -> None:
    for digits in (17, 18, 19, 20, 40, 500):
        agree(b"%s 0:1" % (b"9" * digits), 10**17, 10**17)
        agree(b" %s:1" % (b"9" * digits), 10**17, 10**17)
        agree(b" %s:1" % (b"0" * digits), 1, 1)


LIBSVM = twin.Rules(libsvm=True)


def one_row(text: str, **rules: Any) -> tuple[list[int], dict[int, float]]:
    """The row of a text that has one, of libsvm's dialect unless told otherwise, at most 100 features and labels."""
    agree(text.encode(), 100, 100, twin.Rules(**{"libsvm": True, **rules}))
    [(labels, pairs)] = parsed(text.encode(), 100, 100, twin.Rules(**{"libsvm": True, **rules}))
    return labels, {feature: float(value) for feature, value in pairs}


def reason(text: str, n: int = 100, **rules: Any) -> str:
    """What is wrong in line 2, which the text is put into."""
    text = f"1 1:1\n{text}\n2 2:2\n"
    agree(text.encode(), n, n, twin.Rules(**{"libsvm": True, **rules}))
    with pytest.raises(InputError) as caught:
        parsed(text.encode(), n, n, twin.Rules(**{"libsvm": True, **rules}))
    assert str(caught.value).startswith(f"{NAME}:2: ")
    return str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["3 1:2 4:0.5", "3 1:2 4:0.5\n", "3 1:2 4:0.5\r\n", "+3 1:2 4:.5", "3.0 1:2 4:5e-1", "3. 4:0.5 1:2", "03 1:+2 4:0.5",
     "  3 1:2 4:0.5", "3\t1:2\t4:0.5 ", "3 1:2 4:0.5#", "3 1:2 4:0.5 # 5:1 \xff \0", "#\n\n  \n3 1:2 4:0.5\n\t# 3 1:2\n\r\n"],
)  # fmt: skip
def test_libsvm_lines_of_the_same_row(text: str) -> None:
    assert one_row(text) == ([3], {1: 2.0, 4: 0.5})


def test_libsvm_rows_without_labels_or_features_and_of_many_labels() -> None:
    assert one_row(" 1:2") == ([], {1: 2.0})
    assert one_row("1:2") == ([], {1: 2.0})
    assert one_row("7") == ([7], {})
    assert one_row("7 # no features") == ([7], {})
    assert one_row("7,+5.0,\t6 1:2") == ([5, 6, 7], {1: 2.0})


def test_a_line_without_anything_is_a_row_of_xmlrepo_and_none_of_libsvm() -> None:
    text = b"1 1:1\n\n \n2 2:2\n"
    assert len(parsed(text, 9, 9)) == 4
    rows, notes = read(text, 9, 9, LIBSVM)
    assert [labels for labels, _ in rows] == [[1], [2]]
    assert (notes["blank_lines"], notes["lines"], notes["rows"]) == (2, 4, 2)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("1 qid:3 1:2", "'qid:3' is a query"),
        ("-1 1:2", "label '-1' is negative: .* write -1 and [+]1 as 0 and 1"),
        ("0.5 1:2", "label '0.5' is not a whole number"),
        ("1e3 1:2", "label '1e3' is not a whole number"),
        ("1 -1:2", "feature id in '-1:2' is negative"),
        ("1, 1:2", "is not a list of label ids"),
        ("1 2 3:4", "'2' is not a feature id:value"),
        ("1 3:4\r 4:5", "carriage return"),
        ("1 3:\0004", "NUL byte"),
        ("1 100:4", "feature id 100 is not below D = 100, as was given: ids count from 0"),
        ("1 100:4 100:4", "feature id 100"),
        ("1 99999999999999999999:4", "feature id 99999999999999999999 is not below"),
        ("+100 1:1", "label id [+]100 is not below K = 100"),
        ("1 5:1 5:2", "feature 5 stands twice in the row: .*sum_duplicates=True"),
        ("1,1 5:1", "label 1 stands twice in the row"),
        ("1 5:nan", "value 'nan' of feature 5 is not a finite decimal number"),
        ("1 5:inf", "value 'inf' of feature 5"),
        ("1 5:1e39", "too large for float32"),
    ],
)
def test_reasons_say_what_to_do(line: str, said: str) -> None:
    assert re.search(said, reason(line))


def test_ids_below_the_base_are_refused_and_those_at_its_end_are_not() -> None:
    assert one_row("100 100:1", x_base=1, y_base=1) == ([100], {100: 1.0})
    assert one_row("100 100:1", x_base=None, y_base=None) == ([100], {100: 1.0})
    assert "feature id 0 is below 1: ids count from 1 here" in reason("1 0:1", x_base=1)
    assert "label id 0 is below 1: ids count from 1 here" in reason("0 1:1", y_base=1)
    assert "feature id 101 is above D = 100, as was given: ids count from 1" in reason("1 101:1", x_base=1)
    assert reason("1 101:1", x_base=None).endswith("feature id 101 is above D = 100, as was given")


def test_ids_are_below_two_to_the_31_where_sizes_are_not_known() -> None:
    largest = 2**31 - 2
    agree(f"{largest} {largest}:1".encode(), UNKNOWN, UNKNOWN, LIBSVM)
    [(labels, [(feature, _)])] = parsed(f"{largest} {largest}:1".encode(), UNKNOWN, UNKNOWN, LIBSVM)
    assert labels == [feature] == [largest]
    assert "say how many by n_features" in reason(f"1 {largest + 1}:1", UNKNOWN)
    assert "say how many by n_labels" in reason(f"{2**40} 1:1", UNKNOWN)
    [(labels, [(feature, _)])] = parsed(b"1099511627776 1099511627775:1", 2**40, 2**40 + 1, LIBSVM)
    assert (labels, feature) == ([2**40], 2**40 - 1)


def test_values_of_a_feature_are_added_in_float32_in_an_order_of_their_own() -> None:
    values = [16777216.0, 1.0, 1.0, -3.0, 0.25]
    expected = np.float32(0)
    for value in sorted(values):
        expected = expected + np.float32(value)
    rng = random.Random(0)
    for n_others in (0, 30):  # short rows and long ones are sorted in different ways
        for _ in range(20):
            tokens = [f"5:{value}" for value in values] + [f"{j}:1" for j in range(10, 10 + n_others)]
            rng.shuffle(tokens)
            _, pairs = one_row("3,3,3 " + " ".join(tokens), sum_duplicates=True)
            assert pairs[5] == expected
            assert len(pairs) == 1 + n_others
    assert "add up beyond float32" in reason("1 5:3e38 5:3e38", sum_duplicates=True)
    assert read(b"3,3,4 1:1 2:1 1:1", 9, 9, twin.Rules(sum_duplicates=True))[1]["summed_duplicates"] == 2


def test_unseen_ids_are_dropped_and_counted_but_their_values_must_be_numbers() -> None:
    text = b"1,99 1:1 99:2 98:1e-46\n98 97:1 97:1\n"
    rows, notes = read(text, 9, 9, twin.Rules(drop_unseen=True))
    assert rows == [([1], [(1, 1.0)]), ([], [])]
    assert (notes["dropped_features"], notes["dropped_labels"]) == (4, 2)
    agree(text, 9, 9, twin.Rules(drop_unseen=True))
    assert "value 'x' of feature 99" in reason("1 99:x", 9, drop_unseen=True)
    hard = "7.0064923216240853546186479164495806564013097093825788587853e-46"  # only float() can tell
    agree(f"1 99:{hard} 1:{hard}\n1 99:3.40282356779733661637539395458142568447e38 2:2".encode(), 9, 9, LIBSVM)
    agree(f"1 99:{hard} 1:{hard}".encode(), 9, 9, twin.Rules(drop_unseen=True))


def test_a_row_that_is_left_out_leaves_no_trace_in_the_counts() -> None:
    rules = twin.Rules(skip=True, drop_unseen=True, sum_duplicates=True)
    text = b"99,1,1 99:1 1:1 1:1 x\n1 1:1\n99,1,1 8:1 99:1e400\n2 2:2"
    agree(text, 9, 9, rules)
    rows, notes = read(text, 9, 9, rules)
    assert [labels for labels, _ in rows] == [[1], [2]]
    assert notes["dropped_features"] == notes["dropped_labels"] == notes["summed_duplicates"] == 0
    assert (notes["x_ids"], notes["y_ids"]) == ([1, 2], [1, 2])
    assert [line for line, _ in notes["skipped_rows"]] == [1, 3]
    assert "'x' is not a feature" in notes["skipped_rows"][0][1]
    assert "too large for float32" in notes["skipped_rows"][1][1]


def test_a_million_bad_lines_are_counted_and_a_thousand_listed() -> None:
    begin = time.process_time()  # of this process, whatever others do
    rows, notes = read(b"x\n" * 10**6 + b"1 1:1\n", 9, 9, twin.Rules(skip=True))
    assert time.process_time() - begin < 20
    assert rows == [([1], [(1, 1.0)])]
    assert notes["skipped"] == 10**6
    assert [line for line, _ in notes["skipped_rows"]] == list(range(1, 1001))


@pytest.mark.parametrize("tell", [True, False])
def test_lines_are_numbered_across_texts_with_blank_and_skipped_ones(tell: bool) -> None:
    texts = [b"1 1:1\n\n# x\nbad\n", b"\n2 2:2\nbad\n2 2:2", b"bad\n"]
    asked = []

    def first_line() -> int:
        asked.append(True)
        return 11

    parser = Parser("a.txt", 9, 9, first_line=first_line if tell else 11, dialect=Dialect(libsvm=True, skip=True))
    for text in texts:
        for _ in parser.blocks(lines_of(text)):
            pass
    assert len(asked) == tell  # it may take long
    assert [line for line, _ in parser.notes()["skipped_rows"]] == [14, 17, 19]
    assert (parser.n_lines, parser.n_rows) == (9, 3)


def test_byte_order_marks() -> None:
    assert bom_length("a", b"\xef\xbb\xbf1 1:1") == 3
    assert bom_length("a", b"1 1:1") == bom_length("a", b"") == 0
    for encoding in ("utf-16", "utf-32"):
        with pytest.raises(InputError, match=r"^a:1: this is UTF-16 or UTF-32"):
            bom_length("a", "1 1:1".encode(encoding))
    with pytest.raises(InputError, match="NUL byte"):
        parsed("1 1:1\n".encode("utf-16-le"), 9, 9, LIBSVM)


def test_lines_of_labels_alone_have_the_base_of_labels_and_count_as_labels() -> None:
    dialect = Dialect(x_base=0, y_base=1, drop_unseen=True)
    parser = Parser("a.txt", 5, None, first_line=1, noun="label", dialect=dialect)
    text = np.frombuffer(bytearray(b"5:1 1:1 6:1 7:1\n2:1\n"), np.uint8)
    assert [j for _, indices, *_ in parser.blocks(text) for j in indices.tolist()] == [1, 5, 2]
    notes = parser.notes()
    assert (notes["dropped_features"], notes["dropped_labels"]) == (0, 2)
    assert (notes["x_ids"], notes["y_ids"]) == (None, [1, 5])
    with pytest.raises(InputError, match=r"^a\.txt:3: label id 0 is below 1: ids count from 1 here"):
        list(parser.blocks(np.frombuffer(bytearray(b"0:1\n"), np.uint8)))
