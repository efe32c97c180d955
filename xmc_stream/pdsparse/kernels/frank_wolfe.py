"""Fully-corrective block-coordinate Frank-Wolfe steps, sample after sample (Yen et al. 2016, PD-Sparse, Algorithm 1).

    v_k = sum_i a_ik x_i,   w_k = soft(v_k, lam),   a_ik >= 0 on positives, <= 0 on negatives, both sums t in [0, C]

v lies in `pdsparse.kernels.tables`; labels are numbers of a random permutation of them.

The a of a sample are a projection onto the two simplices that they live in (Algorithm 2):

    min ||p - b||^2 + ||q - c||^2   over   p, q >= 0,  sum p = sum q = t,  0 <= t <= C

For a given t both are projections onto a simplex, p = max(b - mu, 0) and q = max(c - nu, 0), and the objective's slope in t
is -2 (mu + nu): so t is 0, C, or where mu + nu = 0, which with m and n entries above 0 is (n S_b + m S_c) / (m + n), S the
sum of the m, n largest entries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR
from xmc_stream.kernels.jit import inner_kernel, kernel
from xmc_stream.kernels.permutation import mix, uniform
from xmc_stream.kernels.ranking import insert, insert_all
from xmc_stream.pdsparse.kernels.tables import (
    WIDE,
    Tables,
    bytes_needed,
    bytes_used,
    fetch,
    find,
    part_bounds,
    place,
    set_weight,
    soft,
    table_of,
)

_A = np.uint64(0x9E3779B97F4A7C15)
_TRIES = 8  # draws of a label that no weight touches
_FEW = 32  # values are sorted by insertion


class ActiveLabels(NamedTuple):
    """Active labels of rows, ragged: row r has labels[begin[r] : begin[r] + size[r]], its positives first, and their a."""

    begin: NDArray[np.int64]
    size: NDArray[np.int64]
    labels: NDArray[np.int32]
    a: NDArray[np.float64]


class Visit(NamedTuple):
    """How rows are visited.

    rate: entries of a row for one that a search samples, 1 for all of them. most: labels that a search may bring in. longest,
    room: entries of a row, and active labels with those that a search brings in, at most. fixed: no search, and no v that
    is not in the tables.
    """

    C: float
    rate: int
    most: int
    longest: int
    room: int
    fixed: bool


@inner_kernel
def add_scores(
    features: NDArray[Any], x: NDArray[np.float32], part: int, tables: Tables, z: NDArray[np.float32]
) -> tuple[int, bool]:
    """z += w_k.x for the labels k of a part, float32, in the order of the entries.

    Returns how many weights that met, wide lists by an eighth of their labels, and whether any list was wide.
    """
    w, weights = tables.w, tables.weights
    low, high = part_bounds(part, tables.n_labels, tables.n_parts)
    scores = z[low:high]
    met, all_ = 0, tables.dense
    for p in range(len(features)):
        value, t = x[p], features[p] * tables.n_parts + part
        met += min(int(w.n[t]), (high - low) // WIDE)
        if tables.dense:
            first = features[p] * tables.n_labels + low
            run = tables.values[first : first + high - low]
            for k in range(high - low):
                scores[k] += value * np.float32(soft(run[k], tables.lam))
        elif tables.wide[t]:
            of_all = weights[w.begin[t] : w.begin[t] + high - low]
            for k in range(high - low):
                scores[k] += value * of_all[k]
            all_ = True
        else:
            for at in range(w.begin[t], w.begin[t] + w.n[t]):
                z[w.words[at]] += value * weights[at]
    return met, all_


@inner_kernel
def search_row(
    features: NDArray[Any], x: NDArray[np.float32], active: NDArray[np.int32], part: int, tables: Tables,
    z: NDArray[np.float32], best: NDArray[np.int64], best_z: NDArray[np.float32],
) -> tuple[int, int]:  # fmt: skip
    """The labels of a part that score highest, and above 0, for the entries of a row; active labels do not count.

    z (K,): zero before and after. best, best_z: places for as many labels as are wanted, from best to worst. Returns
    how many were found, and how many weights were met (see `add_scores`).
    """
    w = tables.w
    low, high = part_bounds(part, tables.n_labels, tables.n_parts)
    best[:], best_z[:] = -1, 0.0
    met, all_ = add_scores(features, x, part, tables, z)
    for k in range(len(active)):
        if low <= active[k] < high:
            z[active[k]] = -np.inf
    if all_ or WIDE * met > high - low:
        insert_all(z[low:high], low, high - low, best, best_z)
        z[low:high] = 0.0
    else:
        for p in range(len(features)):
            t = features[p] * tables.n_parts + part
            for at in range(w.begin[t], w.begin[t] + w.n[t]):
                k = w.words[at]
                if z[k] > 0.0 and z[k] >= best_z[len(best_z) - 1]:
                    insert(k, z[k], best, best_z)
                z[k] = 0.0  # so that it comes once
        for k in range(len(active)):
            z[active[k]] = 0.0
    found = 0
    while found < len(best) and best[found] >= 0:
        found += 1
    return found, met


@inner_kernel
def draw_label(features: NDArray[Any], active: NDArray[np.int32], part: int, tables: Tables, key: np.uint64) -> int:
    """A label of a part that no weight of some features touches, if one is soon found, else any; -1 for none at all."""
    low, high = part_bounds(part, tables.n_labels, tables.n_parts)
    drawn = -1
    for n in range(_TRIES):
        k = low + int(uniform(key, n) * (high - low))
        touched = k == high
        for p in range(len(active)):
            touched = touched or active[p] == k
        if touched:
            continue
        drawn = k
        for p in range(len(features)):
            at = find(features[p], k, tables)
            touched = touched or (at >= 0 and abs(tables.values[at]) > tables.lam)
        if not touched:
            break
    return drawn


@inner_kernel
def sample_row(
    features: NDArray[Any], data: NDArray[np.float32], n: int, key: np.uint64, out_features: NDArray[np.int64],
    out_x: NDArray[np.float32],
) -> None:  # fmt: skip
    """n draws of a row's entries with probability |x_j| / ||x||_1 and value sign(x_j) ||x||_1 / n: w.x on average.

    One from each of n equal parts of the line of all |x_j|, which has less variance than draws from all of it.
    """
    norm = 0.0
    for p in range(len(features)):
        norm += abs(np.float64(data[p]))
    p, upto = 0, abs(np.float64(data[0]))
    for i in range(n):
        at = (i + uniform(key, i)) * norm / n
        while at >= upto and p + 1 < len(features):
            p += 1
            upto += abs(np.float64(data[p]))
        out_features[i] = features[p]
        out_x[i] = np.float32(np.sign(data[p]) * norm / n)


@inner_kernel
def _scores(
    features: NDArray[Any], x: NDArray[np.float64], active: NDArray[np.int32], tables: Tables,
    places: NDArray[np.int64], out: NDArray[np.float64],
) -> None:  # fmt: skip
    """w_k.x of some labels from all entries of a row.

    places: for each entry, and of it each label, where v is in `values`, -1 for nowhere; if there is room for all.
    """
    values, remember = tables.values, len(features) * len(active) <= len(places)
    out[:] = 0.0
    for p in range(len(features)):
        for k in range(len(active)):
            at = find(features[p], active[k], tables)
            if remember:
                places[p * len(active) + k] = at
            if at >= 0:
                out[k] += x[p] * soft(values[at], tables.lam)


@inner_kernel
def _move(
    features: NDArray[Any], x: NDArray[np.float64], active: NDArray[np.int32], steps: NDArray[np.float64],
    tables: Tables, places: NDArray[np.int64], fixed: bool,
) -> None:  # fmt: skip
    """v_k += step_k x for some labels, whose places (see `_scores`) are known as long as none is new to a feature; w follows.

    fixed: where a label is new to a feature, its v stays 0.
    """
    remembered = len(features) * len(active) <= len(places)
    values, words, weights, wide = tables.values, tables.v.words, tables.weights, tables.wide
    n_weights, begin, lam, n_parts = tables.w.n, tables.w.begin, tables.lam, tables.n_parts
    for p in range(len(features)):
        known = remembered
        for k in range(len(active)):
            if steps[k] == 0.0:
                continue
            at = places[p * len(active) + k] if known else find(features[p], active[k], tables)
            if at < 0:
                if fixed:
                    continue
                at = place(features[p], active[k], tables)
                known = False
            before = values[at]
            values[at] = before + steps[k] * x[p]
            weight, t = np.float32(soft(values[at], lam)), table_of(features[p], active[k], tables)
            if tables.dense:
                n_weights[t] += np.int32(weight != 0.0) - np.int32(np.float32(soft(before, lam)) != 0.0)
            elif wide[t]:
                low, _ = part_bounds(t - features[p] * n_parts, tables.n_labels, n_parts)
                to = begin[t] + active[k] - low
                n_weights[t] += np.int32(weight != 0.0) - np.int32(weights[to] != 0.0)
                weights[to] = weight
            elif words[2 * at - 1] >= 0 and weight != 0.0:
                weights[begin[t] + words[2 * at - 1]] = weight
            elif words[2 * at - 1] >= 0 or weight != 0.0:
                set_weight(features[p], active[k], at, weight, tables)


@inner_kernel
def _bring_in(
    features: NDArray[Any], entries: NDArray[np.float32], size: int, active: NDArray[np.int32], key: np.uint64, rate: int,
    tables: Tables, z: NDArray[np.float32], drawn: NDArray[np.int64], sampled: NDArray[np.float32],
    best: NDArray[np.int64], best_z: NDArray[np.float32],
) -> tuple[int, int]:  # fmt: skip
    """Search a row for labels that violate, from all or a sample of its entries, and put them behind its active ones.

    size: how many of these there are. key: of the row's draws. drawn, sampled: room for entries that are sampled; best,
    best_z: for the best labels and their scores. Returns the size then, and the weights that were met.
    """
    n, part, found, met = len(features), int(uniform(key, 0) * tables.n_parts), 0, 0
    if rate > 1 and n:
        n_drawn = (n + rate - 1) // rate
        sample_row(features, entries, n_drawn, mix(key ^ _A), drawn, sampled)
        found, met = search_row(drawn[:n_drawn], sampled, active[:size], part, tables, z, best, best_z)
    else:
        found, met = search_row(features, entries, active[:size], part, tables, z, best, best_z)
    if found == 0:
        best[0] = draw_label(features, active[:size], part, tables, mix(key + _A))
        found = int(best[0] >= 0)
    for k in range(found):
        active[size + k] = best[k]
    fetch(features, active[size : size + found], tables)
    return size + found, met


@kernel
def _descending(values: NDArray[np.float64], n: int, scratch: NDArray[np.float64]) -> NDArray[np.float64]:
    """The first n values, largest first, in scratch."""
    ordered = scratch[:n]
    ordered[:] = values[:n]
    if n > _FEW:
        ordered.sort()
        for i in range(n // 2):
            ordered[i], ordered[n - 1 - i] = ordered[n - 1 - i], ordered[i]
        return ordered
    for i in range(1, n):
        x, j = ordered[i], i
        while j > 0 and ordered[j - 1] < x:
            ordered[j] = ordered[j - 1]
            j -= 1
        ordered[j] = x
    return ordered


@kernel
def _entry(ordered: NDArray[np.float64], n: int, total: float) -> float:
    """The t above which entry n joins the n larger ones, whose sum is total; infinite if there is none."""
    return total - n * ordered[n] if n < len(ordered) else np.inf


@kernel
def project(
    b: NDArray[np.float64],
    m: int,
    c: NDArray[np.float64],
    n: int,
    most: float,
    scratch_b: NDArray[np.float64],
    scratch_c: NDArray[np.float64],
) -> float:
    """Project the first m >= 1 entries of b and n >= 1 of c, in place; returns t. most: C > 0. scratch: m and n places."""
    bs, cs = _descending(b, m, scratch_b), _descending(c, n, scratch_c)
    t = 0.0
    if bs[0] + cs[0] > 0.0:
        m_in, n_in, sum_b, sum_c = 1, 1, bs[0], cs[0]
        while True:
            t = min((n_in * sum_b + m_in * sum_c) / (m_in + n_in), most)
            next_b, next_c = _entry(bs, m_in, sum_b), _entry(cs, n_in, sum_c)
            if min(next_b, next_c) >= t:
                break
            if next_b <= next_c:
                sum_b += bs[m_in]
                m_in += 1
            else:
                sum_c += cs[n_in]
                n_in += 1
        mu, nu = (sum_b - t) / m_in, (sum_c - t) / n_in
        for i in range(m):
            b[i] = max(b[i] - mu, 0.0)
        for i in range(n):
            c[i] = max(c[i] - nu, 0.0)
    else:
        b[:m] = 0.0
        c[:n] = 0.0
    return t


@inner_kernel
def _solve_row(
    scores: NDArray[np.float64], a: NDArray[np.float64], square: float, n_pos: int, C: float,
    p: NDArray[np.float64], q: NDArray[np.float64], scratch_p: NDArray[np.float64], scratch_q: NDArray[np.float64],
) -> None:  # fmt: skip
    """The a of a row's active labels that is best for them: that of positives into q, minus that of negatives into p."""
    n_neg = len(scores) - n_pos
    if square > 0.0:
        for k in range(n_pos):
            q[k] = a[k] - scores[k] / square
        for k in range(n_neg):
            p[k] = (scores[n_pos + k] + 1.0) / square - a[n_pos + k]
        project(p, n_neg, q, n_pos, C, scratch_p, scratch_q)
    else:  # no score can change: all of C, on any pair
        q[:n_pos], p[:n_neg] = 0.0, 0.0
        q[0] = p[0] = C


