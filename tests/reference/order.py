"""The visiting order of large classes, by sorting plain tuples."""

from __future__ import annotations

from collections.abc import Sequence

from reference.permutation import _A, _WORD, key_of, mix, permuted

GROUP = 128


def stream_order(rows: Sequence[int], n_samples: int, strip_bits: int, seed: int, round_: int, epoch: int) -> list[int]:
    """The numbers of the rows in the order in which the epoch visits them."""
    key = key_of(seed, 1 << 40, round_, epoch)
    n_strips = (n_samples - 1 >> strip_bits) + 1

    def when(i: int) -> tuple[int, int]:
        strip, offset = rows[i] >> strip_bits, rows[i] % (1 << strip_bits)
        group, member = divmod(permuted(strip, n_strips, key), GROUP)
        return group, permuted(member << strip_bits | offset, GROUP << strip_bits, mix(key ^ group * _A & _WORD))

    return sorted(range(len(rows)), key=when)
