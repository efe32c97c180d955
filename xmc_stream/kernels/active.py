"""Active sets of many classes at once: how they start, grow by what the search found, and shrink.

Ragged arrays: class c has the entries [ptr[c], ptr[c + 1]) of an array; rows ascend within a class.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.jit import kernel
from xmc_stream.kernels.permutation import key_of, permuted, word_bits

_START = 1 << 40  # the epoch number that the draw of the first negatives uses: no epoch reaches it


@kernel
def start_sets(
    p_ptr: NDArray[np.int64],
    positives: NDArray[Any],
    sizes: NDArray[np.int64],
    first_label: int,
    n_samples: int,
    seed: int,
    ptr: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> None:
    """Active sets of round 0: the positives and sizes[c] keyed random negatives; ptr and rows are filled."""
    ptr[0] = 0
    bits = word_bits(n_samples)
    for c in range(len(p_ptr) - 1):
        mine = positives[p_ptr[c] : p_ptr[c + 1]]
        filled = ptr[c]
        for p in range(len(mine)):
            rows[filled] = mine[p]
            filled += 1
        wanted = filled + sizes[c]
        key = key_of(seed, first_label + c, 0, _START)
        t = 0
        while filled < wanted:
            row = permuted(t, n_samples, bits, key)
            t += 1
            q = np.searchsorted(mine, row)
            if q == len(mine) or mine[q] != row:
                rows[filled] = row
                filled += 1
        rows[ptr[c] : filled].sort()
        ptr[c + 1] = filled


@kernel
def draw_negatives(n: int, label: int, n_samples: int, seed: int, words: NDArray[np.uint64]) -> None:
    """`start_sets` for one class whose positives are marked: mark n keyed random negatives."""
    bits = word_bits(n_samples)
    key = key_of(seed, label, 0, _START)
    t = 0
    while n:
        row = permuted(t, n_samples, bits, key)
        t += 1
        bit = np.uint64(1) << np.uint64(row & 63)
        if not words[row >> 6] & bit:
            words[row >> 6] |= bit
            n -= 1


@kernel
def merge_found(
    a_ptr: NDArray[np.int64],
    a_rows: NDArray[Any],
    a_alpha: NDArray[np.float64],
    f_ptr: NDArray[np.int64],
    f_rows: NDArray[Any],
    f_scores: NDArray[np.float32],
    room: NDArray[np.int64],
    cursors: NDArray[np.int64],
    ptr: NDArray[np.int64],
    rows: NDArray[np.int64],
    alpha: NDArray[np.float64],
) -> None:
    """Active sets of the next round: A and the best of what the search jobs found, with their alpha (0 if new).

    f_ptr (J, n + 1): for each job the places of class c in f_rows, f_scores, best first. room (n,): how many
    may be added at most. cursors (J,) is scratch.
    """
    n_jobs = f_ptr.shape[0]
    ptr[0] = 0
    for c in range(len(a_ptr) - 1):
        begin = ptr[c]
        filled = begin
        for j in range(n_jobs):
            cursors[j] = f_ptr[j, c]
        for _ in range(room[c]):
            best = -1
            for j in range(n_jobs):
                q = cursors[j]
                if q < f_ptr[j, c + 1] and (
                    best < 0
                    or f_scores[q] > f_scores[cursors[best]]
                    or (f_scores[q] == f_scores[cursors[best]] and f_rows[q] < f_rows[cursors[best]])
                ):
                    best = j
            if best < 0:
                break
            rows[filled] = f_rows[cursors[best]]
            cursors[best] += 1
            filled += 1
        rows[begin:filled].sort()
        # merge from the back, where the sorted new rows leave the room
        n_new, q = filled - begin, a_ptr[c + 1] - 1
        place = begin + n_new + (a_ptr[c + 1] - a_ptr[c])
        ptr[c + 1] = place
        new = filled - 1
        while place > begin:
            place -= 1
            if q >= a_ptr[c] and (new < begin or a_rows[q] > rows[new]):
                rows[place], alpha[place] = a_rows[q], a_alpha[q]
                q -= 1
            else:
                rows[place], alpha[place] = rows[new], 0.0
                new -= 1


@kernel
def set_signs(
    p_ptr: NDArray[np.int64],
    positives: NDArray[Any],
    ptr: NDArray[np.int64],
    rows: NDArray[np.int64],
    sign: NDArray[np.int8],
) -> None:
    """sign = +1 where the row is a positive of its class, else -1."""
    for c in range(len(ptr) - 1):
        p = p_ptr[c]
        for q in range(ptr[c], ptr[c + 1]):
            while p < p_ptr[c + 1] and positives[p] < rows[q]:
                p += 1
            sign[q] = 1 if p < p_ptr[c + 1] and positives[p] == rows[q] else -1


@kernel
def drop_idle(
    ptr: NDArray[np.int64],
    rows: NDArray[np.int64],
    sign: NDArray[np.int8],
    alpha: NDArray[np.float64],
    counts: NDArray[np.int64],
) -> int:
    """Close up the ragged arrays over negatives with alpha = 0, in place; returns what remains."""
    filled = 0
    for c in range(len(ptr) - 1):
        begin = filled
        for q in range(ptr[c], ptr[c + 1]):
            if sign[q] > 0 or alpha[q] > 0.0:
                rows[filled], alpha[filled] = rows[q], alpha[q]
                filled += 1
        counts[c] = filled - begin
    return filled


@kernel
def mark(rows: NDArray[np.int64], words: NDArray[np.uint64]) -> None:
    """Set the bit of each row."""
    for q in range(len(rows)):
        words[rows[q] >> 6] |= np.uint64(1) << np.uint64(rows[q] & 63)


@kernel
def _count_bits(word: np.uint64) -> int:
    word = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return int(np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56)))


@kernel
def count_before(words: NDArray[np.uint64], before: NDArray[np.int32]) -> int:
    """before[w] = bits set in the words ahead of w; returns all bits set."""
    total = 0
    for w in range(len(words)):
        before[w] = total
        total += _count_bits(words[w])
    return total


@kernel
def marked_rows(words: NDArray[np.uint64], out: NDArray[np.int64]) -> None:
    """The marked rows in ascending order."""
    filled = 0
    for w in range(len(words)):
        word = words[w]
        if word:
            for b in range(64):
                if (word >> np.uint64(b)) & np.uint64(1):
                    out[filled] = w * 64 + b
                    filled += 1


@kernel
def rank(rows: NDArray[np.int64], words: NDArray[np.uint64], before: NDArray[np.int32], out: NDArray[np.int64]) -> None:
    """Number of each (marked) row among the marked ones."""
    for q in range(len(rows)):
        w = rows[q] >> 6
        below = (np.uint64(1) << np.uint64(rows[q] & 63)) - np.uint64(1)
        out[q] = before[w] + _count_bits(words[w] & below)


@kernel
def clip_rows(
    ptr: NDArray[np.int64],
    rows: NDArray[Any],
    start: int,
    stop: int,
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    out: NDArray[np.int32],
    filled: int,
) -> int:
    """Append the rows in [start, stop) of each class to `out`, as numbers from `start`; returns their number.

    ptr: places of the classes in `rows`. begins, ends: their places in all that was appended so far (`filled` before
    this call); a class whose begin is -1 begins here, others go on.
    """
    n = 0
    for c in range(len(ptr) - 1):
        if begins[c] < 0:
            begins[c] = filled + n
        mine = rows[ptr[c] : ptr[c + 1]]
        for q in range(np.searchsorted(mine, start), np.searchsorted(mine, stop)):
            out[n] = mine[q] - start
            n += 1
        ends[c] = filled + n
    return n
