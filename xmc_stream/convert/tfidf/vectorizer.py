"""How text becomes features: options, scikit-learn's analysers, and counts of the words of some rows.

tf-idf as scikit-learn's TfidfVectorizer:  x_ij = (1 + ln tf_ij) (1 + ln((1 + N) / (1 + df_j))),  rows scaled after.
Reading text is not here, nor what all rows tell together (`vocabulary`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import InputError

WORD_PATTERN = r"(?u)\b\w\w+\b"
_ANALYZERS = ("word", "char", "char_wb")
_MOST_HASHED = 2**28


@dataclass(frozen=True)
class TextOptions:
    """How text becomes features, and where it stands.

    text_fields: of a record, joined by a newline; () for those of common names. label_field: of its labels; None for
    one of a common name, "" for none. label_delimiter: between labels in a string; None: the string is one label.
    analyzer, ngrams, lowercase, stop_words (None or "english"), token_pattern: as scikit-learn's vectorizers take
    them. min_df, max_df: rows that a feature occurs in, as a number or (float) as a share; max_features: the most
    frequent ones are kept. sublinear_tf: 1 + ln tf for tf; idf: weights of 1 + ln((1 + N) / (1 + df)). hash_features:
    a power of two; features are hashes of words then, without names. Raises InputError naming what is out of range.
    """

    text_fields: tuple[str, ...] = ()
    label_field: str | None = None
    label_delimiter: str | None = None
    analyzer: str = "word"
    ngrams: tuple[int, int] = (1, 1)
    lowercase: bool = True
    stop_words: str | None = None
    token_pattern: str = WORD_PATTERN
    min_df: int | float = 1
    max_df: int | float = 1.0
    max_features: int | None = None
    sublinear_tf: bool = True
    idf: bool = True
    hash_features: int | None = None

    def __post_init__(self) -> None:
        low, high = self.ngrams
        power = self.hash_features or 1
        try:
            groups = re.compile(self.token_pattern).groups
        except re.error as error:
            raise InputError(f"token_pattern {self.token_pattern!r} is not a regular expression: {error}") from None
        for fits, message in (
            (
                not isinstance(self.text_fields, str),
                f"text_fields must be a tuple of names, got the string {self.text_fields!r}: write ({self.text_fields!r},)",
            ),
            (self.analyzer in _ANALYZERS, f"analyzer must be one of {', '.join(_ANALYZERS)}, got {self.analyzer!r}"),
            (1 <= low <= high, f"ngrams must be two sizes as 1,2, the smaller first, got {low},{high}"),
            (self.stop_words in (None, "english"), f"stop_words must be english or none, got {self.stop_words!r}"),
            (groups <= 1, f"token_pattern {self.token_pattern!r} has {groups} groups: one at most"),
            (_is_count(self.min_df), f"min_df must be a number from 1 or a share up to 1.0, got {self.min_df!r}"),
            (_is_count(self.max_df), f"max_df must be a number from 1 or a share up to 1.0, got {self.max_df!r}"),
            (self.max_features is None or self.max_features >= 1, f"max_features must be from 1: {self.max_features}"),
            (
                power & (power - 1) == 0 and power <= _MOST_HASHED and self.hash_features != 0,
                f"hash_features must be a power of two up to {_MOST_HASHED}, got {self.hash_features}",
            ),
            (
                self.hash_features is None or (self.min_df, self.max_df, self.max_features) == (1, 1.0, None),
                "min_df, max_df and max_features choose among words, which hash_features does not keep: leave them out",
            ),
            (self.label_delimiter != "", "label_delimiter is empty: name the text between labels"),
        ):
            if not fits:
                raise InputError(message)

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> TextOptions:
        """Options from the attributes of a stored vectorizer."""
        values = {field.name: attributes[field.name] for field in fields(cls)}
        return cls(**{**values, "text_fields": tuple(values["text_fields"]), "ngrams": tuple(values["ngrams"])})

    def attributes(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def analyse(self) -> Callable[[str], Iterable[str]]:
        """scikit-learn's analyser: text to tokens."""
        from sklearn.feature_extraction.text import CountVectorizer

        analyser: Callable[[str], Iterable[str]] = CountVectorizer(
            analyzer=self.analyzer,
            ngram_range=self.ngrams,
            lowercase=self.lowercase,
            stop_words=self.stop_words if self.analyzer == "word" else None,
            token_pattern=self.token_pattern if self.analyzer == "word" else None,
        ).build_analyzer()
        return analyser

    @property
    def bytes_per_byte(self) -> int:
        """Bytes of memory a byte of a line may take: the record, its tokens, and all of them new to the dictionary."""
        orders = self.ngrams[1] - self.ngrams[0] + 1
        return 40 + orders * (90 if self.analyzer == "word" else 250)

    def bounds(self, n_rows: int) -> tuple[float, float]:
        """Least and most rows that a feature occurs in, as scikit-learn counts them."""
        low = self.min_df if isinstance(self.min_df, int) else self.min_df * n_rows
        high = self.max_df if isinstance(self.max_df, int) else self.max_df * n_rows
        if high < low:
            raise InputError(
                f"max_df ({high:g} rows of {n_rows:,}) is below min_df ({low:g} rows): nothing would be kept"
            )
        return low, high

    def weights(self, rows: NDArray[np.int64], n_rows: int) -> NDArray[np.float64]:
        """idf of features that occur in so many rows of n_rows; ones without idf."""
        if not self.idf:
            return np.ones(len(rows))
        return np.asarray(np.log((1.0 + n_rows) / (1.0 + rows)) + 1.0)

    def weighted(self, counts: NDArray[np.float32], weights: NDArray[np.float64]) -> NDArray[np.float32]:
        """Values of features from their counts in rows and their idf."""
        tf = counts.astype(np.float64)
        if self.sublinear_tf:
            np.log(tf, out=tf)
            tf += 1.0
        tf *= weights
        return tf.astype(np.float32)


def _is_count(value: float) -> bool:
    return value >= 1 if isinstance(value, int) else 0.0 < value <= 1.0


class Terms(dict[str, int]):
    """Words and their numbers in order of appearance: a look-up takes up what is new. size: bytes of memory, at most."""

    ENTRY = 180  # bytes of an entry beside its text: the table and its doubling, the number, counts, sorting

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __missing__(self, term: str) -> int:
        number = self[term] = len(self)
        self.size += term.__sizeof__() + self.ENTRY
        return number


def counted(
    ids: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
    """Rows of ids (below 2^31, in any order, repeated) as indptr, sorted ids without repetition, and how often each."""
    keys = np.repeat(np.arange(len(lengths), dtype=np.int64) << 32, lengths)
    keys |= ids
    keys.sort()
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    counts = np.diff(first, append=len(keys)).astype(np.float32)
    keys = keys[first]
    indptr = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(np.bincount(keys >> 32, minlength=len(lengths)), out=indptr[1:])
    return indptr, (keys & 0xFFFFFFFF).astype(np.int32), counts


def like_options(stored: TextOptions, given: TextOptions, like: str) -> TextOptions:
    """The options of a training set, with the fields that are given for this input.

    Raises InputError where others are given than the training set's.
    """
    own = ("text_fields", "label_field", "label_delimiter")
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
