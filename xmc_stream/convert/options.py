"""How an input is to be read: what the user says of it, and what a training set decides."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from xmc_stream import flags
from xmc_stream.arguments import MOST_INT, native, whole
from xmc_stream.convert.messages import meant
from xmc_stream.errors import InputError

if TYPE_CHECKING:
    from xmc_stream.store.dataset import Dataset
    from xmc_stream.store.model import StoredModel

WORD_PATTERN = r"(?u)\b\w\w+\b"
NORMALIZE = ("none", "l2")
_ANALYZERS = ("word", "char", "char_wb")
_MOST_HASHED = 2**28
_LATER = ("label_ids", "label_lists", "id_field")  # that vectorizers of before do not have


@dataclass(frozen=True)
class Like:
    """What a test set takes over from its training set, or from a model.

    name: as the user wrote it, for messages; path: of the dataset or model; base, label_base: of the
    ids of features and of labels in its text, 0 or 1; names: whether the test set keeps the names too; beside: of its
    features, the last ones that are columns of matrices beside, of each; labels: they are taken over too.
    """

    name: str
    path: Path
    n_features: int
    n_labels: int
    normalize: str
    base: int = 0
    label_base: int = 0
    names: bool = True
    beside: tuple[int, ...] = ()
    labels: bool = True


def of_labels(like: Like | None) -> Like | None:
    """The training set whose labels an input takes over, if it does."""
    return like if like and like.labels else None


def taken_over(like: str | Path | Dataset | StoredModel) -> Like:
    """What a test set takes over from a training set, given by path or opened, or from a model.

    Raises StoreError where a file of that is damaged.
    """
    from xmc_stream.store.chunks import compare_arrays
    from xmc_stream.store.dataset import Dataset, open_dataset
    from xmc_stream.store.inventory import refuse_broken_seal
    from xmc_stream.store.model import StoredModel, is_model
    from xmc_stream.store.names import selected_of
    from xmc_stream.store.nodes import understood
    from xmc_stream.store.remote import as_path

    train: Dataset | StoredModel
    if isinstance(like, Dataset | StoredModel):
        train = like
    else:
        like = as_path(like)
        train = StoredModel(like) if is_model(like) else open_dataset(like)
    refuse_broken_seal(train.path)
    for words in ("names", "vectorizer"):
        compare_arrays(train.path / words)
    of = selected_of(train.attributes)
    if of is not None:
        raise InputError(
            f"{train.path} has {train.n_features} selected features of {of}: convert "
            + flags.LIKE
            + " the data that they were selected from, then select them by `xmc-stream select-features`"
        )
    normalize = train.attributes.get("normalize", "none")
    if normalize not in NORMALIZE:
        raise InputError(f"{train.path} is normalised by {normalize!r}, unknown here: set normalize yourself")
    with understood(train.path):
        beside = tuple(int(one["n_features"]) for one in train.attributes.get("beside", ()))
    base, label_base = (int(train.attributes.get(name, 0)) for name in ("base", "label_base"))
    return Like(
        str(train.path), train.path.absolute(), train.n_features, train.n_labels, normalize, base, label_base,
        beside=beside,
    )  # fmt: skip


def without_labels(like: Like | None, options: Mapping[str, Any]) -> Like:
    """What is taken over of the features alone. Raises InputError where that makes no sense."""
    if like is None or options.get("unlabelled"):
        raise InputError(
            flags.NEW_LABELS
            + " says that labels are not those of "
            + flags.LIKE
            + ": "
            + ("name it" if like is None else "rows without labels have none")
        )
    return replace(like, labels=False)


@dataclass(frozen=True)
class TextOptions:
    """How text becomes features, tf-idf of words or characters, and where it stands in a record.

    Parameters
    ----------
    text_fields : tuple of str, default ()
        Fields with the text, joined by a newline. (): those of common names, as title and content.
    label_field : str or None, default None
        The field of the labels. None: one of a common name. "": there are no labels.
    label_delimiter : str or None, default None
        What stands between labels in a string. None: the string is one label.
    label_lists : bool, default False
        Labels in a string are a list, as JSON or Python writes one: "['a', 'b']". False: see label_delimiter.
    label_ids : bool, default False
        Labels in a string are whole numbers, ids, as they always are where numbers stand. False: they are names.
    id_field : str or None, default None
        The field of the rows' own ids, texts or whole numbers, which predictions are given back with. None: they have none.
    analyzer : {"word", "char", "char_wb"}, default "word"
        What a feature is made of. This and the next four are as in scikit-learn's TfidfVectorizer.
    ngrams : tuple (int, int), default (1, 1)
        The least and the largest number of words, or characters, of a feature.
    lowercase : bool, default True
        Turn the text into lower case first.
    stop_words : {"english"} or None, default None
        Words to leave out.
    token_pattern : str, default r"(?u)\\b\\w\\w+\\b"
        The regular expression of a word, with one group at most.
    min_df, max_df : int or float, default 1 and 1.0
        The least and the largest number of rows that a feature occurs in; a float is a share of the rows.
    max_features : int or None, default None
        Keep so many features, the most frequent ones. None: all.
    sublinear_tf : bool, default True
        Use 1 + ln(tf) for a term that occurs tf times in a row.
    idf : bool, default True
        Multiply by 1 + ln((1 + N) / (1 + df)), df being the rows that the term occurs in.
    hash_features : int or None, default None
        A power of two: the number of features, which are hashes of words and have no names. None: keep a vocabulary.

    Raises
    ------
    InputError
        Naming what is out of range.

    Examples
    --------
    >>> import xmc_stream as xs
    >>> with open("hats.csv", "w") as file:
    ...     _ = file.write("words,tags\\na blue hat,hats;blue\\na red hat,hats;red\\n")
    >>> text = xs.TextOptions(text_fields=("words",), label_field="tags", label_delimiter=";")
    >>> xs.convert("hats.csv", "hats.xmc", text=text)
    Dataset('hats.xmc': 2 x 3, 3 labels)
    """

    text_fields: tuple[str, ...] = ()
    label_field: str | None = None
    label_delimiter: str | None = None
    label_lists: bool = False
    label_ids: bool = False
    id_field: str | None = None
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
        for name, value in vars(self).items():
            several = isinstance(value, tuple | list) or getattr(value, "ndim", 0) == 1  # an array of NumPy
            object.__setattr__(self, name, tuple(map(native, value)) if several else native(value))
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
            (
                not self.label_lists or self.label_delimiter is None,
                "label_lists and label_delimiter are two ways of writing labels: leave out one",
            ),
        ):
            if not fits:
                raise InputError(message)

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> TextOptions:
        """Options from the attributes of a stored vectorizer.

        Parameters
        ----------
        attributes : Mapping
            The attributes, by their names.

        Returns
        -------
        TextOptions
            The options.
        """
        names = [field.name for field in fields(cls) if field.name in attributes or field.name not in _LATER]
        values = {name: attributes[name] for name in names}
        return cls(**{**values, "text_fields": tuple(values["text_fields"]), "ngrams": tuple(values["ngrams"])})

    @property
    def columns(self) -> tuple[str, ...]:
        """All fields that are read."""
        return tuple(dict.fromkeys((*self.text_fields, *filter(None, (self.label_field, self.id_field)))))

    def attributes(self) -> dict[str, Any]:
        """Plain JSON values.

        Returns
        -------
        dict
            The options, by their names.
        """
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


@dataclass(frozen=True, eq=False)
class ConvertOptions:
    """How a conversion is done: the keywords of `xmc_stream.convert`, which describes them, with their defaults.

    One object may serve several conversions. Keywords of `convert` change single options of it.

    Raises
    ------
    InputError
        Naming what is out of range.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
    >>> X = sp.csr_matrix(np.repeat(np.eye(3, dtype=np.float32), 10, axis=0))
    >>> how = xs.ConvertOptions(normalize="l2", columns=True)
    >>> xs.convert(X, "kept-options.xmc", how, labels=X)
    Dataset('kept-options.xmc': 30 x 3, 3 labels)
    """

    labels: Any = None
    like: str | Path | Dataset | StoredModel | None = None
    normalize: Literal["none", "l2"] | None = None
    memory_limit: str | float | None = None
    threads: int | None = None
    scheduler: Any = None
    overwrite: bool = False
    progress: bool = False
    columns: bool = False
    observed: str | Path | None = None
    format: str | None = None
    label_names: str | Path | None = None
    feature_names: str | Path | None = None
    base: Literal[0, 1] | None = None
    skip: bool = False
    sum_duplicates: bool = False
    drop_unseen: bool = False
    new_labels: bool = False
    n_features: int | None = None
    n_labels: int | None = None
    layer: str | None = None
    label_key: str | None = None
    text: TextOptions | str | Sequence[str] | None = None
    label: str | None = None
    unlabelled: bool = False
    beside: str | Path | Sequence[str | Path] | None = None
    delimiter: str | None = None
    quote: str | None = None
    header: bool = True

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            none = isinstance(value, tuple) and not value  # as the command line has it
            object.__setattr__(self, name, None if none else native(value))
        for name in ("n_features", "n_labels"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), "convert", 0, MOST_INT)
        for name in ("delimiter", "quote"):
            character = getattr(self, name)
            if character and (len(character) > 1 or not character.isascii() or character in "\r\n\0"):
                raise InputError(f"{name} must be one ASCII character, got {character!r}")
        if self.delimiter == "" or (self.delimiter or "") == ('"' if self.quote is None else self.quote or "none"):
            raise InputError(f"delimiter must be one ASCII character, and not the quote, got {self.delimiter!r}")
        for name, known in _KNOWN.items():
            if getattr(self, name) not in (None, *known):
                raise InputError(f"{name} must be one of {', '.join(map(str, known))}, got {getattr(self, name)!r}")
        _ = self.text_options

    @property
    def of_csv(self) -> bool:
        """Whether options of CSV were given."""
        return (self.delimiter, self.quote, self.header) != (None, None, True)

    @property
    def label_files(self) -> tuple[Path, ...]:
        """The labels, where they are paths, as of a source of files."""
        return self.labels or ()

    @property
    def text_options(self) -> TextOptions | None:
        """How raw text becomes features, with the fields that `text` and `label` name; None where neither is given."""
        text = self.text
        if text is None and self.label is None:
            return None
        if not isinstance(text, TextOptions):
            text = TextOptions(text_fields=(text,) if isinstance(text, str) else tuple(text or ()))
        if self.label is None:
            return text
        if text.label_field not in (None, self.label):
            raise InputError(f"label is {self.label!r} and the label_field of text {text.label_field!r}: leave out one")
        return replace(text, label_field=self.label)

    def identity(self) -> dict[str, str]:
        """What tells how a source was read.

        Returns
        -------
        dict
            The options in words. A conversion that an earlier version began goes on where they are the same.
        """
        beside = (self.beside,) if isinstance(self.beside, str | Path) else tuple(self.beside or ())
        given = {name: getattr(self, name) for name in _OF_SOURCE} | {"text": self.text_options, "beside": beside}
        return {name: str(value) for name, value in given.items()} | ({"unlabelled": "True"} if self.unlabelled else {})


_KNOWN: dict[str, tuple[Any, ...]] = {"normalize": NORMALIZE, "base": (0, 1)}
_OF_SOURCE = (
    "label_names", "feature_names", "base", "skip", "sum_duplicates", "drop_unseen", "n_features", "n_labels",
    "layer", "label_key", "delimiter", "quote", "header",
)  # fmt: skip


def with_overrides(options: ConvertOptions | None, overrides: Mapping[str, Any]) -> ConvertOptions:
    """Options with some of them changed. Raises TypeError, as Python does, for a keyword that is none of them."""
    known = [field.name for field in fields(ConvertOptions)]
    for name in overrides:
        if name in known:
            continue
        of_text = name in {field.name for field in fields(TextOptions)}
        advice = f" (it goes into text=TextOptions({name}=...))" if of_text else meant(name, known)
        raise TypeError(f"convert() got an unexpected keyword argument {name!r}{advice}")
    if options is None:
        return ConvertOptions(**overrides)
    if not isinstance(options, ConvertOptions):
        raise TypeError(f"options of convert() must be ConvertOptions, got {type(options).__name__}")
    return replace(options, **overrides) if overrides else options


def _is_count(value: float) -> bool:
    return value >= 1 if isinstance(value, int) else 0.0 < value <= 1.0


def refuse_idle(name: object, format: str, options: ConvertOptions) -> None:
    """Raise InputError for an option that has nothing to do with the format: it may be a mistake of either."""
    for given, formats, what in (
        ((options.layer, options.label_key) != (None, None), ("anndata",), flags.LAYER + " and " + flags.LABEL_KEY),
        (options.text_options is not None, ("jsonl", "parquet", "csv"), flags.Wording.of("options of raw text")),
        (options.of_csv, ("csv",), flags.DELIMITER + ", " + flags.QUOTE + " and " + flags.NO_HEADER),
    ):
        if given and format not in formats:
            known = " and ".join("AnnData" if one == "anndata" else one for one in formats)
            raise InputError(f"{name} is {format}: " + what + f" are of {known}, leave them out")
