"""How text becomes features: scikit-learn's analysers, counts of the words of some rows, and their weights.

tf-idf as scikit-learn's TfidfVectorizer:  x_ij = (1 + ln tf_ij) (1 + ln((1 + N) / (1 + df_j))),  rows scaled after.
Reading text is not here, nor what all rows tell together (`vocabulary`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from xmc_stream.convert.options import WORD_PATTERN, TextOptions
from xmc_stream.errors import InputError

if TYPE_CHECKING:
    from xmc_stream.convert.tfidf.table import Rule


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
    from xmc_stream.convert.tfidf.table import Rule, WordTable, characters, terms_of

    stops = WordTable()
    if text.stop_words:
        from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

        stops.numbers(terms_of(ENGLISH_STOP_WORDS))
    return Rule(characters(text.lowercase), stops.words, text.ngrams)


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
    from xmc_stream.store.names import open_vectorizer

    opened = open_vectorizer(path)
    if opened is None:
        raise InputError(f"{name} was not made from text: it has no vectorizer that could make features of this text")
    return TextOptions.of(opened[0])
