"""Metrics from a dense array of scores, label by label and pair by pair; what a filter leaves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fractions import Fraction

Pairs = Collection[tuple[int, int]]


def row_auc(scores: Sequence[float], true: Collection[int]) -> Fraction:
    """The share of (true, other) labels that are ordered rightly, ties counting 1/2; 0 where there is no pair."""
    others = [label for label in range(len(scores)) if label not in true]
    if not true or not others:
        return Fraction(0)
    right = sum(Fraction((scores[t] > scores[o]) * 2 + (scores[t] == scores[o]), 2) for t in true for o in others)
    return right / (len(true) * len(others))


def average_auc(scores: Sequence[Sequence[float]], true: Sequence[Collection[int]]) -> Fraction:
    """The mean over all rows."""
    total = sum((row_auc(of_row, y) for of_row, y in zip(scores, true, strict=True)), Fraction(0))
    return total / len(true) if true else Fraction(0)


def label_figures(
    scores: Sequence[Sequence[float]], true: Sequence[Collection[int]], threshold: float, n_labels: int
) -> dict[str, float]:
    """Hamming loss (a fraction) and macro-F1 over all labels and over those with a true row (per cent)."""
    f1, wrong = [], 0
    for label in range(n_labels):
        predicted = {i for i, of_row in enumerate(scores) if of_row[label] > threshold}
        rows = {i for i, y in enumerate(true) if label in y}
        wrong += len(predicted ^ rows)
        f1.append(2 * len(predicted & rows) / (len(predicted) + len(rows)) if predicted or rows else 0.0)
    present = [f1[label] for label in range(n_labels) if any(label in y for y in true)]
    return {
        "hamming_loss": wrong / (len(true) * n_labels) if true else 0.0,
        "macro_F1": 100 * sum(f1) / n_labels,
        "macro_F1_present": 100 * sum(present) / len(present) if present else 0.0,
    }


def count_above(scores: Sequence[float], positives: Sequence[float]) -> int:
    """For each of the positives twice the scores above it, and once those that are the same."""
    return sum((z > s) * 2 + (z == s) for z in scores for s in positives)


def without(rows: Sequence[Sequence[int]], pairs: Pairs, width: int = 0) -> list[list[int]]:
    """Each row without the labels it is paired with, filled up with -1 to a width."""
    kept = [[label for label in row if (i, label) not in pairs] for i, row in enumerate(rows)]
    return [row + [-1] * (width - len(row)) for row in kept]
