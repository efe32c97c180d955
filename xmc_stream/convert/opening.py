"""What a conversion reads: the source by what it is, and what a test set takes over from its training set."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from xmc_stream import flags
from xmc_stream.convert.options import NORMALIZE, ConvertOptions, Like
from xmc_stream.errors import InputError

if TYPE_CHECKING:
    from xmc_stream.convert.source import Source
    from xmc_stream.store.dataset import Dataset
    from xmc_stream.store.model import StoredModel


def taken_over(like: str | Path | Dataset | StoredModel) -> Like:
    """What a test set takes over from a training set, given by path or opened, or from a model.

    Raises StoreError where a file of that is damaged.
    """
    from xmc_stream.store.chunks import compare_arrays
    from xmc_stream.store.dataset import Dataset, open_dataset
    from xmc_stream.store.inventory import refuse_broken_seal
    from xmc_stream.store.model import StoredModel, is_model
    from xmc_stream.store.names import selected_of
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
    base, label_base = (int(train.attributes.get(name, 0)) for name in ("base", "label_base"))
    return Like(
        str(train.path), train.path.absolute(), train.n_features, train.n_labels, normalize, base, label_base,
        beside=_columns_beside(train),
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


def open_source(source: Any, options: ConvertOptions, like: Like | None) -> Source:
    """The source by what it is: paths of files, or matrices. like: as it was taken over, whatever `options` names."""
    beside = paths_of(options.beside, "beside", "save a matrix by numpy.save and give its path")
    if beside or (like and like.beside):
        from xmc_stream.convert.formats.beside import BesideSource, words_of

        own = open_source(source, replace(options, beside=None), like and words_of(like, beside))
        normalize = options.normalize or (like.normalize if like else None)
        return cast("Source", BesideSource(own, beside, like, normalize, options.skip))
    names = {"features": options.feature_names, "labels": options.label_names}
    files = {what: Path(path) for what, path in names.items() if path is not None}
    if files:
        from xmc_stream.convert.formats.beside import NamedSource

        own = open_source(source, replace(options, feature_names=None, label_names=None), like)
        return cast("Source", NamedSource(own, files))
    options = replace(options, like=None, scheduler=None)  # parts are sent with them to workers
    if are_files(source, options.labels):
        from xmc_stream.convert.formats.registry import open_source as open_files

        paths = paths_of(source, "the source")
        return open_files(paths, replace(options, labels=paths_of(options.labels, "labels")), like)
    from xmc_stream.convert.formats.memory import open_memory

    return open_memory(source, options, like)


def are_files(source: Any, labels: Any) -> bool:
    """Whether a source is a path, or several. A list of strings is texts where its labels are in memory too."""
    if not isinstance(source, list | tuple):
        return isinstance(source, str | os.PathLike)
    return _all_paths(source) and (
        labels is None or _all_paths(labels if isinstance(labels, list | tuple) else [labels])
    )


def _all_paths(several: Sequence[Any]) -> bool:
    return bool(several) and all(isinstance(path, str | os.PathLike) for path in several)


def paths_of(given: Any, what: str, advice: str = "give files for both, or matrices for both") -> tuple[Path, ...]:
    """Paths, of one or of several. Raises InputError for anything else."""
    if given is None:
        return ()
    several = given if isinstance(given, list | tuple) else [given]
    if not all(isinstance(path, str | os.PathLike) for path in several):
        kinds = ", ".join(sorted({type(path).__name__ for path in several}))
        raise InputError(f"{what} must be paths of files here, not {kinds}: {advice}")
    return tuple(Path(path) for path in several)


def _columns_beside(train: Dataset | StoredModel) -> tuple[int, ...]:
    """How many features the matrices beside had. Raises StoreError for what cannot be."""
    from xmc_stream.store.nodes import understood

    with understood(train.path):
        return tuple(int(one["n_features"]) for one in train.attributes.get("beside", ()))
