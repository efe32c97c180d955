"""Text that is written: read back, it is the rows it was written from, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import format as twin

from xmc_stream.kernels.format import FEATURE_BYTES, LABEL_BYTES, ROW_BYTES, format_rows


def text(y_indptr: Any, y_indices: Any, x_indptr: Any, x_indices: Any, x_data: Any, base: int) -> bytes:
    size = LABEL_BYTES * len(y_indices) + FEATURE_BYTES * len(x_indices) + ROW_BYTES * (len(x_indptr) - 1)
    out = np.full(size + 50, 255, np.uint8)  # what lies behind stays as it is
    n = format_rows(y_indptr, y_indices, x_indptr, x_indices, x_data, base, out)
    assert n <= size
    assert (out[size:] == 255).all()
    return out[:n].tobytes()


def values_text(values: Any) -> list[bytes]:
    n = len(values)
    none = np.zeros(n + 1, np.int64)
    lines = text(none, np.empty(0, np.int32), np.arange(n + 1), np.zeros(n, np.int32), values, 0)
    return [line.removeprefix(b" 0:") for line in lines.splitlines()]


def check_values(values: Any) -> None:
    read = np.array([float(word) for word in values_text(values)]).astype(np.float32)
    np.testing.assert_array_equal(read.view(np.uint32), values.view(np.uint32))


@settings(max_examples=300, deadline=None)
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20))
def test_every_float32_comes_back(bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    check_values(values[np.isfinite(values)])


def test_many_float32_come_back() -> None:
    values = np.random.default_rng(0).integers(0, 2**32, 200_000, np.uint32).view(np.float32)
    check_values(values[np.isfinite(values)])
    powers = np.float32(10.0) ** np.arange(-45, 39, dtype=np.float32)
    near = np.concatenate([powers, np.nextafter(powers, np.float32(0)), np.nextafter(powers, np.float32(3e38))])
    check_values(np.concatenate([near, -near, np.float32([0, -0.0, 1e-45, 3.4028235e38])]))


@pytest.mark.parametrize(
    "value", [0, 1, -1, 10, 0.5, -2.25, 0.1, 123456, 1e8, 1e9, 1.5e10, 1e-5, 1e-6, 2e-10, 3.4028235e38, 1e-45, 99999.5]
)
def test_text_is_as_short_as_that_of_python(value: float) -> None:
    assert values_text(np.float32([value])) == [f"{np.float32(value):.9g}".encode()]


@settings(max_examples=30, deadline=None)
@given(n=st.integers(0, 8), base=st.integers(0, 1), seed=st.integers(0, 99), wide=st.booleans())
def test_rows_are_those_of_the_plain_twin(n: int, base: int, seed: int, wide: bool) -> None:
    rng = np.random.default_rng(seed)
    y_indptr, x_indptr = (np.concatenate([[0], np.cumsum(rng.integers(0, 4, n))]) for _ in range(2))
    dtype, bound = (np.int64, 2**63 - 2) if wide else (np.int32, 2**31 - 1)
    y_indices, x_indices = (
        np.array([rng.integers(0, bound if rng.random() < 0.5 else 12) for _ in range(indptr[-1])], dtype)
        for indptr in (y_indptr, x_indptr)
    )
    x_data = np.round(rng.standard_normal(x_indptr[-1]), 3).astype(np.float32)
    arguments = y_indptr, y_indices, x_indptr, x_indices, x_data, base
    assert text(*arguments) == twin.format_rows(*arguments)
