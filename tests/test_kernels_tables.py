"""Hash tables in one arena against dictionaries."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from xmc_stream.kernels.tables import (
    Tables,
    dense_tables,
    find,
    hash_tables,
    part_bounds,
    place,
    places_needed,
    table_of,
)

K, D, ARENA = 50, 4, 4096


def add(tables: Tables, feature: int, label: int, value: float) -> None:
    before, needed = int(tables.used[0]), places_needed(feature, 1, tables)
    tables.values[place(feature, label, tables)] += value
    assert tables.used[0] - before <= needed


def get(tables: Tables, feature: int, label: int) -> float | None:
    at = find(feature, label, tables)
    return None if at < 0 else float(tables.values[at])


STEPS = st.lists(st.tuples(st.integers(0, D - 1), st.integers(0, K - 1), st.integers(1, 9)), max_size=300)


@settings(deadline=None)
@given(STEPS, st.integers(1, 3))
def test_tables_hold_what_dictionaries_hold(steps: list[tuple[int, int, int]], n_parts: int) -> None:
    tables, twin = hash_tables(D, K, n_parts, ARENA), {}
    tables.labels[:], tables.values[:] = -7, np.nan  # not cleared
    for feature, label, value in steps:
        add(tables, feature, label, value)
        twin[feature, label] = twin.get((feature, label), 0) + value
    for feature in range(D):
        for label in range(K):
            assert get(tables, feature, label) == twin.get((feature, label))
    counts = np.zeros(D * n_parts, int)
    for feature, label in twin:
        counts[table_of(feature, label, tables)] += 1
    assert tables.count.tolist() == counts.tolist()
    for n, bits, begin in zip(counts, tables.bits, tables.begin, strict=True):
        length = 0 if bits < 0 else 1 << int(bits)
        assert n * 4 <= 3 * length
        assert length <= max(4, 4 * n)
        assert np.count_nonzero(tables.labels[begin : begin + length] != K) == n


@given(st.integers(1, 200), st.integers(1, 7))
def test_parts_are_runs_of_labels(n_labels: int, n_parts: int) -> None:
    tables = hash_tables(1, n_labels, n_parts, 0)
    runs = [range(*part_bounds(part, n_labels, n_parts)) for part in range(n_parts)]
    assert [label for run in runs for label in run] == list(range(n_labels))
    assert all(table_of(0, label, tables) == part for part, run in enumerate(runs) for label in run)


def test_regions_that_were_left_are_used_again() -> None:
    tables = hash_tables(D, K, 1, ARENA)
    for feature in range(D):
        for label in range(K):
            add(tables, feature, label, 1)
    # the first one leaves 4, 8, 16, 32 and 64 places, which the others grow through
    assert tables.used[0] == 4 + 8 + 16 + 32 + 64 + D * 128
    assert all(get(tables, feature, label) == 1 for feature in range(D) for label in range(K))


def test_dense_vectors_have_every_place() -> None:
    tables = dense_tables(D, K, 3)
    assert places_needed(2, 100, tables) == 0
    add(tables, 2, 7, 5.0)
    assert get(tables, 2, 7) == 5.0
    assert get(tables, 3, K - 1) == 0.0
    assert tables.values.sum() == 5.0
