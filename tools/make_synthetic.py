"""Synthetic XMC data of any size, straight into a dataset store or a text file, in bounded memory.

A sample mentions some labels and is given all but one, which keeps what any model can reach under 100 %. A quarter of
its words are features that those labels own, the rest follow a power law; values are (1 + log tf) idf, l2-normalised.
With --tree labels are the leaves of a tree: those of a parent share words and samples, and each has a row to learn from.
With --logical a store repeats its rows by hard links to its chunk files, for proofs of scale without the disk.

    python tools/make_synthetic.py big.xmc --size 2GB --features 200000 --labels 8192 --test-samples 20000
    python tools/make_synthetic.py tree.xmc --samples 300000 --features 200000 --labels 65536 --tree 3
    python tools/make_synthetic.py huge.xmc --size 10GB --logical 100GB --features 200000 --labels 8192
"""

from __future__ import annotations

import gzip
import json
import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from scipy.special import pdtr
from tqdm import tqdm

from xmc_stream.datasets.append_jobs import ArrayJob, CountsJob, LabelsJob
from xmc_stream.errors import InputError, XmcStreamError
from xmc_stream.store.dataset import SIZES, Dataset, open_dataset
from xmc_stream.store.encoding import CHUNK_BYTES, finish_matrix, index_dtype, new_store
from xmc_stream.store.new_dataset import begin, check_target, finish, make_columns, new_dataset
from xmc_stream.system.memory import parse_size, peak_resident

BLOCK_CELLS = 2**17  # draws of a block, few enough for the cache; its rows follow from them and the parameters alone
OWNED = 24  # characteristic features of a label
SIGNAL = 4  # every fourth draw is of a characteristic feature
HELD_BACK = 0.2  # share of samples that are not given the label they mention most; the others lose the least mentioned
THREADS = 2  # that draw blocks; results do not depend on it
FULL_CHUNK = CHUNK_BYTES // 4  # values
MOST_LINKS = 60_000  # to a file, on common file systems
TOP_LABEL, TOP_FEATURE = 0.04, 0.35  # share of the samples with the most frequent label, and background feature
UP = 0.75, 0.2  # with a tree: share of a sample's further labels from the first one's parent, grandparent; others: any
LABELS, WORDS = 2**20, 2**40  # with a tree: numbers of a row's first draw of a label, and of a word
OF_EACH_LABEL = 3  # split of a tree's rows to be counted that are there for their first label
GAMMA = 0x9E3779B97F4A7C15
KS = 1, 3, 5

Rows = tuple[NDArray[Any], ...]  # indptr, indices, data of X; indptr, indices of Y


