"""The parser against its plain twin: whole matrices, single numbers to the last bit, and bytes that are no text."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import parse as twin

from xmc_stream.convert.parser import Parser
from xmc_stream.errors import InputError
from xmc_stream.kernels.parse import sort_rows

NAME = "data.txt"


def parsed(text: bytes, n_features: int, n_labels: int) -> list[twin.Row]:
    """Rows as the twin gives them; what the arrays must be is checked on the way."""
    rows = []
    parser = Parser(NAME, n_features, n_labels, first_line=1)
    for x_indptr, x_indices, x_data, y_indptr, y_indices in parser.blocks(np.frombuffer(bytearray(text), np.uint8)):
        assert x_indptr[0] == y_indptr[0] == 0
        assert len(x_indptr) == len(y_indptr)
        assert (x_indptr[-1], y_indptr[-1]) == (len(x_indices), len(y_indices))
        assert x_data.dtype == np.float32
        for i in range(len(x_indptr) - 1):
            x = slice(x_indptr[i], x_indptr[i + 1])
            labels = y_indices[y_indptr[i] : y_indptr[i + 1]].tolist()
            rows.append((labels, list(zip(x_indices[x].tolist(), x_data[x].copy(), strict=True))))
    assert parser.n_rows == len(rows)
    return rows


def bits(rows: list[twin.Row]) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Rows with the bits of their values, so that -0.0 is not 0.0."""
    return [(labels, [(j, int(v.view(np.uint32))) for j, v in pairs]) for labels, pairs in rows]


def agree(text: bytes, n_features: int, n_labels: int) -> None:
    """The same rows, or an error in the same line."""
    expected, line = [], 0
    try:
        expected = twin.parse(text, n_features, n_labels)
    except twin.BadLineError as error:
        line = error.line
    if line:
        with pytest.raises(InputError) as caught:
            parsed(text, n_features, n_labels)
        message = str(caught.value)
        assert message.startswith(f"{NAME}:{line}: ")
        assert message.isprintable()  # hence one line
        assert len(message) < 300
    else:
        assert bits(parsed(text, n_features, n_labels)) == bits(expected)


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
    with pytest.raises(InputError, match=rf"^{NAME}:2: value .* of feature 3 is not a finite|NUL byte|not a feature"):
        parsed(f"0 1:1\n0 3:{number}\n0 2:1\n".encode(), 5, 5)
    agree(f"0 1:1\n0 3:{number}\n0 2:1\n".encode(), 5, 5)


GOOD = b"0,3 0:1 4:2.5e-1\n 1:-3\n2\n\n5, 1\t7:0.125  2:1e0 \r\n,\n3:1 8:00.50\n7,8 9:3.14159265358979323846"
BYTES = b"0123456789:,.+-eE \t\n\r\x00\xff_naxif#"


@given(st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(["put", "insert", "cut"]), st.sampled_from(BYTES))))
@settings(deadline=None, max_examples=600)
def test_mutated_bytes_end_in_the_same_rows_or_in_an_error_of_the_same_line(edits: list[tuple[int, str, int]]) -> None:
    text = bytearray(GOOD.replace(b",\n", b"\n", 1))
    for place, edit, byte in edits:
        at = place % (len(text) + 1)
        text[at : at + (edit != "insert")] = b"" if edit == "cut" else bytes([byte])
    agree(bytes(text), 10, 9)


@given(st.lists(st.sampled_from(BYTES), max_size=30).map(bytes) | st.binary(max_size=60))
@settings(deadline=None, max_examples=600)
def test_any_bytes_end_in_the_same_rows_or_in_an_error_of_the_same_line(text: bytes) -> None:
    agree(text, 10, 9)


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
