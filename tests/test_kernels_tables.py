"""Hash tables in one arena against dictionaries."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from xmc_stream.kernels.tables import find, place, places_needed

N_LABELS, N_TABLES, ARENA = 50, 4, 4096


class Tables:
    def __init__(self) -> None:
        self.begin, self.bits = np.zeros(N_TABLES, np.int64), np.full(N_TABLES, -1, np.int8)
        self.count, self.labels = np.zeros(N_TABLES, np.int32), np.full(ARENA, -7, np.int32)
        self.values, self.free, self.used = np.full(ARENA, np.nan), np.full(32, -1, np.int64), np.zeros(1, np.int64)

    def add(self, t: int, label: int, value: float) -> None:
        before, needed = int(self.used[0]), places_needed(t, 1, self.bits, self.count, self.labels)
        at = place(
            t, label, N_LABELS, self.begin, self.bits, self.count, self.labels, self.values, self.free, self.used
        )
        assert self.used[0] - before <= needed
        self.values[at] += value

    def get(self, t: int, label: int) -> float | None:
        at = find(t, label, N_LABELS, self.begin, self.bits, self.labels)
        return None if at < 0 else float(self.values[at])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, N_TABLES - 1), st.integers(0, N_LABELS - 1), st.integers(1, 9)), max_size=300))
def test_tables_hold_what_dictionaries_hold(steps: list[tuple[int, int, int]]) -> None:
    tables, twin = Tables(), {}
    for t, label, value in steps:
        tables.add(t, label, value)
        twin[t, label] = twin.get((t, label), 0) + value
    for t in range(N_TABLES):
        for label in range(N_LABELS):
            assert tables.get(t, label) == twin.get((t, label))
    lengths = [0 if bits < 0 else 1 << int(bits) for bits in tables.bits]
    counts = [sum(key[0] == t for key in twin) for t in range(N_TABLES)]
    assert tables.count.tolist() == counts
    for n, length, begin in zip(counts, lengths, tables.begin, strict=True):
        assert n * 4 <= 3 * length
        assert length <= max(4, 4 * n)
        mine = tables.labels[begin : begin + length]
        assert np.count_nonzero(mine != N_LABELS) == n


def test_regions_that_were_left_are_used_again() -> None:
    tables = Tables()
    for t in range(N_TABLES):
        for label in range(N_LABELS):
            tables.add(t, label, 1)
    # the first one leaves 4, 8, 16, 32 and 64 places, which the others grow through
    assert tables.used[0] == 4 + 8 + 16 + 32 + 64 + N_TABLES * 128
    assert all(tables.get(t, label) == 1 for t in range(N_TABLES) for label in range(N_LABELS))


def test_dense_vectors_have_every_place() -> None:
    nothing = np.empty(0, np.int32)
    tables = Tables()
    assert places_needed(2, 100, tables.bits, tables.count, nothing) == 0
    assert find(2, 7, N_LABELS, tables.begin, tables.bits, nothing) == 2 * N_LABELS + 7
    at = place(
        2, 7, N_LABELS, tables.begin, tables.bits, tables.count, nothing, tables.values, tables.free, tables.used
    )
    assert at == 2 * N_LABELS + 7
    assert tables.used[0] == 0