def _rng(seed: int, *key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64: 64 well-mixed bits of each number."""
    x = x + np.uint64(GAMMA)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _unit(x: NDArray[np.uint64], low: int, n: int) -> NDArray[np.float64]:
    """Numbers in [0, 1) of n bits of each number, from bit `low`."""
    return np.asarray((x >> np.uint64(low) & np.uint64(2**n - 1)) * 2.0**-n)


class _PowerLaw:
    """Ranks 0 .. n - 1 with P(rank) proportional to log(1 + 1 / (offset + rank)): Zipf's law with a flattened head.

    The offset gives rank 0 the probability `top` (or the nearest possible); the tail's exponent is one for every n.
    """

    def __init__(self, n: int, top: float) -> None:
        self.n = n
        low, high = math.log(1e-9), math.log(64.0 * n)
        for _ in range(60):  # bisection
            middle = (low + high) / 2
            self.offset = math.exp(middle)
            self.scale = math.log1p(n / self.offset)
            low, high = (middle, high) if math.log1p(1 / self.offset) > top * self.scale else (low, middle)

    def ranks(self, uniform: NDArray[np.float64]) -> NDArray[np.int32]:
        """Ranks of uniform numbers in [0, 1), by the inverse of the distribution."""
        ranks = (np.exp(uniform * self.scale) - 1) * self.offset
        return np.minimum(ranks.astype(np.int32), self.n - 1)


class _Generator:
    """Blocks of rows, each from (seed, split, block) and the parameters alone; tables of 8 D + 4 K bytes.

    weighted: values are TF-IDF weights, else tf itself.
    """

    def __init__(
        self,
        n_features: int,
        n_labels: int,
        per_sample: float,
        labels_per_sample: float,
        seed: int,
        weighted: bool = True,
    ) -> None:
        self.n_features, self.n_labels, self.mean_labels, self.seed = n_features, n_labels, labels_per_sample, seed
        self._weighted = weighted
        self._features = _PowerLaw(n_features, TOP_FEATURE / per_sample)
        self._labels = _PowerLaw(n_labels, TOP_LABEL / labels_per_sample)
        self.top_label = min(1, 1.2 * labels_per_sample * math.log1p(1 / self._labels.offset) / self._labels.scale)
        self._feature_ids = _rng(seed, 2).permutation(np.arange(n_features, dtype=np.int32))
        self._label_ids = _rng(seed, 3).permutation(np.arange(n_labels, dtype=np.int32))
        p = np.log1p(1 / (np.arange(n_features, dtype=np.float32) + np.float32(self._features.offset)))  # by rank
        self._idf = np.empty(n_features, np.float32)
        self._idf[self._feature_ids] = np.log1p(-1 / np.expm1(p * np.float32(-per_sample / self._features.scale)))
        self._draws = per_sample
        for _ in range(6):  # words repeat in a row: draw as many more as give the wanted number of distinct ones
            if self._draws > BLOCK_CELLS:
                raise InputError(f"{per_sample:g} features per sample are too many: lower --features-per-sample")
            self.block_rows = max(1, min(8192, BLOCK_CELLS // int(1.5 * self._draws + 2 * labels_per_sample)))
            self._draws *= per_sample * self.block_rows / len(self._pilot()[1])

    def _pilot(self) -> Rows:
        """Rows of no split, to be counted."""
        return self._rows(_rng(self.seed, 4))

    def _block(self, split: int, block: int) -> Rows:
        """Rows of one block of a split."""
        return self._rows(_rng(self.seed, split, block))

    def _owned(self, words: NDArray[np.int64]) -> NDArray[np.float64]:
        """The place in [0, 1) of characteristic features by their number: OWNED for each owner, by its own number."""
        return _unit(_mix(words.astype(np.uint64) ^ _mix(np.array([self.seed], np.uint64))), 11, 53)

    def _rows(self, rng: np.random.Generator) -> Rows:
        n = self.block_rows
        # from half the mean to one and a half: a grid in random order, so that every block has the same mean
        lengths = np.maximum(1, ((rng.permutation(n) + 0.5) / n + 0.5) * self._draws).astype(np.int64)
        mentioned = 2 + rng.poisson(self.mean_labels - 1, n)
        firsts = np.cumsum(mentioned) - mentioned
        labels = self._label_ids[self._labels.ranks(rng.random(int(mentioned.sum())))]
        cells = self._feature_ids[self._features.ranks(rng.random((n, int(lengths.max()))))]
        signal = cells[:, ::SIGNAL]
        # squared: the first label a sample mentions gets the most words, the last the fewest
        which = (rng.random(signal.shape) ** 2 * mentioned[:, None]).astype(np.int64) + firsts[:, None]
        owned = self._owned(labels[which] * np.int64(OWNED) + rng.integers(0, OWNED, signal.shape))
        # squared: labels share some frequent features, and own most of theirs almost alone
        signal[...] = self._feature_ids[(owned**2 * self.n_features).astype(np.int64)]
        return self._matrices(cells, lengths, labels, mentioned, rng.random(n) < HELD_BACK)

    def _matrices(
        self,
        cells: NDArray[np.int32],
        lengths: NDArray[np.int64],
        labels: NDArray[np.int32],
        mentioned: NDArray[np.int64],
        held_back: NDArray[np.bool_],
    ) -> Rows:
        """X and Y of rows by what was drawn.

        cells: words (n, longest), of which a row has the first `lengths` (n,). labels: those that rows mention, one row
        after the other, `mentioned` (n,) of each. held_back (n,): is the first of them held back, or the last?
        """
        n, firsts = len(lengths), np.cumsum(mentioned) - mentioned
        cells[np.arange(cells.shape[1]) >= lengths[:, None]] = self.n_features  # sorts behind every feature
        cells.sort(axis=1)
        new = np.ones(cells.shape, np.bool_)
        np.not_equal(cells[:, 1:], cells[:, :-1], out=new[:, 1:])
        starts = np.flatnonzero(new)
        tf = np.diff(starts, append=cells.size)
        indices = cells.ravel()[starts]
        indices, tf = indices[indices < self.n_features], tf[indices < self.n_features]
        distinct = np.count_nonzero(new, axis=1) - (lengths < cells.shape[1])
        indptr = np.concatenate([[0], np.cumsum(distinct)])
        data = tf.astype(np.float32)
        if self._weighted:
            data = (1 + np.log(np.arange(1, tf.max() + 1, dtype=np.float32)))[tf - 1] * self._idf[indices]
            norms = np.sqrt(np.add.reduceat(data * data, indptr[:-1], dtype=np.float64))
            data *= np.repeat((1 / norms).astype(np.float32), distinct)
        given = np.ones(len(labels), np.bool_)
        given[np.where(held_back, firsts, firsts + mentioned - 1)] = False
        pairs = np.unique((np.repeat(np.arange(n), mentioned) * self.n_labels + labels)[given])
        y_indptr = np.searchsorted(pairs, np.arange(n + 1) * self.n_labels)
        return indptr, indices, data, y_indptr, (pairs % self.n_labels).astype(np.int32)

    def blocks(self, split: int, n_samples: int, form: Callable[[Rows], Any] = lambda rows: rows) -> Iterator[Any]:
        """The first n_samples rows of split 0 (train) or 1 (test), in blocks, each in the form that `form` gives it."""

        def block(start: int) -> Any:
            x_indptr, x_indices, x_data, y_indptr, y_indices = self._block(split, start // self.block_rows)
            n = min(self.block_rows, n_samples - start)
            x, y = x_indptr[n], y_indptr[n]
            return form((x_indptr[: n + 1], x_indices[:x], x_data[:x], y_indptr[: n + 1], y_indices[:y]))

        with ThreadPoolExecutor(THREADS) as pool:
            ahead: deque[Future[Any]] = deque()
            for start in range(0, n_samples, self.block_rows):
                ahead.append(pool.submit(block, start))
                if len(ahead) > 2 * THREADS:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()


class _TreeGenerator(_Generator):
    """Rows of labels that are the leaves of a balanced tree, each from (seed, split, row) and the parameters alone.

    depth: levels below the root; the labels are the last one. On a level of n nodes, node r mod n stands above the label of
    rank r: each node has frequent labels and rare ones. Each label and node owns OWNED features; nodes near the root own
    more frequent ones. Every fourth word belongs to a label of the row, and every fourth to a node above one. The first
    rows of split 0 mention first a label each, until each label has had a row.
    """

    def __init__(
        self,
        n_features: int,
        n_labels: int,
        per_sample: float,
        labels_per_sample: float,
        seed: int,
        weighted: bool,
        depth: int,
    ) -> None:
        nodes = [1]
        for levels in range(depth, 1, -1):  # each number divides the next one, but that of the labels
            nodes.append(nodes[-1] * round((n_labels / nodes[-1]) ** (1 / levels)))
        self._depth, self._nodes = depth, np.array([*nodes, n_labels])
        self._first_word = (np.cumsum(self._nodes) - self._nodes) * OWNED
        self._powers = 2 + np.arange(depth, -1, -1) / max(1, depth - 1)  # by level, 3 to 2
        self._mentioned = [
            labels_per_sample + 1.0
        ] * 2  # mean of rows, and of those that are there for their first label
        super().__init__(n_features, n_labels, per_sample, labels_per_sample, seed, weighted)
        p = np.log1p(1 / (np.arange(n_features, dtype=np.float32) + np.float32(self._features.offset)))
        expected = p * np.float32(per_sample / 2 / self._features.scale)  # of each feature by rank, in a row
        slots = per_sample / 4 * np.diff(np.sqrt(np.arange(OWNED + 1) / OWNED))
        for level in range(1, depth + 1):
            share = 2 if depth == 1 else 1 if level == depth else 1 / (depth - 1)
            for first in range(0, int(self._nodes[level]), 2**15):
                node = np.arange(first, min(first + 2**15, self._nodes[level]))[:, None]
                ranks = self._owned_ranks(np.array(level), node, np.arange(OWNED))
                often = share * self._popularity(level, node) * slots
                expected += np.bincount(ranks.ravel(), often.ravel(), n_features)
        self._idf[self._feature_ids] = np.log1p(-1 / np.expm1(-expected))

    def _popularity(self, level: int, node: NDArray[np.int64]) -> NDArray[np.float64]:
        """Share of the labels below nodes of a level: of the most frequent one, and about that of the others."""
        n = int(self._nodes[level])
        x = node + self._labels.offset
        others = np.log((x + ((self.n_labels - 1 - node) // n + 0.5) * n) / (x + 0.5 * n)) / n
        return np.asarray((np.log1p(1 / x) + others) / self._labels.scale)

    def _owned_ranks(
        self, level: NDArray[np.int64], node: NDArray[np.int64], slot: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Ranks of characteristic features: of which node of which level, which of its OWNED ones."""
        place = self._owned(self._first_word[level] + node * OWNED + slot)
        return np.asarray(place ** self._powers[level] * self.n_features, np.int64)

    def _pilot(self) -> Rows:
        rows = [self._block(split, 0) for split in (2, OF_EACH_LABEL)]
        for i, (_, _, _, _, labels) in enumerate(rows):  # they repeat in a row as words do: as many more are mentioned
            given = (self._mentioned[i] - 1) * self.mean_labels * self.block_rows / len(labels)
            self._mentioned[i] = 1 + min(max(given, self.mean_labels), 8 * self.mean_labels)
        return rows[0]

    def _labels_of(
        self, first: NDArray[np.int64], mentioned: NDArray[np.int64], key: NDArray[np.uint64]
    ) -> NDArray[np.int64]:
        """Ranks of the labels that rows mention, row after row: `first` and its kin."""
        row = np.repeat(np.arange(len(first)), mentioned)
        starts = np.cumsum(mentioned) - mentioned
        bits = _mix(key[row] + (np.arange(len(row)) - starts[row] + LABELS).astype(np.uint64) * np.uint64(GAMMA))
        chance = _unit(bits, 0, 11)
        level = np.where(chance < UP[0], self._depth - 1, np.where(chance < sum(UP), max(0, self._depth - 2), 0))
        # the lowest node that has as many labels as the row mentions
        lowest = np.searchsorted(self._nodes[: self._depth], self.n_labels // mentioned, side="right") - 1
        n = self._nodes[np.minimum(level, np.maximum(lowest, 0)[row])]
        node = first[row] % n
        near, below = (node + self._labels.offset) / n, (self.n_labels - 1 - node) // n + 1
        step = np.expm1(_unit(bits, 11, 53) * np.log1p(below / near)) * near  # the law of all labels, on every n-th
        ranks: NDArray[np.int64] = node + n * np.minimum(step.astype(np.int64), below - 1)
        ranks[starts] = first
        return ranks

    def _block(self, split: int, block: int) -> Rows:
        return self._matrices(*self._drawn(split, block))

    def best(self, split: int, n_samples: int) -> dict[str, float]:
        """P@k, in per cent, of who sees which labels the first rows of a split mention, and in which order.

        Not which one is not given: the first (HELD_BACK of the rows), or the last.
        """
        found = np.zeros(max(KS))
        for start in range(0, n_samples, self.block_rows):
            _, _, labels, mentioned, held_back = self._drawn(split, start // self.block_rows)
            row = np.repeat(np.arange(len(mentioned)), mentioned)
            lasts = np.cumsum(mentioned) - 1
            firsts = lasts - mentioned + 1
            sure, given = np.full(len(labels), 2), np.ones(len(labels), np.bool_)
            sure[firsts], sure[lasts] = 1, 0
            given[np.where(held_back, firsts, lasts)] = False
            pairs, of = np.unique(row * self.n_labels + labels, return_inverse=True)
            likely, true = np.zeros(len(pairs), np.int64), np.zeros(len(pairs), np.bool_)
            np.add.at(likely, of, sure)  # who is mentioned twice is given
            np.logical_or.at(true, of, given)
            row = pairs // self.n_labels
            order = np.lexsort((-likely, row))
            place = np.arange(len(row)) - np.searchsorted(row, row)
            row, true = row[order], true[order]
            inside = (place < len(found)) & (row < n_samples - start)
            found += np.bincount(place[inside], true[inside], len(found))
        return {f"P@{k}": round(float(100 * found[:k].sum() / (k * max(n_samples, 1))), 2) for k in KS}

    def _drawn(self, split: int, block: int) -> tuple[Any, ...]:
        """What `_matrices` makes the rows of a block from."""
        n = self.block_rows
        rows = np.arange(block * n, (block + 1) * n)
        key = _mix(np.array([self.seed], np.uint64)) ^ np.uint64(split)
        key = _mix(rows.astype(np.uint64) ^ _mix(key))

        def draw(numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
            return _mix(key[:, None] + numbers.astype(np.uint64) * np.uint64(GAMMA))

        of_row = _unit(draw(np.arange(4)), 11, 53)
        lengths = np.maximum(1, (of_row[:, 0] + 0.5) * self._draws).astype(np.int64)  # half the mean to one and a half
        first = self._labels.ranks(of_row[:, 3]).astype(np.int64)
        of_label = rows < {0: self.n_labels, OF_EACH_LABEL: n}.get(split, 0)
        # each rank once, in an order that says nothing
        first[of_label] = self._label_ids[rows[of_label] % self.n_labels]
        held_back = (of_row[:, 2] < HELD_BACK) & ~of_label
        usual, more = (pdtr(np.arange(int(2 * mean) + 40), mean - 2) for mean in self._mentioned)  # Poisson's law
        u = of_row[:, 1]
        mentioned = 2 + np.where(of_label, np.searchsorted(more, u, "right"), np.searchsorted(usual, u, "right"))
        ranks = self._labels_of(first, mentioned, key)
        bits = draw(WORDS + np.arange(int(lengths.max())))
        cells = self._feature_ids[self._features.ranks(_unit(bits, 11, 53))]
        signal = bits[:, ::2]
        # squared: the first label a row mentions gets the most words, and a node's first feature is its most frequent
        which = (_unit(signal, 40, 24) ** 2 * mentioned[:, None]).astype(np.int64)
        slot = (_unit(signal, 20, 20) ** 2 * OWNED).astype(np.int64)
        level = 1 + (_unit(signal, 0, 20) * max(1, self._depth - 1)).astype(np.int64)
        level[:, ::2] = self._depth
        node = ranks[which + (np.cumsum(mentioned) - mentioned)[:, None]] % self._nodes[level]
        cells[:, ::2] = self._feature_ids[self._owned_ranks(level, node, slot)]
        return cells, lengths, self._label_ids[ranks], mentioned, held_back


def _cut(blocks: Iterator[Rows], nnz: int) -> Iterator[Rows]:
    """Rows with `nnz` values in X together: the last row keeps the first of its values, scaled to length one."""
    for rows in blocks:
        x_indptr, x_indices, x_data, y_indptr, y_indices = rows
        if x_indptr[-1] < nnz:
            nnz -= int(x_indptr[-1])
            yield rows
            continue
        n = int(np.searchsorted(x_indptr, nnz))  # rows that are needed, the last one whole or not
        x_indptr, x_data = np.append(x_indptr[:n], nnz), x_data[:nnz].copy()
        last = x_data[x_indptr[-2] :]
        last /= np.linalg.norm(last)
        yield x_indptr, x_indices[:nnz], x_data, y_indptr[: n + 1], y_indices[: y_indptr[n]]
        return


def _lines(rows: Rows, base: int) -> NDArray[np.uint8]:
    """Rows as lines of text; base: added to the ids."""
    from xmc_stream.datasets.export import text_bytes
    from xmc_stream.datasets.kernels.format import write_rows

    x_indptr, x_indices, x_data, y_indptr, y_indices = rows
    out = np.empty(text_bytes(len(x_indptr), len(x_indices), len(y_indices), 2**31, 2**31), np.uint8)
    x_indptr, y_indptr = np.asarray(x_indptr, np.int64), np.asarray(y_indptr, np.int64)
    return out[: write_rows(x_indptr, x_indices, x_data, y_indptr, y_indices, base, out)]


def _jsonl(rows: Rows) -> bytes:
    """Rows as JSON lines: {"content": "w7 w7 w12", "target_ind": [3, 8]}; words as often as the data say."""
    x_indptr, x_indices, x_data, y_indptr, y_indices = rows
    words = [f"w{j} " * tf for j, tf in zip(x_indices.tolist(), x_data.astype(int).tolist(), strict=True)]
    lines = []
    for i, (x, y) in enumerate(zip(x_indptr[1:], y_indptr[1:], strict=True)):
        content = "".join(words[x_indptr[i] : x]).rstrip()
        lines.append(f'{{"content": "{content}", "target_ind": {y_indices[y_indptr[i] : y].tolist()}}}\n')
    return "".join(lines).encode()


# by name: rows with their text; None of the store
FORMATS: dict[str, Any] = {
    "store": None,
    "xmlrepo": lambda rows: (rows, _lines(rows, 0)),
    "libsvm": lambda rows: (rows, _lines(rows, 1)),  # ids from one, as LIBSVM's own sets have them
    "jsonl": lambda rows: (rows, _jsonl(rows)),
}
ENDINGS = {".xmc": "store", ".txt": "xmlrepo", ".svm": "libsvm", ".jsonl": "jsonl"}
ENDINGS |= {f"{ending}.gz": name for ending, name in ENDINGS.items() if name != "store"}


@contextmanager
def _text(path: Path, header: str) -> Iterator[Any]:
    """A file to write text into, compressed if the name ends in .gz; it gets its name when the block ends well."""
    work = path.with_name(path.name + ".partial")
    try:
        with open(work, "wb") as raw, ExitStack() as stack:
            file: Any = raw
            if path.suffix == ".gz":  # no name or time inside: equal data make equal files
                file = stack.enter_context(gzip.GzipFile("", "wb", 4, raw, mtime=0))
            file.write(header.encode())
            yield file
        work.replace(path)
    finally:
        work.unlink(missing_ok=True)


def _check_rows(n: int, n_labels: int) -> None:
    """Refuse a tree of more labels than rows."""
    if n < n_labels:
        said = f"--tree needs a training row for each label, and {n} rows are fewer than {n_labels} labels"
        raise InputError(f"{said}: give more rows, or fewer --labels")


def _factor(logical: str, base_bytes: int) -> int:
    """How often a logical store repeats its base: a plain number, or as often as gives a size of X."""
    times = int(logical) if logical.isdecimal() else math.ceil(parse_size(logical) / base_bytes)
    if not 1 <= times <= MOST_LINKS:
        raise InputError(f"--logical {logical} is {times} times the base, not 1 to {MOST_LINKS}: change it or --size")
    return times


def _repeat(base: Dataset, times: int, store: Path, attributes: dict[str, Any]) -> None:
    """Make a folder a dataset of the rows of one in it, so many times, joined as `append` joins sets: by hard links."""
    sets, n_labels = (str(base.path),) * times, base.n_labels
    arrays = {"X/rows/data": "float32", "X/rows/indices": index_dtype(base.n_features).name, "X/rows/indptr": "int64"}
    arrays |= {"Y/rows/indptr": "int64", "statistics/row_norms": "float32"}
    begin(store)
    hashes = {name: ArrayJob(str(store), sets, name, dtype).run()["sha256"] for name, dtype in arrays.items()}
    labels = LabelsJob(str(store), sets, "Y/rows/indices", "", n_labels).run()["sha256"]
    CountsJob(str(store), sets, "statistics", "", n_labels).run()
    n, nnz, positives = (times * int(base.attributes[name]) for name in ("n_samples", "nnz_features", "nnz_labels"))
    of_X = [hashes[f"X/rows/{name}"] for name in ("indptr", "indices", "data")]
    finish_matrix(store / "X/rows", "csr_matrix", (n, base.n_features), nnz, of_X)
    finish_matrix(store / "Y/rows", "csr_matrix", (n, n_labels), positives, [hashes["Y/rows/indptr"], labels])
    make_columns(store, "Y", 2**26)
    whole = dict(zip(SIZES, (n, base.n_features, n_labels, nnz, positives), strict=True))
    shutil.rmtree(base.path)  # which lies in the folder
    finish(store, {**whole, **attributes})


def make_synthetic(
    target: str | Path,
    *,
    n_samples: int | None = None,
    n_features: int,
    n_labels: int,
    features_per_sample: float = 100,
    labels_per_sample: float = 3,
    n_test_samples: int = 0,
    size: str | float | None = None,
    seed: int = 0,
    format: str | None = None,
    logical: str | None = None,
    tree: int | None = None,
    overwrite: bool = False,
    summary: dict[str, Any] | None = None,
) -> Path:
    """Write synthetic data to `target` and, if asked for, test data beside it; returns target.

    size: in place of n_samples, the bytes of X at 8 a non-zero. format: a key of FORMATS, by default from the name.
    logical: repeat the rows so often, or up to a size of X, by hard links; `size` is that of the rows made, and rounded so
    that they fill chunks. tree: make the labels the leaves of a balanced tree with so many levels below its root, which
    needs a row for each label (with `logical`, among those that are repeated). summary: gets what --json prints. A row
    does not depend on how many there are: a smaller set is the beginning of a larger one.
    """
    began = time.perf_counter()
    for name, value, low, high in (
        ("features", n_features, 4, 2**31 - 2),
        ("labels", n_labels, 1, 2**31 - 2),
        ("features-per-sample", features_per_sample, 1, n_features / 4),
        ("labels-per-sample", labels_per_sample, 1, max(1, min(n_labels / 4, 1000))),
        ("samples", 1 if n_samples is None else n_samples, 1, 2**40),
        ("test-samples", n_test_samples, 0, 2**40),
        ("seed", seed, 0, 2**63),
        ("tree", 1 if tree is None else tree, 1, max(1, int(n_labels).bit_length() - 1)),  # each node branches
    ):
        if not low <= value <= high:
            raise InputError(f"--{name} {value:g} is not between {low:g} and {high:g}: change it")
    if (n_samples is None) == (size is None):
        raise InputError("the number of samples is not clear: give either --samples or --size")
    n_train = n_samples or max(1, int(parse_size(size or 0) / (8 * features_per_sample)))
    path = Path(target)
    ending = next((e for e in ENDINGS if path.name.endswith(e)), None)
    if ending is None or not path.parent.is_dir():
        raise InputError(f"{target} ends in none of {', '.join(ENDINGS)}, or its folder does not exist: change it")
    format = format or ENDINGS[ending]
    if format not in FORMATS or (format == "store") != (ending == ".xmc"):
        raise InputError(f"--format {format} does not go with {target}: leave it out, or change the ending")
    if logical and (format != "store" or size is None):
        raise InputError("--logical is for a store and needs --size, of the rows that it repeats: change them")
    paths = path, path.with_name(path.name.removesuffix(ending) + "-test" + ending)
    for p in paths[: 1 + bool(n_test_samples)]:
        if p.exists() and not (overwrite and p.is_dir() == (format == "store")):
            raise InputError(f"{p} exists: give another name, or --overwrite to replace one of the same kind")
    base_nnz = max(1, round(parse_size(size or 1) / (8 * FULL_CHUNK))) * FULL_CHUNK
    times = _factor(logical, 8 * base_nnz) if logical else 1
    weighted = format != "jsonl"
    generator: _Generator
    if tree:
        _check_rows(int(base_nnz / features_per_sample) if logical else n_train, n_labels)
        generator = _TreeGenerator(n_features, n_labels, features_per_sample, labels_per_sample, seed, weighted, tree)
    else:
        generator = _Generator(n_features, n_labels, features_per_sample, labels_per_sample, seed, weighted)
    source = {"generator": "make_synthetic", "seed": seed, **({"logical": times} if logical else {})}
    source |= {"tree": tree} if tree else {}
    sizes = np.zeros((2, 3), np.int64)  # train, test: rows, non-zeros of X and Y
    for split, n in enumerate((n_train, n_test_samples)[: 1 + bool(n_test_samples)]):
        repeated = bool(logical) and split == 0
        with ExitStack() as stack:
            bar = stack.enter_context(tqdm(total=n, unit="row", desc=paths[split].name, disable=None))  # on terminals

            def counted(rows: Rows, split: int = split, bar: Any = bar) -> Rows:
                sizes[split] += (len(rows[0]) - 1, len(rows[1]), len(rows[4]))
                bar.update(len(rows[0]) - 1)
                return rows

            if format != "store":
                header = f"{n} {n_features} {n_labels}\n" if format == "xmlrepo" else ""
                file = stack.enter_context(_text(paths[split], header))
                for rows, text in generator.blocks(split, n, FORMATS[format]):
                    counted(rows)
                    file.write(text)
                continue
            attributes = {"source": source, "normalize": "l2"}
            if repeated:
                check_target(paths[split], overwrite)
                group = stack.enter_context(new_store(paths[split], {}))
                with new_dataset(group.path / "base", n_features, n_labels, {}) as first:
                    for rows in _cut(generator.blocks(0, 2**40), base_nnz):
                        first.append(*counted(rows))
                if tree:
                    _check_rows(int(sizes[0, 0]), n_labels)
                _repeat(open_dataset(group.path / "base"), times, group.path, attributes)
                sizes[0] *= times
                continue
            writer = stack.enter_context(
                new_dataset(paths[split], n_features, n_labels, attributes, overwrite=overwrite)
            )
            for rows in generator.blocks(split, n):
                writer.append(*counted(rows))
    if summary is not None:
        summary.update(dataset=str(path), test=str(paths[1]) if n_test_samples else None, n_samples=int(sizes[0, 0]))
        summary.update(n_test_samples=n_test_samples, n_features=n_features, n_labels=n_labels)
        summary.update(nnz_features=int(sizes[0, 1]), nnz_labels=int(sizes[0, 2]), nnz_test_features=int(sizes[1, 1]))
        if n_test_samples and isinstance(generator, _TreeGenerator):
            summary.update(best=generator.best(1, n_test_samples))
        summary.update(seconds=round(time.perf_counter() - began, 3), peak_rss=peak_resident())
    return path


TREE_HELP = """Make the labels leaves of a balanced tree with DEPTH levels below its root. Labels share words with the
nodes above them, those of a parent occur together, and each has a training row, so there must be as many rows as labels."""


@click.command(context_settings={"show_default": True})
@click.argument("target")
@click.option("--samples", "n_samples", type=int, help="Rows to make.")
@click.option("--size", help="Instead of --samples: as many rows as fill X with this, such as 2GB.")
@click.option("--logical", help="Repeat the rows by hard links: so many times, or up to such a size of X (100GB).")
@click.option("--format", type=click.Choice(list(FORMATS)), help="Instead of what the ending of TARGET says.")
@click.option("--features", "n_features", type=int, required=True)
@click.option("--labels", "n_labels", type=int, required=True)
@click.option("--features-per-sample", type=float, default=100, help="Mean non-zeros of a row.")
@click.option("--labels-per-sample", type=float, default=3, help="Mean labels of a row.")
@click.option("--test-samples", "n_test_samples", type=int, default=0, help='Rows of a second set, named "-test".')
@click.option("--tree", type=int, metavar="DEPTH", help=TREE_HELP)
@click.option("--seed", type=int, default=0)
@click.option("--overwrite", is_flag=True, help="Replace what has the name.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(as_json: bool, **options: Any) -> None:
    """Make a learnable synthetic data set TARGET.

    A store (.xmc), XMLRepo text (.txt), LIBSVM text with ids from one (.svm) or JSON lines of words (.jsonl), texts also
    with .gz.
    """
    done: dict[str, Any] = {}
    try:
        make_synthetic(**options, summary=done)
    except (XmcStreamError, OSError) as error:
        said = error.in_shell if isinstance(error, XmcStreamError) else str(error)
        raise click.ClickException(said) from None
    click.echo(json.dumps(done) if as_json else ", ".join(f"{name} {value}" for name, value in done.items()))


if __name__ == "__main__":
    main()
