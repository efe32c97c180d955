"""Which rows go to validation, said plainly."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from reference.permutation import key_of


def validation_rows(rows: Sequence[Sequence[int]], n_labels: int, fraction: float, seed: int) -> list[bool]:
    """Whether each row is chosen. rows: their labels."""
    counts = Counter(label for row in rows for label in row)
    in_training = counts.copy()
    seen: Counter[int] = Counter()
    taken: Counter[int] = Counter()
    chosen = []
    for row in rows:
        group = min(row, key=lambda label: (counts[label], label), default=n_labels)
        seen[group] += 1
        phase = (key_of(seed, group, 0, 0) >> 11) / 2**53
        due = taken[group] < math.floor(seen[group] * fraction + phase)
        chosen.append(due and all(in_training[label] > 1 for label in row))
        if chosen[-1]:
            taken[group] += 1
            in_training.subtract(row)
    return chosen
