"""Active sets of one class at a time, as Python lists and dicts of row -> alpha."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .permutation import key_of, permuted

CandidateRows = Sequence[tuple[int, float]]  # (row, score)


def start_set(positives: Collection[int], size: int, label: int, n_samples: int, seed: int) -> list[int]:
    """The positives and the first `size` negatives of a keyed order of all rows, ascending."""
    key = key_of(seed, label, 0, 1 << 40)
    order = (permuted(t, n_samples, key) for t in range(n_samples))
    negatives = [row for row in order if row not in positives]
    return sorted([*positives, *negatives[:size]])


def merged(active: dict[int, float], found: Sequence[CandidateRows], room: int) -> dict[int, float]:
    """The set with the best of what all jobs found: higher scores first, then lower rows."""
    best = sorted((pair for of_job in found for pair in of_job), key=lambda pair: (-pair[1], pair[0]))[:room]
    return dict(sorted([*active.items(), *((row, 0.0) for row, _ in best)]))


def signs(rows: Sequence[int], positives: Collection[int]) -> list[int]:
    """+1 for a positive, -1 for others."""
    return [1 if row in positives else -1 for row in rows]


def without_idle(active: dict[int, float], positives: Collection[int]) -> dict[int, float]:
    """Positives, and negatives with alpha above 0."""
    return {row: alpha for row, alpha in active.items() if row in positives or alpha > 0.0}


def clipped(rows: Sequence[int], start: int, stop: int) -> list[int]:
    """Those in [start, stop), as numbers from start."""
    return [row - start for row in rows if start <= row < stop]
