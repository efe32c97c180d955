"""The visiting order of large classes, by sorting plain tuples."""

from __future__ import annotations

from collections.abc import Sequence

from reference.permutation import _A, _WORD, key_of, mix, permuted

GROUP = 128


def stream_order(rows: Sequence[int], n_samples: int, run_bits: int, seed: int, round_: int, epoch: int) -> list[int]:
    """The numbers of the rows in the order in which the epoch visits them."""
    key = key_of(seed, 1 << 40, round_, epoch)
    n_runs = (n_samples - 1 >> run_bits) + 1

    def when(i: int) -> tuple[int, int]:
        run, offset = rows[i] >> run_bits, rows[i] % (1 << run_bits)
        group, member = divmod(permuted(run, n_runs, key), GROUP)
        return group, permuted(member << run_bits | offset, GROUP << run_bits, mix(key ^ group * _A & _WORD))

    return sorted(range(len(rows)), key=when)
