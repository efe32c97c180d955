"""Ranking metrics of top-k predictions, streamed: update with a block of rows, read the result.

This module covers: P@k, nDCG@k, R@k and, given inverse propensities, PSP@k and PSnDCG@k; from counts over the scores of
all labels average AUC, Hamming loss and macro-F1; and leaving pairs of rows and labels out. It does not rank, read or
print anything.

Every sum is kept as a whole number of 2**-52, so addition is exact and a metric has the same bits however the rows were
cut into blocks.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from xmc_stream.errors import InputError

PROPENSITY_PRESETS: Mapping[str, tuple[float, float]] = {
    "default": (0.55, 1.5),
    "amazon": (0.6, 2.6),
    "wikipedia": (0.5, 0.4),
}
"""The (a, b) of `inverse_propensity` that the field uses, by kind of data."""

_HIGH_BITS, _LOW_BITS = 20, 32  # a term is summed as two integers, so that neither sum leaves int64
_ONE = 1 << (_HIGH_BITS + _LOW_BITS)
_MAX_INVERSE_PROPENSITY = 2.0**16
# a term is at most k * 2**16, hence its high part at most k * 2**36, and n of them stay below 2**63
_MAX_RANKED = 2**27

_PLAIN = ("P", "nDCG", "R")
_SCORED = ("PSP", "PSnDCG")

_Integers = npt.NDArray[np.integer[Any]]
_Floats = npt.NDArray[np.float64]


def inverse_propensity(label_counts: npt.ArrayLike, n_samples: int, a: float = 0.55, b: float = 1.5) -> _Floats:
    """Inverse propensities of the labels: how much a hit on a rare label is worth.

    1/p_l = 1 + C (N_l + b)^-a  with  C = (ln N - 1) (b + 1)^a

    label_counts: [n_labels], N_l, the training samples that carry label l. n_samples: N, the training samples, at least
    3 (below that 1/p_l < 1). a >= 0, b > 0: see PROPENSITY_PRESETS. Returns float64 [n_labels], no unit, each >= 1.
    Raises InputError for counts outside 0..n_samples and for parameters out of range.
    """
    counts = np.asarray(label_counts)
    if counts.ndim != 1 or counts.dtype.kind not in "iuf":
        raise InputError(
            f"The 'label_counts' of inverse_propensity must be a vector of numbers, one per label. "
            f"Got shape {counts.shape} of {counts.dtype} instead."
        )
    if n_samples < 3:
        raise InputError(
            f"The 'n_samples' of inverse_propensity must be at least 3. Got {n_samples} instead: leave the propensity-"
            f"scored metrics out, or give the whole training set."
        )
    if not (0 <= a < np.inf and 0 < b < np.inf):
        raise InputError(f"The 'a' and 'b' of inverse_propensity must be in [0, inf) and (0, inf). Got {a} and {b}.")
    if not np.all((counts >= 0) & (counts <= n_samples)):
        raise InputError(
            f"The 'label_counts' of inverse_propensity must be in [0, {n_samples}], the number of training samples: "
            f"count each label once per sample, and on the set that 'n_samples' speaks of."
        )
    c = (np.log(float(n_samples)) - 1.0) * (b + 1.0) ** a
    return np.asarray(1.0 + c * (counts.astype(np.float64) + b) ** -a, dtype=np.float64)


class RankingMetrics:
    """P@k, nDCG@k, R@k and, with inverse propensities, PSP@k and PSnDCG@k over a stream of rows, in percent.

    With h_r = 1 where the label of rank r is a true one, y a row's set of true labels, I = sum_{r<=min(k,|y|)} 1 / log2(r+1):
      P@k    = mean over rows of (1/k) sum_{r<=k} h_r
      nDCG@k = mean over rows of (1/I) sum_{r<=k} h_r / log2(r+1)
      R@k    = mean over rows of [sum_{r<=k} h_r] / max(|y|, 1)
      PSP@k  = [sum over rows of (1/k) sum_{r<=k} h_r / p_r] / [the same for the rows' best possible rankings]
      PSnDCG@k = [sum over rows of (1/I) sum_{r<=k} h_r / (p_r log2(r+1))] / [the same for the rows' best possible rankings]
    Every row counts; one without true labels adds 0. The best possible ranking is the true labels by falling 1/p.

    ks: the k wanted, each at least 1, none twice. inverse_propensity: float [n_labels], 1/p, each in [1, 65536].
    Raises InputError for anything else. units: name of a sum, as "P@1", -> what it is so far, in units of 2**-52.
    """

    def __init__(self, ks: Sequence[int] = (1, 3, 5), inverse_propensity: npt.ArrayLike | None = None) -> None:
        try:
            self.ks = tuple(operator.index(k) for k in ks)
        except TypeError:
            raise InputError(f"The 'ks' of RankingMetrics must be integers. Got {ks!r} instead.") from None
        if not self.ks or min(self.ks) < 1 or len(set(self.ks)) < len(self.ks):
            raise InputError(f"The 'ks' of RankingMetrics must be distinct integers, at least 1. Got {ks!r} instead.")
        self._depth = max(self.ks)
        self._columns = np.asarray(self.ks, dtype=np.int64) - 1
        self._discounts: _Floats = 1.0 / np.log2(np.arange(2, self._depth + 2))
        self._inverse = None if inverse_propensity is None else np.asarray(inverse_propensity, np.float64)
        if self._inverse is not None and not np.all(
            (self._inverse >= 1.0) & (self._inverse <= _MAX_INVERSE_PROPENSITY)
        ):
            raise InputError(
                f"The 'inverse_propensity' of RankingMetrics must be in [1, {_MAX_INVERSE_PROPENSITY:g}]: give 1/p, not p, "
                f"for instance from inverse_propensity()."
            )
        self.n_samples = 0
        self.units: Counter[str] = Counter()

    def update(self, labels: _Integers, indptr: _Integers, indices: _Integers) -> None:
        """Add a block of rows.

        labels: int [n, at least max(ks)], predicted label ids, best first, -1 where there are fewer, none twice in a
        row. indptr: int [n + 1], starting at 0; indices: int [nnz], ids of the true labels, sorted and unique in each
        row. Raises InputError, and adds nothing, where fewer labels were predicted, or the block is too large to sum.
        """
        if labels.shape[1] < self._depth:
            raise InputError(
                f"RankingMetrics.update: 'labels' has {labels.shape[1]} columns but k={self._depth} was asked for; "
                f"predict at least that many labels, or ask for a smaller k."
            )
        if len(labels) * self._depth >= _MAX_RANKED:
            raise InputError(
                f"RankingMetrics.update: {len(labels)} rows of {self._depth} labels at once; give smaller blocks."
            )
        top, sizes = labels[:, : self._depth], np.diff(indptr)
        hits = among(np.arange(len(top))[:, None], top, indptr, indices)
        ideal = np.cumsum(self._discounts)[np.minimum(sizes[:, None], self._columns + 1).clip(min=1) - 1]
        terms = {
            "P": self._up_to_ks(hits),
            "nDCG": self._up_to_ks(hits * self._discounts) / ideal,
            "R": self._up_to_ks(hits) / sizes.clip(min=1)[:, None],
        }
        if self._inverse is not None:
            gains = np.where(hits, self._inverse[top], 0.0)  # a padding label picks the last entry, never used
            rank_exists = np.arange(self._depth) < sizes[:, None]  # [n, depth], rank r <= |y|
            best = _best_gains(self._inverse[indices], indptr, rank_exists)
            terms["PSP"], terms["best PSP"] = self._up_to_ks(gains), self._up_to_ks(best)
            terms["PSnDCG"] = self._up_to_ks(gains * self._discounts) / ideal
            terms["best PSnDCG"] = self._up_to_ks(best * self._discounts) / ideal
        for name, term in terms.items():
            self.units.update({f"{name}@{k}": units for k, units in zip(self.ks, _exact_sums(term), strict=True)})
        self.n_samples += len(top)

    def result(self) -> dict[str, float]:
        """The metrics of all rows so far in percent, by name and k: "P@1", "nDCG@3", "PSP@5" and so on.

        0.0 where there is nothing to divide by.
        """
        wholes = {f"{name}@{k}": self.n_samples * _ONE * (k if name == "P" else 1) for name in _PLAIN for k in self.ks}
        if self._inverse is not None:
            wholes |= {f"{name}@{k}": self.units[f"best {name}@{k}"] for name in _SCORED for k in self.ks}
        return {name: _percent(self.units[name], whole) for name, whole in wholes.items()}

    def _up_to_ks(self, values: npt.NDArray[Any]) -> _Floats:
        """Sums of each row over the ranks up to each k: [n, depth] -> float64 [n, len(ks)]."""
        return np.asarray(np.cumsum(values, axis=1, dtype=np.float64)[:, self._columns])


def auc_units(above: _Integers, n_true: _Integers, n_labels: int) -> int:
    """Sum over rows of the AUC within a row, in units of 2**-52: the share of (true, other) label pairs ordered rightly.

    above: int [n], sum over all labels z and true labels s of the row of 2 [z scores higher than s] + [they score the
    same]; n_true: int [n], true labels of the row. Ties count 1/2; a row without true labels, or without others, adds 0.
    """
    pairs = 2 * n_true * (n_labels - n_true)
    # true labels among themselves, and each with itself, make n_true^2 of `above`
    right = pairs - (above - n_true * n_true)
    auc = np.where(pairs > 0, right / pairs.clip(min=1), 0.0)
    return _exact_sums(auc[:, None])[0]


class LabelMetrics:
    """Hamming loss and macro-F1 from counts over labels, which may come in any blocks.

    hamming_loss = (predicted, not true + true, not predicted) / (N K), a fraction. F1 of a label = 2 TP / (predicted +
    true), 0 where nothing is predicted nor true; macro_F1 = its mean over all labels, macro_F1_present = over those with
    a true row, in per cent.
    """

    def __init__(self) -> None:
        self._wrong = self._f1 = self._n_labels = self._n_present = 0

    def update(self, hits: _Integers, predicted: _Integers, true: _Integers) -> None:
        """Add labels: int [n] each, rows in which the label is predicted and true, is predicted, is true."""
        self._wrong += int((predicted + true - 2 * hits).sum())
        # a label that is not present has no hits, hence an F1 of 0
        self._f1 += _exact_sums((2.0 * hits / (predicted + true).clip(min=1))[:, None])[0]
        self._n_labels += len(true)
        self._n_present += int(np.count_nonzero(true))

    def result(self, n_samples: int) -> dict[str, float]:
        """The metrics, 0 where there is nothing to divide by."""
        return {
            "hamming_loss": self._wrong / max(n_samples * self._n_labels, 1),
            "macro_F1": _percent(self._f1, self._n_labels * _ONE),
            "macro_F1_present": _percent(self._f1, self._n_present * _ONE),
        }


def average_auc(units: int, n_samples: int) -> float:
    """The mean over rows of what `auc_units` summed: a fraction."""
    return units / (n_samples * _ONE) if n_samples else 0.0


def leave_out_labels(
    y_indptr: _Integers, y_indices: _Integers, barred_indptr: _Integers, barred_indices: _Integers
) -> tuple[npt.NDArray[np.int64], _Integers]:
    """True labels (indptr, indices) without those that are barred; both sorted and unique in each row."""
    sizes = np.diff(y_indptr)
    rows = np.repeat(np.arange(len(sizes)), sizes)
    kept = ~among(rows, y_indices, barred_indptr, barred_indices)
    ends = np.zeros(len(y_indices) + 1, np.int64)
    np.cumsum(kept, out=ends[1:])
    return np.asarray(ends[y_indptr]), y_indices[kept]


def leave_out_predictions(labels: _Integers, barred_indptr: _Integers, barred_indices: _Integers) -> _Integers:
    """Rankings int [n, k] without the labels that are barred (sorted, unique in each row): those behind move up.

    -1 fills up.
    """
    barred = among(np.arange(len(labels))[:, None], labels, barred_indptr, barred_indices)
    order = np.argsort(barred, axis=1, kind="stable")
    moved = np.take_along_axis(labels, order, axis=1)
    moved[np.take_along_axis(barred, order, axis=1)] = -1
    return moved


def among(rows: _Integers, labels: _Integers, indptr: _Integers, indices: _Integers) -> npt.NDArray[np.bool_]:
    """bool, in the shape of labels: is (row, label) one of the pairs, sorted and unique in each row."""
    n_ids = max(int(labels.max(initial=-1)), int(indices.max(initial=-1))) + 1
    pairs = _keys(np.diff(indptr), indices, n_ids)
    keys = rows * n_ids + labels
    return np.asarray((pairs[np.searchsorted(pairs, keys)] == keys) & (labels >= 0))


def _keys(sizes: _Integers, indices: _Integers, n_ids: int) -> npt.NDArray[np.int64]:
    """(row, id) of every pair as one number, and a last one above them all, so that a search never ends past it.

    Sorted rows of sorted ids give one sorted vector, searched once for a whole block.
    """
    keys = np.empty(len(indices) + 1, dtype=np.int64)
    keys[:-1] = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes) * n_ids + indices
    keys[-1] = np.iinfo(np.int64).max
    return keys


def _best_gains(gains: _Floats, indptr: _Integers, rank_exists: npt.NDArray[np.bool_]) -> _Floats:
    """float64 [n, depth]: the gains of each row's true labels from the largest down, 0 past the last."""
    rows = np.repeat(np.arange(len(rank_exists)), np.diff(indptr))
    falling = gains[np.lexsort((-gains, rows))]
    best = np.zeros(rank_exists.shape, dtype=np.float64)
    best[rank_exists] = falling[(indptr[:-1, None] + np.arange(rank_exists.shape[1]))[rank_exists]]
    return best


def _exact_sums(terms: _Floats) -> tuple[int, ...]:
    """Sum of each column in units of 2**-52, free of rounding but for a term's bits below the unit."""
    scaled = terms * 2.0**_HIGH_BITS
    high = np.floor(scaled)
    low = np.rint((scaled - high) * 2.0**_LOW_BITS)
    highs, lows = high.astype(np.int64).sum(axis=0), low.astype(np.int64).sum(axis=0)
    return tuple((int(h) << _LOW_BITS) + int(w) for h, w in zip(highs, lows, strict=True))


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0
