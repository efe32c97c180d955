"""The small-world oracle: a graph over sparse class vectors, searched greedily."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.arguments import share, whole
from xmc_stream.kernels.blocks import Labels
from xmc_stream.mips.kernels import smallworld as kernels
from xmc_stream.mips.kernels.classvectors import RankedRows
from xmc_stream.mips.kernels.innerproducts import Best
from xmc_stream.mips.oracle import Index, Oracle, largest
from xmc_stream.mips.vectors import ClassVectors, chosen_rows

_PORTION = 8192  # classes whose sketches are held at once
_MORE = 64  # classes that a search holds, at most, beside `ef`: one for each that its row excludes
_FIRST = 64  # classes that are linked at once, where fewer were linked before


class SmallWorld(Oracle):
    """A navigable small-world graph of the classes, with signposts (Malkov et al. 2014).

    A class's sketch is its `sketch` largest entries. It is linked to the `links` classes w_d of the largest inner product
    with its sketch that a search finds; each of them may have as many links back. A search begins at `hubs` classes of the
    largest norm and at the `entries` classes to which the signposts of the row's features add up to most; a signpost names
    up to `posts` classes whose sketch has the feature. Then neighbours of the best classes are scored, until the `ef` best
    have been expanded.

    Vectors are scored as they are: only links and signposts may be out of date. `refresh` renews those of a class whose
    norm, or whose sketch's features, changed by more than the share `drift` since they were made.

    Parameters
    ----------
    vectors : ClassVectors
        The classes; all whose vector is not zero are linked.
    seed, threads : int
        As of `Oracle`; rows of a query, and classes to be linked, are shared among threads.
    links : int, default 8
        Neighbours that a class chooses; it has up to twice as many.
    ef : int, default 8
        Classes that a query keeps and expands; one more for each that its row excludes, up to 64.
    ef_links : int, default 16
        The same for a class that is linked; at least links + 1 are taken.
    entries, hubs : int, default 32 and 8
        Where a search begins.
    sketch, posts : int, default 64 and 8
        Entries of a sketch, and classes of a signpost.
    drift : float, default 0.25
        What makes a refresh link a class anew; 0 for any change of sketch or norm.
    index : dict of arrays or None, default None
        What `index` of another one gave, of the same vectors and options; None links all classes.

    Raises
    ------
    InputError
        An argument is not a number of its range: counts are 1 or more, `hubs` and `drift` 0 or more.
    """

    name = "sw-graph"

    def __init__(
        self, vectors: ClassVectors, seed: int = 0, threads: int = 1, *, links: int = 8, ef: int = 8, ef_links: int = 16,
        entries: int = 32, hubs: int = 8, sketch: int = 64, posts: int = 8, drift: float = 0.25, index: Index | None = None,
    ) -> None:  # fmt: skip
        super().__init__(vectors, seed, threads)
        counts = {"ef": ef, "ef_links": ef_links, "entries": entries, "links": links, "sketch": sketch, "posts": posts}
        ef, ef_links, entries, links, sketch, posts = self.checked_counts(counts).values()
        self.drift, self._sketch_size = share("drift", drift, self.words()), sketch
        self._n_hubs = whole("hubs", hubs, self.words(), 0)
        self._sizes, self._entries, self._links = (ef, max(ef_links, links + 1)), entries, links
        self.graph = kernels.empty_graph(vectors.n_classes, vectors.n_features, links, sketch, posts)
        self.linked_anew = 0  # classes that refreshes linked
        if index is None:
            self.refresh(np.arange(vectors.n_classes, dtype=np.int32))
        else:
            for name, values in self.graph._asdict().items():
                values[:] = index[name].reshape(values.shape)

    def index(self) -> dict[str, NDArray[Any]]:
        return dict(self.graph._asdict())

    @classmethod
    def checked_counts(cls, counts: dict[str, Any]) -> dict[str, int]:
        """Counts by name; raises InputError for one that is not an integer of 1 or more."""
        return {name: whole(name, count, cls.words()) for name, count in counts.items()}

    @staticmethod
    def bytes_of(
        n_classes: int, n_features: int, threads: int = 1, links: int = 8, sketch: int = 64, posts: int = 8
    ) -> int:
        """Bytes of the graph, the signposts, and what refreshes and searches hold; rows and vectors apart."""
        refreshed = min(n_classes, _PORTION) * 44 * sketch  # sketches, those that drifted, those linked at once
        largest = 17 * n_features  # entries of a class among which its sketch is chosen
        return n_classes * (12 * links + 4 * sketch + 9 + 12 * threads) + n_features * 8 * posts + refreshed + largest

    def _pool(self, size: int, hubs: NDArray[np.int32]) -> kernels.Pool:
        """What the searches of one thread hold."""
        return kernels.new_pool(self.n_classes, size, self._links, len(hubs), self._entries)

    def _hubs(self) -> NDArray[np.int32]:
        """Linked classes of the largest norm."""
        return largest(np.where(self.graph.linked, self.vectors.squares, 0.0), self._n_hubs)

    def _sketches(self, classes: NDArray[np.int32]) -> RankedRows:
        sizes = np.minimum(self.vectors.n_entries[classes], self._sketch_size)
        indptr = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        n = int(indptr[-1])
        rows = RankedRows(indptr, np.empty(n, np.uint32), np.empty(n, np.int32), np.empty(n, np.float32))
        kernels.sketch(classes, self.vectors.tables, indptr, rows)
        return rows

    def refresh(self, classes: NDArray[Any]) -> None:
        classes = np.ascontiguousarray(classes, np.int32)
        gone = classes[self.vectors.zero[classes] & self.graph.linked[classes]]
        kernels.unpost(gone, self.graph)
        kernels.unlink(gone, self.graph)
        classes = classes[~self.vectors.zero[classes]]
        for first in range(0, len(classes), _PORTION):
            self._renew(classes[first : first + _PORTION])

    def _renew(self, classes: NDArray[np.int32]) -> None:
        """Post and link those of some classes that drifted."""
        sketches, moved = self._sketches(classes), np.empty(len(classes), np.bool_)
        kernels.drifted(classes, sketches, self.vectors.tables, self.drift, self.graph, moved)
        classes, sketches = classes[moved], chosen_rows(sketches, np.flatnonzero(moved))
        kernels.unpost(classes, self.graph)
        kernels.post(classes, sketches, self.vectors.tables, self.graph)
        self.linked_anew += len(classes)
        first, hubs = 0, self._hubs()
        while first < len(classes):  # searches see what was linked before these: the same for any number of threads
            before = int(np.count_nonzero(self.graph.linked)) - len(classes) + first
            last = min(first + max(_FIRST, before), len(classes))
            some, rows = classes[first:last], chosen_rows(sketches, np.arange(first, last))
            kernels.link(some, *self._neighbours(some, rows, hubs), self.graph)
            first = last

    def _neighbours(
        self, classes: NDArray[np.int32], sketches: RankedRows, hubs: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Those that searches choose for classes, and their similarity."""
        chosen = np.empty((len(classes), self._links), np.int32)
        similarity = np.zeros(chosen.shape, np.float32)

        def search(first: int, last: int) -> None:
            pool = self._pool(self._sizes[1], hubs)
            kernels.find_links(
                first, last, classes, sketches, hubs, self.vectors.tables, self.graph, pool, chosen, similarity
            )

        self._on_threads(search, self._cuts(len(classes)))
        return chosen, similarity

    def _find(self, rows: RankedRows, excluded: Labels, best: Best) -> None:
        ef, more = self._sizes[0], min(_MORE, int(np.diff(excluded.indptr).max()))
        hubs = self._hubs()

        def search(first: int, last: int) -> int:
            pool = self._pool(ef + more, hubs)
            kernels.find_best(first, last, rows, excluded, hubs, self.vectors.tables, self.graph, ef, pool, best)
            return int(pool.counts[1])

        self.scored += sum(self._on_threads(search, self._cuts(len(best.classes))))
