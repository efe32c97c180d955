"""How text becomes features: scikit-learn's analysers, counts of the words of some rows, and their weights.

tf-idf as scikit-learn's TfidfVectorizer:  x_ij = (1 + ln tf_ij) (1 + ln((1 + N) / (1 + df_j))),  rows scaled after.
Rows of few texts are made in memory, bit for bit as a conversion makes them. Files of text are converted, see `records`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.convert.options import WORD_PATTERN, Like, TextOptions
from xmc_stream.convert.pieces import Rows
from xmc_stream.convert.tfidf.table import NO_COUNTS, Counts, Rule, WordTable, characters, terms_of
from xmc_stream.errors import InputError, StoreError
from xmc_stream.kernels.csr import scale_rows_l2
from xmc_stream.store.encoding import index_dtype
from xmc_stream.store.names import Names, open_names, open_vectorizer


@functools.lru_cache(maxsize=4)
def analyser_of(text: TextOptions) -> Callable[[str], Iterable[str]]:
    """scikit-learn's analyser: text to tokens."""
    from sklearn.feature_extraction.text import CountVectorizer

    analyser: Callable[[str], Iterable[str]] = CountVectorizer(
        analyzer=text.analyzer,
        ngram_range=text.ngrams,
        lowercase=text.lowercase,
        stop_words=text.stop_words if text.analyzer == "word" else None,
        token_pattern=text.token_pattern if text.analyzer == "word" else None,
    ).build_analyzer()
    return analyser


def rule_of(text: TextOptions) -> Rule | None:
    """What kernels must know to find the same tokens, None where only scikit-learn's analyser finds them."""
    if text.analyzer != "word" or text.token_pattern != WORD_PATTERN:
        return None
    stops = WordTable()
    if text.stop_words:
        from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

        stops.numbers(terms_of(ENGLISH_STOP_WORDS))
    return Rule(characters(text.lowercase), stops.words, text.ngrams)


def hashed(text: TextOptions, tokens: Sequence[Sequence[str]]) -> Counts:
    """Rows of hashed words: indptr, sorted ids without repetition, and how often each; by scikit-learn's FeatureHasher."""
    from sklearn.feature_extraction import FeatureHasher

    if not tokens:
        return NO_COUNTS
    # without signs: tf-idf needs counts
    hasher = FeatureHasher(text.hash_features, input_type="string", dtype=np.float32, alternate_sign=False)
    X = hasher.transform(tokens)
    X.sort_indices()
    return X.indptr.astype(np.int64), X.indices.astype(np.int32), X.data


def bytes_per_byte(text: TextOptions) -> int:
    """Bytes of memory a byte of a line may take: the record, its tokens, and all of them new to the dictionary."""
    orders = text.ngrams[1] - text.ngrams[0] + 1
    return 40 + orders * (90 if text.analyzer == "word" else 250)


def df_bounds(text: TextOptions, n_rows: int) -> tuple[float, float]:
    """Least and most rows that a feature occurs in, as scikit-learn counts them."""
    low = text.min_df if isinstance(text.min_df, int) else text.min_df * n_rows
    high = text.max_df if isinstance(text.max_df, int) else text.max_df * n_rows
    if high < low:
        raise InputError(f"max_df ({high:g} rows of {n_rows:,}) is below min_df ({low:g} rows): nothing would be kept")
    return low, high


def idf_weights(text: TextOptions, rows: NDArray[np.int64], n_rows: int) -> NDArray[np.float64]:
    """idf of features that occur in so many rows of n_rows; ones without idf."""
    if not text.idf:
        return np.ones(len(rows))
    return np.asarray(np.log((1.0 + n_rows) / (1.0 + rows)) + 1.0)


def weighted(text: TextOptions, counts: NDArray[np.float32], weights: NDArray[np.float64]) -> NDArray[np.float32]:
    """Values of features from their counts in rows and their idf."""
    tf = counts.astype(np.float64)
    if text.sublinear_tf:
        np.log(tf, out=tf)
        tf += 1.0
    tf *= weights
    return tf.astype(np.float32)


def like_options(stored: TextOptions, given: TextOptions, like: str) -> TextOptions:
    """The options of a training set, with the fields that are given for this input.

    Raises InputError where others are given than the training set's.
    """
    own = ("text_fields", "label_field", "label_delimiter", "label_lists", "label_ids", "id_field")
    default = TextOptions()
    values = asdict(stored)
    for field in fields(TextOptions):
        value = getattr(given, field.name)
        if value == getattr(default, field.name):
            continue
        if field.name in own:
            values[field.name] = value
        elif value != getattr(stored, field.name):
            raise InputError(
                f"{field.name} is {getattr(stored, field.name)!r} in {like}, whose features this input takes: "
                f"leave out {field.name} {value!r}"
            )
    return TextOptions(**values)


def stored_options(path: Path, name: str) -> TextOptions:
    """The options of the vectorizer in a dataset or model. Raises InputError where it has none."""
    opened = open_vectorizer(path)
    if opened is None:
        raise InputError(f"{name} was not made from text: it has no vectorizer that could make features of this text")
    return TextOptions.of(opened[0])


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

    @property
    def needs(self) -> int:
        """Bytes that `load` takes at most."""
        idf = _IDF_BYTES * self._n_features
        if self._text.hash_features:
            return idf
        names = self._names()
        return idf + _NAME_BYTES * len(names) + _CHARACTER_BYTES * names.n_bytes + _WINDOW_BYTES

    def load(self) -> TextRows:
        """Read words and weights. Raises StoreError where there are fewer than features."""
        _, idf = open_vectorizer(self._path) or ({}, None)
        words: dict[str, int] = {}
        if not self._text.hash_features:
            names = self._names()
            words = dict(zip(names, range(self._n_features), strict=False))
        if (
            idf is None
            or idf.size < self._n_features
            or (not self._text.hash_features and len(words) < self._n_features)
        ):
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
        if self._text.hash_features:
            indptr, indices, counts = hashed(self._text, [list(some) for some in tokens])
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
