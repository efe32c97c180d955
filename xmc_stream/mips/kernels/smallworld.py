"""A navigable small world over sparse class vectors, with signposts: searches, links, and their repair.

A class's sketch is its largest entries. A signpost of a feature lists classes whose sketch has it, with their weight: what
a row's signposts add up to says where its search begins, as most vectors have no feature in common and a walk alone would
not get from one to the other. A search scores vectors as they are now. So a link or signpost that is out of date leads it
astray, and never to a wrong score.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import Labels
from xmc_stream.kernels.jit import inner_kernel, kernel
from xmc_stream.mips.kernels.classvectors import (
    EMPTY,
    ClassTables,
    Int,
    RankedRows,
    dot,
    feature_of,
    fetch,
    length,
    rank_of,
)
from xmc_stream.mips.kernels.innerproducts import Best, offer


class Graph(NamedTuple):
    """Links of K classes, and signposts of D features; -1 where there is none.

    neighbours (K, 2 M): the M classes that it chose, and up to M that chose it, of similarity (K, M). linked (K,):
    searches may find it.
    sketches (K, m): features of the sketch at the last linking; norms (K,): ||w|| then.
    posted (D, L), posted_weights (D, L): the signposts.
    """

    neighbours: NDArray[np.int32]
    similarity: NDArray[np.float32]
    linked: NDArray[np.bool_]
    sketches: NDArray[np.int32]
    norms: NDArray[np.float64]
    posted: NDArray[np.int32]
    posted_weights: NDArray[np.float32]


class Pool(NamedTuple):
    """What a search holds, one a thread: the best classes found, by score; expanded: their neighbours were looked at.

    stamp (K,): the number of the last search that met a class. waiting: classes to be scored, those that a search begins at
    or 2 M neighbours. sums (K,), touched (K,): what signposts add up to, zeros between searches. entries, entry_sums: the
    largest of them. counts (2,): the number of the present search, and classes scored.
    """

    classes: NDArray[np.int32]
    scores: NDArray[np.float32]
    expanded: NDArray[np.bool_]
    stamp: NDArray[np.int32]
    waiting: NDArray[np.int32]
    sums: NDArray[np.float32]
    touched: NDArray[np.int32]
    entries: NDArray[np.int32]
    entry_sums: NDArray[np.float32]
    counts: NDArray[np.int64]


def empty_graph(n_classes: int, n_features: int, links: int, sketch: int, posts: int) -> Graph:
    """Nothing is linked."""
    return Graph(
        np.full((n_classes, 2 * links), -1, np.int32), np.zeros((n_classes, links), np.float32),
        np.zeros(n_classes, np.bool_), np.full((n_classes, sketch), -1, np.int32), np.zeros(n_classes),
        np.full((n_features, posts), -1, np.int32), np.zeros((n_features, posts), np.float32),
    )  # fmt: skip


def new_pool(n_classes: int, size: int, links: int, hubs: int, entries: int) -> Pool:
    """For searches that hold `size` classes, and begin at so many hubs and entries."""
    return Pool(
        np.empty(size, np.int32), np.empty(size, np.float32), np.empty(size, np.bool_), np.zeros(n_classes, np.int32),
        np.empty(max(2 * links, hubs + entries), np.int32), np.zeros(n_classes, np.float32), np.empty(n_classes, np.int32),
        np.empty(entries, np.int32), np.empty(entries, np.float32), np.zeros(2, np.int64),
    )  # fmt: skip


@inner_kernel
def _enter(c: Int, score: np.float32, n: Int, size: Int, found: Pool) -> int:
    """Put a class into a pool of n, `size` at most, the best first, of equals the lower class; returns how many it then has."""
    classes, scores = found.classes, found.scores
    if n == size:
        if score < scores[n - 1] or (score == scores[n - 1] and c > classes[n - 1]):
            return int(n)
        n -= 1
    at = n
    while at > 0 and (score > scores[at - 1] or (score == scores[at - 1] and c < classes[at - 1])):
        classes[at], scores[at], found.expanded[at] = classes[at - 1], scores[at - 1], found.expanded[at - 1]
        at -= 1
    classes[at], scores[at], found.expanded[at] = c, score, False
    return int(n + 1)


@inner_kernel
def _begin_at(begin: Int, end: Int, rows: RankedRows, graph: Graph, found: Pool) -> int:
    """The classes to which the signposts of a row add up to most; how many."""
    features, values, sums, touched = rows.features, rows.values, found.sums, found.touched
    posted, weights, n_touched = graph.posted, graph.posted_weights, 0
    for p in range(begin, end):
        j = features[p]
        for q in range(posted.shape[1]):
            c = posted[j, q]
            if c < 0:
                break
            part = values[p] * weights[j, q]
            if part > 0.0:
                if sums[c] == 0.0:
                    touched[n_touched] = c
                    n_touched += 1
                sums[c] += part
    entries, of_entries, n = found.entries, found.entry_sums, 0
    for t in range(n_touched):
        c, total = touched[t], sums[touched[t]]
        sums[c] = 0.0
        if n < len(entries):
            n += 1
        elif total <= of_entries[n - 1]:
            continue
        at = n - 1
        while at > 0 and total > of_entries[at - 1]:
            entries[at], of_entries[at] = entries[at - 1], of_entries[at - 1]
            at -= 1
        entries[at], of_entries[at] = c, total
    return n


@inner_kernel
def _wait(c: Int, n: Int, graph: Graph, found: Pool) -> int:
    """Put a class that searches may find, and this one has not met, to the n that wait; returns how many these then are."""
    now = np.int32(found.counts[0])
    if c >= 0 and found.stamp[c] != now and graph.linked[c]:
        found.stamp[c], found.waiting[n] = now, c
        n += 1
    return int(n)


@inner_kernel
def _search(
    i: Int, rows: RankedRows, excluded: Labels, e: Int, hubs: NDArray[np.int32], tables: ClassTables, graph: Graph,
    size: Int, found: Pool, best: Best,
) -> int:  # fmt: skip
    """Fill the pool with up to `size` classes of large inner product with row i; how many. best: of line e, as `excluded`.

    From the hubs and the entries that signposts tell, the neighbours of the best class not yet expanded are scored, until
    all of the pool are expanded.
    """
    begin, end, waiting = rows.indptr[i], rows.indptr[i + 1], found.waiting
    found.counts[0] += 1
    n, n_waiting, n_entries = 0, 0, _begin_at(begin, end, rows, graph, found)
    for c in hubs:
        n_waiting = _wait(c, n_waiting, graph, found)
    for q in range(n_entries):
        n_waiting = _wait(found.entries[q], n_waiting, graph, found)
    while True:
        found.counts[1] += n_waiting
        for q in range(min(n_waiting, 1)):
            fetch(waiting[q], begin, end, rows.ranks, tables)
        for q in range(n_waiting):
            if q + 1 < n_waiting:
                fetch(waiting[q + 1], begin, end, rows.ranks, tables)
            score = dot(waiting[q], begin, end, rows.ranks, rows.values, tables)
            offer(waiting[q], score, e, excluded, best)
            n = _enter(waiting[q], score, n, size, found)
        at, n_waiting = 0, 0
        while at < n and found.expanded[at]:
            at += 1
        if at == n:
            return int(n)
        found.expanded[at] = True
        for d in graph.neighbours[found.classes[at]]:
            n_waiting = _wait(d, n_waiting, graph, found)


@kernel
def find_best(
    first: int, last: int, rows: RankedRows, excluded: Labels, hubs: NDArray[np.int32], tables: ClassTables, graph: Graph,
    ef: int, found: Pool, best: Best,
) -> None:  # fmt: skip
    """The best class found for each of the rows [first, last); a search holds ef classes, and as many more as are excluded.

    The pool may bound it: classes that are excluded are often the best ones, and would push all others out.
    """
    for i in range(first, last):
        size = min(len(found.classes), ef + excluded.indptr[i + 1] - excluded.indptr[i])
        _search(i, rows, excluded, i, hubs, tables, graph, size, found, best)


@kernel
def find_links(
    first: int, last: int, classes: NDArray[np.int32], sketches: RankedRows, hubs: NDArray[np.int32], tables: ClassTables,
    graph: Graph, found: Pool, chosen: NDArray[np.int32], similarity: NDArray[np.float32],
) -> None:  # fmt: skip
    """chosen, similarity (n, M): of the largest inner product with the sketch of each of classes[first : last)."""
    nobody = Labels(np.zeros(2, np.int64), np.empty(0, np.int32))
    nothing = Best(np.zeros(1, np.int32), np.zeros(1, np.float32))
    for i in range(first, last):
        n, at = _search(i, sketches, nobody, 0, hubs, tables, graph, len(found.classes), found, nothing), 0
        for q in range(n):
            if found.classes[q] != classes[i] and at < chosen.shape[1]:
                chosen[i, at], similarity[i, at] = found.classes[q], found.scores[q]
                at += 1
        chosen[i, at:] = -1


@inner_kernel
def _has(line: NDArray[np.int32], c: Int, d: Int) -> bool:
    found = False
    for q in range(line.shape[1]):
        found = found or line[c, q] == d
    return bool(found)


@inner_kernel
def _keep(c: Int, weight: np.float32, ids: NDArray[np.int32], weights: NDArray[np.float32]) -> None:
    """Put a class into a list: at its first free place, or in the place of the smallest weight, if its own is larger."""
    least = 0
    for q in range(len(ids)):
        if ids[q] < 0:
            least = q
            break
        if weights[q] < weights[least]:
            least = q
    if ids[least] < 0 or weights[least] < weight:
        ids[least], weights[least] = c, weight


@kernel
def link(classes: NDArray[np.int32], chosen: NDArray[np.int32], similarity: NDArray[np.float32], graph: Graph) -> None:
    """Give classes the neighbours that were chosen, in this order; those get a link back where it is among their most alike."""
    neighbours, width = graph.neighbours, graph.similarity.shape[1]
    for i in range(len(classes)):
        c = classes[i]
        neighbours[c, :width] = chosen[i]
        for q in range(width):
            d = chosen[i, q]
            if d >= 0 and not _has(neighbours, d, c):
                _keep(c, similarity[i, q], neighbours[d, width:], graph.similarity[d])


@kernel
def unlink(classes: NDArray[np.int32], graph: Graph) -> None:
    """Take classes out: a neighbour that had a link to one gets one to its first neighbour instead.

    Links of others that it does not know of stay; searches pass them by.
    """
    neighbours = graph.neighbours
    for c in classes:
        graph.linked[c] = False
        for q in range(neighbours.shape[1]):
            d = neighbours[c, q]
            if d < 0:
                continue
            instead = np.int32(-1)
            for other in range(neighbours.shape[1]):
                e = neighbours[c, other]
                if instead < 0 and e >= 0 and e != d and graph.linked[e] and not _has(neighbours, d, e):
                    instead = e
            for back in range(neighbours.shape[1]):
                if neighbours[d, back] == c:
                    neighbours[d, back] = instead
                    instead = np.int32(-1)
        neighbours[c] = -1


@kernel
def sketch(classes: NDArray[np.int32], tables: ClassTables, indptr: NDArray[np.int64], sketches: RankedRows) -> None:
    """The largest entries by magnitude, of equals those of lower rank: of class i those of [indptr[i], indptr[i + 1])."""
    words, values = tables.words, tables.values
    for i in range(len(classes)):
        c, at, wanted, n = classes[i], indptr[i], indptr[i + 1] - indptr[i], 0
        if wanted == 0:
            continue
        sizes, found = np.empty(tables.n[c], np.float32), np.empty(tables.n[c], np.int64)
        for place in range(tables.begin[c], tables.begin[c] + length(np.int64(tables.bits[c]))):
            if words[2 * place] != EMPTY:
                sizes[n], found[n] = abs(values[2 * place + 1]), place
                n += 1
        least = np.partition(sizes, n - wanted)[n - wanted]
        ties = wanted - np.count_nonzero(sizes > least)
        for q in range(n):
            if sizes[q] > least or (sizes[q] == least and ties > 0):
                ties -= int(sizes[q] == least)
                rank = words[2 * found[q]]
                sketches.ranks[at], sketches.values[at] = rank, values[2 * found[q] + 1]
                sketches.features[at] = feature_of(np.int64(rank))
                at += 1


@kernel
def drifted(
    classes: NDArray[np.int32], sketches: RankedRows, tables: ClassTables, drift: float, graph: Graph,
    out: NDArray[np.bool_],
) -> None:  # fmt: skip
    """Whether each class is not linked, or since it was its norm or the features of its sketch changed by more than a share."""
    for i in range(len(classes)):
        c, n = classes[i], sketches.indptr[i + 1] - sketches.indptr[i]
        norm = np.sqrt(max(tables.square[c], 0.0))
        ratio = norm / graph.norms[c] if graph.norms[c] > 0.0 else 0.0
        out[i] = not graph.linked[c] or ratio > 1.0 + drift or ratio < 1.0 / (1.0 + drift)
        if out[i]:
            continue
        same, old, p = 0, 0, sketches.indptr[i]
        for q in range(graph.sketches.shape[1]):  # both are in the order of ranks
            if graph.sketches[c, q] < 0:
                break
            rank, old = rank_of(graph.sketches[c, q]), old + 1
            while p < sketches.indptr[i + 1] and sketches.ranks[p] < rank:
                p += 1
            same += 1 if p < sketches.indptr[i + 1] and sketches.ranks[p] == rank else 0
        out[i] = max(n, old) - same > drift * max(n, old)


@kernel
def unpost(classes: NDArray[np.int32], graph: Graph) -> None:
    """Take classes off the signposts."""
    posted, weights, sketches = graph.posted, graph.posted_weights, graph.sketches
    for c in classes:
        for s in range(sketches.shape[1]):
            j = sketches[c, s]
            if j < 0:
                break
            last = posted.shape[1] - 1
            while last >= 0 and posted[j, last] < 0:
                last -= 1
            for q in range(last + 1):
                if posted[j, q] == c:
                    posted[j, q], weights[j, q] = posted[j, last], weights[j, last]
                    posted[j, last] = -1
                    break
        sketches[c] = -1


@kernel
def post(classes: NDArray[np.int32], sketches: RankedRows, tables: ClassTables, graph: Graph) -> None:
    """Let searches find classes: on signposts of positive weights of their sketch, where there is room or a smaller weight."""
    posted, weights = graph.posted, graph.posted_weights
    for i in range(len(classes)):
        c, begin = classes[i], sketches.indptr[i]
        graph.linked[c], graph.norms[c] = True, np.sqrt(max(tables.square[c], 0.0))
        for p in range(begin, sketches.indptr[i + 1]):
            j, w = sketches.features[p], sketches.values[p]
            graph.sketches[c, p - begin] = j
            if w > 0.0:
                _keep(c, w, posted[j], weights[j])
