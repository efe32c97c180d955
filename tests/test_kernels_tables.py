"""Hash tables and lists in two arenas against dictionaries."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from xmc_stream.pdsparse.kernels.tables import (
    V_WIDTH,
    Tables,
    bytes_needed,
    bytes_used,
    find,
    length,
    new_tables,
    part_bounds,
    place,
    purge,
    set_weight,
    soft,
    table_of,
)

K, D, BYTES, LAM = 50, 4, 1 << 16, 1.5


def step(tables: Tables, feature: int, label: int, value: float) -> None:
    before, needed = bytes_used(tables), bytes_needed(feature, 1, tables)
    at = place(feature, label, tables)
    had = tables.dense and soft(tables.values[at], LAM) != 0.0
    tables.values[at] += value
    weight = np.float32(soft(tables.values[at], LAM))
    if tables.dense:
        tables.w.n[table_of(feature, label, tables)] += int(weight != 0.0) - int(had)
    else:
        set_weight(feature, label, at, weight, tables)
    assert bytes_used(tables) - before <= needed


def get(tables: Tables, feature: int, label: int) -> float | None:
    at = find(feature, label, tables)
    return None if at < 0 else float(tables.values[at])


def weights(tables: Tables) -> dict[tuple[int, int], float]:
    """All lists of w."""
    out = {}
    for t, (begin, count, wide) in enumerate(zip(tables.w.begin, tables.w.n, tables.wide, strict=True)):
        if wide:
            low, high = part_bounds(t % tables.n_parts, tables.n_labels, tables.n_parts)
            of_all = tables.weights[begin : begin + high - low]
            out |= {(t // tables.n_parts, low + k): float(of_all[k]) for k in np.flatnonzero(of_all).tolist()}
            continue
        for at in range(begin, begin + count):
            label = int(tables.w.words[at])
            assert table_of(t // tables.n_parts, label, tables) == t
            out[t // tables.n_parts, label] = float(tables.weights[at])
    return out


STEPS = st.lists(st.tuples(st.integers(0, D - 1), st.integers(0, K - 1), st.integers(-2, 2)), max_size=400)


@settings(deadline=None)
@given(STEPS, st.integers(1, 3))
def test_tables_hold_what_dictionaries_hold(steps: list[tuple[int, int, int]], n_parts: int) -> None:
    tables, twin = new_tables(D, K, n_parts, LAM, BYTES), {}
    tables.v.words[:] = -7  # not cleared
    for feature, label, value in steps:
        step(tables, feature, label, value)
        twin[feature, label] = twin.get((feature, label), 0) + value
    for feature in range(D):
        for label in range(K):
            assert get(tables, feature, label) == twin.get((feature, label))
    assert weights(tables) == {key: soft(value, LAM) for key, value in twin.items() if abs(value) > LAM}
    counts = np.zeros(D * n_parts, int)
    for feature, label in twin:
        counts[table_of(feature, label, tables)] += 1
    assert tables.v.n.tolist() == counts.tolist()
    for n, size, begin in zip(counts, tables.v.size, tables.v.begin, strict=True):
        places = 0 if size < 0 else length(int(size))
        assert n * 5 <= 4 * places
        assert places <= max(4, 2 * n)
        labels = tables.v.words[V_WIDTH * begin : V_WIDTH * (begin + places) : V_WIDTH]
        assert np.count_nonzero(labels != K) == n


@settings(deadline=None)
@given(STEPS, st.integers(1, 3), st.sampled_from([0.0, 1.0, 3.0]), st.booleans())
def test_what_is_small_is_taken_out(steps: list[tuple[int, int, int]], n_parts: int, above: float, dense: bool) -> None:
    tables = new_tables(D, K, n_parts, LAM, 0 if dense else BYTES)
    twin: dict[tuple[int, int], int] = {}
    for q, (feature, label, value) in enumerate(steps):
        if q == len(steps) // 2:  # what stays is found and changed later, as before
            purge(above, tables)
            twin = {key: v for key, v in twin.items() if abs(v) > above}
        step(tables, feature, label, value)
        twin[feature, label] = twin.get((feature, label), 0) + value
    purge(above, tables)
    kept = {key: v for key, v in twin.items() if abs(v) > above}
    for feature in range(D):
        for label in range(K):
            assert get(tables, feature, label) == kept.get((feature, label), 0 if dense else None)
    large = {key: soft(v, LAM) for key, v in kept.items() if abs(v) > LAM}
    assert tables.w.n.sum() == len(large)
    if not dense:
        assert weights(tables) == large
        assert tables.v.n.sum() == len(kept)


@given(st.integers(1, 200), st.integers(1, 7))
def test_parts_are_runs_of_labels(n_labels: int, n_parts: int) -> None:
    tables = new_tables(1, n_labels, n_parts, LAM, 0)
    runs = [range(*part_bounds(part, n_labels, n_parts)) for part in range(n_parts)]
    assert [label for run in runs for label in run] == list(range(n_labels))
    assert all(table_of(0, label, tables) == part for part, run in enumerate(runs) for label in run)


def test_regions_that_were_left_are_used_again() -> None:
    tables = new_tables(D, K, 1, LAM, BYTES)
    for feature in range(D):
        for label in range(K):
            step(tables, feature, label, 2.0)
    # the first one leaves shorter regions, which the others grow through
    assert tables.v.used[0] == 4 + 6 + 8 + 12 + 16 + 24 + 32 + 48 + D * 64
    assert tables.w.used[0] == 4 + 6 + D * 64  # wide from 7 weights on
    assert len(weights(tables)) == D * K


def test_dense_vectors_have_every_place() -> None:
    tables = new_tables(D, K, 3, LAM, 0)
    assert bytes_needed(2, 100, tables) == 0
    step(tables, 2, 7, 5.0)
    assert get(tables, 2, 7) == 5.0
    assert get(tables, 3, K - 1) == 0.0
    assert tables.values.sum() == 5.0
