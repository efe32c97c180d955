"""Ranking metrics row by row, straight from their definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence


def inverse_propensity(label_counts: Sequence[int], n_samples: int, a: float, b: float) -> list[float]:
    """1/p of each label from how many of the n_samples training samples carry it."""
    c = (math.log(n_samples) - 1) * (b + 1) ** a
    return [1 + c * (count + b) ** -a for count in label_counts]


def dcg(gains: Sequence[float]) -> float:
    """Sum of gain / log2(rank + 1), ranks from 1."""
    return math.fsum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, start=1))


def ranking_figures(
    predicted: Sequence[Sequence[int]],
    true: Sequence[set[int]],
    ks: Sequence[int],
    inverse: Sequence[float] | None = None,
) -> dict[str, float]:
    """Every figure in percent, from label ids: predicted of each row, best first, -1 for none, and true of each row."""
    figures = {}
    rows = list(zip(predicted, true, strict=True))
    n = max(len(rows), 1)
    for k in ks:
        p, ndcg, r = [], [], []
        for ranking, y in rows:
            hits = [1 if label in y else 0 for label in ranking[:k]]
            p.append(sum(hits) / k)
            ndcg.append(dcg(hits) / dcg([1] * min(k, len(y))) if y else 0.0)
            r.append(sum(hits) / max(len(y), 1))
        figures[f"P@{k}"] = 100 * math.fsum(p) / n
        figures[f"nDCG@{k}"] = 100 * math.fsum(ndcg) / n
        figures[f"R@{k}"] = 100 * math.fsum(r) / n
        if inverse is None:
            continue
        psp, best_psp, psndcg, best_psndcg = [], [], [], []
        for ranking, y in rows:
            gains = [inverse[label] if label in y else 0.0 for label in ranking[:k]]
            best = sorted((inverse[label] for label in y), reverse=True)[:k]
            ideal = dcg([1] * min(k, len(y))) if y else 1.0
            psp.append(sum(gains) / k)
            best_psp.append(sum(best) / k)
            psndcg.append(dcg(gains) / ideal)
            best_psndcg.append(dcg(best) / ideal)
        figures[f"PSP@{k}"] = 100 * math.fsum(psp) / math.fsum(best_psp) if any(true) else 0.0
        figures[f"PSnDCG@{k}"] = 100 * math.fsum(psndcg) / math.fsum(best_psndcg) if any(true) else 0.0
    return figures