@kernel
def visit_rows(
    rows: NDArray[np.int64], numbers: NDArray[np.int64], pass_key: np.uint64, block: CSR, sets: ActiveLabels,
    n_positive: NDArray[np.int64], tables: Tables, visit: Visit, z: NDArray[np.float32], places: NDArray[np.int64],
    work: NDArray[np.int64], largest: NDArray[np.float64],
) -> int:  # fmt: skip
    """Take a step on each of some rows of a block, in turn; returns how many were done: the arena may be full before.

    numbers: of the rows of the block in X: a row's draws depend on its number and the key of the pass. sets: their active
    labels, with room for as many more in each as a search may bring in; n_positive: labels that each row has itself. z (K,):
    zero before and after. places: room to remember where a row's v are; rows with more are looked up twice. work (2,) counts
    weights that searches and steps met; largest (1,): step of a.
    """
    indptr, indices, data = block
    C, rate, most, longest, room, fixed = visit
    draws = longest // rate + 1 if rate > 1 else 0
    x, scores, steps = np.empty(longest), np.empty(room), np.empty(room)
    drawn, sampled = np.empty(draws, np.int64), np.empty(draws, np.float32)
    best, best_z = np.empty(most, np.int64), np.empty(most, np.float32)
    p, q, scratch_p, scratch_q = np.empty(room), np.empty(room), np.empty(room), np.empty(room)
    for i in range(len(rows)):
        r = rows[i]
        key = mix(pass_key ^ (np.uint64(numbers[r]) * _A))
        n_pos, size = n_positive[r], sets.size[r]
        if n_pos == 0 or n_pos == tables.n_labels:
            continue  # a = 0 is all it can be
        features, entries = indices[indptr[r] : indptr[r + 1]], data[indptr[r] : indptr[r + 1]]
        n, square, needed = len(features), 0.0, 0
        for j in range(n):
            x[j] = entries[j]
            square += x[j] * x[j]
            if not fixed:
                needed += bytes_needed(features[j], size + most, tables)
        if not tables.dense and bytes_used(tables) + needed > tables.most_bytes:
            return i
        active = sets.labels[sets.begin[r] : sets.begin[r] + size + most]
        a = sets.a[sets.begin[r] : sets.begin[r] + size + most]
        fetch(features, active[:size], tables)
        if not fixed:
            more, met = _bring_in(features, entries, size, active, key, rate, tables, z, drawn, sampled, best, best_z)
            for k in range(size, more):
                a[k] = 0.0
            size = more
            work[0] += met
        work[1] += 2 * size * n
        if size == n_pos:
            continue
        if square > 0.0:
            _scores(features, x, active[:size], tables, places, scores[:size])
        _solve_row(scores[:size], a, square, n_pos, C, p, q, scratch_p, scratch_q)
        for k in range(size):
            steps[k] = (q[k] if k < n_pos else -p[k - n_pos]) - a[k]
            largest[0] = max(largest[0], abs(steps[k]))
        if square > 0.0:
            _move(features, x, active[:size], steps, tables, places, fixed)
        kept = n_pos
        a[:n_pos] = q[:n_pos]
        for k in range(size - n_pos):
            if p[k] > 0.0:
                active[kept], a[kept] = active[n_pos + k], -p[k]
                kept += 1
        sets.size[r] = kept
    return len(rows)
