"""Texts to rows in memory, for few of them: by the vocabulary and the weights that a dataset or a model keeps.

The rows are those of a conversion, bit for bit. Files of text are converted, see `records`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from xmc_stream.convert.options import Like
from xmc_stream.convert.pieces import Rows
from xmc_stream.convert.tfidf.counting import Hasher
from xmc_stream.convert.tfidf.vectorizer import (
    analyser_of,
    bytes_per_byte,
    stored_options,
    weighted,
)
from xmc_stream.errors import StoreError
from xmc_stream.kernels.csr import scale_rows_l2
from xmc_stream.store.encoding import index_dtype
from xmc_stream.store.names import Names, open_names, open_vectorizer

_TOKEN_BYTES = 80  # of a token, as it is counted and weighted, of which there are as many as bytes at most
_NAME_BYTES, _CHARACTER_BYTES = 240, 4  # of a word in the dictionary, and of each byte of its UTF-8, at most
_IDF_BYTES = 2 * 8  # of a feature: as it is read
_WINDOW_BYTES = 2**21  # of names that are read


class TextRows:
    """Makes rows of texts. Nothing in it changes, so that any number of threads may use it at once.

    like: what a test set takes over from the training set, or from a model. Nothing is read before `load`. Raises InputError
    where it was not made from text.
    """

    def __init__(self, like: Like) -> None:
        self._path = Path(like.path)
        self._text = stored_options(self._path, like.name)
        self._n_features, self._scale = like.n_features, like.normalize == "l2"
        self._orders = self._text.ngrams[1] - self._text.ngrams[0] + 1
        self._hasher = Hasher(self._text) if self._text.hash_features else None

    @property
    def needs(self) -> int:
        """Bytes that `load` takes at most."""
        idf = _IDF_BYTES * self._n_features
        if self._hasher:
            return idf
        names = self._names()
        return idf + _NAME_BYTES * len(names) + _CHARACTER_BYTES * names.n_bytes + _WINDOW_BYTES

    def load(self) -> TextRows:
        """Read words and weights. Raises StoreError where there are fewer than features."""
        _, idf = open_vectorizer(self._path) or ({}, None)
        words: dict[str, int] = {}
        if not self._hasher:
            names = self._names()
            words = dict(zip(names, range(self._n_features), strict=False))
        if idf is None or idf.size < self._n_features or (not self._hasher and len(words) < self._n_features):
            raise StoreError(f"{self._path} has fewer words than features: the store is damaged; make it again")
        self._words, self._weights = words, idf.read(0, self._n_features)
        self._analyse = analyser_of(self._text)
        self.rows(["a few words"])  # loads what is loaded when it is needed
        return self

    def bytes_of(self, texts: Sequence[str]) -> int:
        """What `rows` takes at most, with the rows."""
        sizes = [len(text) if text.isascii() else 4 * len(text) for text in texts]
        return (
            bytes_per_byte(self._text) * max(sizes, default=0)
            + _TOKEN_BYTES * self._orders * sum(sizes)
            + 32 * len(texts)
        )

    def rows(self, texts: Sequence[str]) -> Rows:
        """Rows of texts that are sound. Words that are no features are left out; a text without any is a row of zeros."""
        from scipy.sparse import csr_matrix

        tokens = (self._analyse(text.replace("\0", " ")) for text in texts)  # NUL characters separate words
        if self._hasher:
            indptr, indices, counts = self._hasher.rows([list(some) for some in tokens])
        else:
            find = self._words.get
            ids = [[i for token in some if (i := find(token)) is not None] for some in tokens]
            flat = np.fromiter(itertools.chain.from_iterable(ids), np.int64)
            ends = np.cumsum([0, *map(len, ids)])
            X = csr_matrix((np.ones(len(flat), np.float32), flat, ends), (len(texts), self._n_features))
            X.sum_duplicates()
            indptr, indices, counts = X.indptr.astype(np.int64), X.indices, X.data
        data = weighted(self._text, counts, self._weights[indices])
        if self._scale:
            scale_rows_l2(indptr, data)
        return indptr, indices.astype(index_dtype(self._n_features), copy=False), data

    def _names(self) -> Names:
        names = open_names(self._path, "features")
        if names is None:
            raise StoreError(f"{self._path} has a vectorizer and no names of features: it is damaged; make it again")
        return names
