"""Conversion of what people have (text, arrays, matrices) into a dataset on disk, in bounded memory.

One file a format, in convert/formats. A format gives a source: parts of rows that are read apart (convert/source.py).
What happens to them is the same for all, in convert/run.py with its jobs and memory plan, and here: options, identity,
the report. What several formats share is in convert/lines, convert/matrices and convert/tfidf. Nothing here depends on
how a dataset lies on disk.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from xmc_stream.arguments import native_arguments
from xmc_stream.errors import InputError, in_python
from xmc_stream.system.files import regular
from xmc_stream.system.memory import peak_resident
from xmc_stream.system.progress import LOG, working

if TYPE_CHECKING:
    from xmc_stream.convert.options import Like, TextOptions
    from xmc_stream.convert.source import Source
    from xmc_stream.store.dataset import Dataset
    from xmc_stream.store.model import StoredModel
    from xmc_stream.system.memory import MemoryLimit

_NORMALIZE = ("none", "l2")
_VERSION = 1  # of the work folder of a conversion


@native_arguments
def convert(
    source: Any,
    target: str | Path,
    *,
    labels: Any = None,
    like: str | Path | Dataset | StoredModel | None = None,
    normalize: Literal["none", "l2"] | None = None,
    memory_limit: str | float | None = None,
    threads: int | None = None,
    scheduler: Any = None,
    overwrite: bool = False,
    progress: bool = False,
    columns: bool = False,
    observed: str | Path | None = None,
    format: str | None = None,
    label_names: str | Path | None = None,
    feature_names: str | Path | None = None,
    base: Literal[0, 1] | None = None,
    skip: bool = False,
    sum_duplicates: bool = False,
    drop_unseen: bool = False,
    new_labels: bool = False,
    n_features: int | None = None,
    n_labels: int | None = None,
    layer: str | None = None,
    label_key: str | None = None,
    text: TextOptions | None = None,
    unlabelled: bool = False,
    beside: str | Path | Sequence[str | Path] | None = None,
    delimiter: str | None = None,
    quote: str | None = None,
    header: bool = True,
) -> Dataset:
    """Convert a data set of a common format into a dataset on disk, and open it.

    The input is read once, in bounded memory. The format is recognised by the content; docs/convert.md describes the formats.
    How labels were understood is an INFO record of the logger "xmc_stream".
    A conversion of files that was killed goes on when the same call is made again. One that came to its end has nothing
    to do. Bad input leaves nothing at `target`.

    Parameters
    ----------
    source : str, Path, list of these, or scipy sparse matrix (N x D)
        The samples. Several files are one set, their rows in this order. "-" is standard input. Stored zeros of a
        matrix are kept.
    target : str or Path
        The folder of the new dataset.
    labels : str, Path, list of these, scipy sparse matrix (N x K), or None, default None
        The labels, where the source has the features alone: as many files as there are sources, or a matrix beside a
        matrix. A value other than zero is a positive.
    like : str, Path, Dataset, Model or None, default None
        For a test set: the training set or a model, or the path of one. D, K, the base of the ids, the vocabulary and
        the normalisation are taken from it.
    normalize : {"none", "l2"} or None, default None
        "l2" divides each row of X by its l2 norm, "none" leaves it. None: as in `like`; without `like` "l2" for raw
        text and "none" for the rest.
    memory_limit : str, int, float or None, default None
        Peak resident memory of the process, as "512MB" or in bytes; on a cluster of each worker. None: what it holds,
        and three quarters of what is free.
    threads : int or None, default None
        Threads of this process. None: as many as it has processors. A small input takes one.
    scheduler : dask client, str or None, default None
        A client of dask.distributed, or the address of a scheduler, to run the jobs there. None: this process.
    overwrite : bool, default False
        Replace a dataset at `target`.
    progress : bool, default False
        Show a bar on stderr, where that is a terminal.
    columns : bool, default False
        Store X by columns too. Without it, `Dataset.X_columns` makes that when it is first asked for.
    observed : str, Path or None, default None
        A file of lines `row label`, counted from zero: the pairs whose labels are known. See `Dataset.with_observed`.
    format : str or None, default None
        The name of the format, as "xmlrepo", "libsvm", "jsonl", "csv", "parquet", "npz", "npy" or "anndata". None: recognised
        by the content.
    label_names, feature_names : str, Path or None, default None
        A file of the names of the labels, or of the features: one a line, or JSON objects with a title.
    base : {0, 1} or None, default None
        The first id in a text: of XMLRepo text that of features and labels, of libsvm text that of features. None: as in
        `like`; without `like` 0 for XMLRepo text, and for libsvm text what its ids show.
    skip : bool, default False
        Leave out bad rows and count them, instead of raising an error.
    sum_duplicates : bool, default False
        Add up the values of a feature that stands twice in a row, instead of raising an error. A label counts once.
    drop_unseen : bool, default False
        Leave out features and labels that `like` does not have and count them, instead of raising an error.
    new_labels : bool, default False
        Take from `like` the features alone: K and the names of labels are those of the source. For rows that
        `xmc_stream.append` puts below those of `like`.
    n_features, n_labels : int or None, default None
        D and K, where the input does not say them. They may be larger than what occurs, not smaller.
    layer : str or None, default None
        Of AnnData: the layer that holds the features. None: X.
    label_key : str or None, default None
        Of AnnData: the column of obs, or the matrix of obsm, that holds the labels, as "KEY", "obs/KEY" or "obsm/KEY".
    text : TextOptions or None, default None
        How raw text becomes features, see `xmc_stream.convert.options.TextOptions`. None: its defaults.
    unlabelled : bool, default False
        The rows get no labels. Labels that stand in the source are passed over.
    beside : str, Path, list of these, or None, default None
        Files of matrices (.npy or .npz, dense or sparse) with as many rows, whose columns become features behind those
        of the source: embeddings beside a text. Where rows are normalised, those of the source and of each matrix are
        so first, and then the whole. A test set needs them too.
    delimiter : str or None, default None
        Of CSV: the character between columns. None: recognised (tab, comma, semicolon or "|").
    quote : str or None, default None
        Of CSV: the character that texts are put in, "" for none. None: a double quote.
    header : bool, default True
        Of CSV: the first row has the names of the columns. False: they are called "1", "2", "3" and so on.

    Returns
    -------
    Dataset
        The new dataset, opened.

    Raises
    ------
    InputError
        The input is not understood (the message names file and line), an option is out of range, or something stands at
        `target`.
    StoreError
        `like` cannot be opened, or `target` cannot be written.
    ResumeError
        Another process converts to `target`.
    MemoryLimitError
        The memory limit cannot work, or was nearly reached.
    JobError
        A job failed on a worker of a cluster.

    Examples
    --------
    >>> import xmc_stream as xs
    >>> with open("train.txt", "w") as file:  # XMLRepo text: N D K, then a line a sample
    ...     _ = file.write("2 3 2\\n0 0:1 2:1\\n0,1 1:3 2:4\\n")
    >>> train = xs.convert("train.txt", "train.xmc", normalize="l2", memory_limit="1GB")
    >>> train.n_samples, train.n_features, train.n_labels
    (2, 3, 2)

    Matrices in memory go the same way:

    >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
    >>> X = sp.csr_matrix(np.repeat(np.eye(3, dtype=np.float32), 10, axis=0))  # row i has label i // 10
    >>> xs.convert(X, "matrices.xmc", labels=X)
    Dataset('matrices.xmc': 30 x 3, 3 labels)
    """
    of_source = {
        "label_names": label_names, "feature_names": feature_names, "base": base, "skip": skip,
        "sum_duplicates": sum_duplicates, "drop_unseen": drop_unseen, "n_features": n_features, "n_labels": n_labels,
        "layer": layer, "label_key": label_key, "text": text, "unlabelled": unlabelled,
        "beside": beside, "delimiter": delimiter, "quote": quote,
    }  # fmt: skip
    dataset, _ = convert_report(
        source, target, like=like, normalize=normalize, memory_limit=memory_limit, overwrite=overwrite, labels=labels,
        progress=progress, threads=threads, scheduler=scheduler, columns=columns, observed=observed, format=format,
        new_labels=new_labels,
        **{name: value for name, value in of_source.items() if value is not None and value is not False},
        **({} if header else {"header": False}),
    )  # fmt: skip
    if not unlabelled and isinstance(source, str | os.PathLike | list | tuple) and LOG.isEnabledFor(logging.INFO):
        from xmc_stream.convert.labels import understood

        LOG.info("%s", understood(dataset, in_python)["said"])
    return dataset


def convert_report(
    source: Any,
    target: str | Path,
    *,
    like: str | Path | Dataset | StoredModel | None = None,
    normalize: str | None = None,
    memory_limit: str | float | None = None,
    overwrite: bool = False,
    labels: Any = None,
    progress: bool = False,
    threads: int | None = None,
    scheduler: Any = None,
    columns: bool = False,
    observed: str | Path | None = None,
    format: str | None = None,
    new_labels: bool = False,
    **options: Any,
) -> tuple[Dataset, dict[str, Any]]:
    """As `convert`, which names the parameters, with a report of the run.

    Returns
    -------
    dataset : Dataset
        The new dataset, opened.
    report : dict
        dataset, n_samples, n_features, n_labels, nnz_features, nnz_labels, bytes_in, bytes_on_disk, seconds, peak_rss
        (bytes), said (a line for people) and resumed.
    """
    from xmc_stream.store.places import target_path

    with working("convert", progress):
        return _convert(
            source, target_path(target), like, normalize, memory_limit, overwrite, labels, threads, scheduler, columns,
            observed, format, new_labels, options,
        )  # fmt: skip


def _convert(
    source: Any, target: Path, like: str | Path | Dataset | StoredModel | None, normalize: str | None,
    memory_limit: str | float | None, overwrite: bool, labels: Any, threads: int | None, scheduler: Any, columns: bool,
    observed: str | Path | None, format: str | None, new_labels: bool, options: dict[str, Any],
) -> tuple[Dataset, dict[str, Any]]:  # fmt: skip
    from xmc_stream.convert.formats.pairs import refuse_no_pairs
    from xmc_stream.convert.lines.files import STANDARD_INPUT, file_identity, stamps
    from xmc_stream.convert.matrices.arrays import reading
    from xmc_stream.convert.plan import refuse_unless_it_fits
    from xmc_stream.convert.run import run_conversion, running
    from xmc_stream.runtime.engine import limit_of
    from xmc_stream.runtime.making import MARK, digest_of, made_before, refuse_all
    from xmc_stream.store.dataset import Dataset, open_dataset
    from xmc_stream.store.encoding import folder_bytes
    from xmc_stream.store.model import StoredModel
    from xmc_stream.store.new_dataset import check_target
    from xmc_stream.store.remote import as_path

    begin = time.perf_counter()
    like = as_path(like) if isinstance(like, str | Path) else like
    given = [source, labels, options.get("beside"), options.get("label_names"), options.get("feature_names")]
    named = [path for some in given for path in (some if isinstance(some, list | tuple) else [some])]
    # of folders the source tells what it reads
    before = stamps(Path(path) for path in named if isinstance(path, str | Path) and Path(path).is_file())
    named.append(like.path if isinstance(like, Dataset | StoredModel) else like)
    for path in (options.get("label_names"), options.get("feature_names"), observed):  # which are read last
        if path is not None:
            with reading(path):
                os.close(regular(path))
    reads = [path for path in named if isinstance(path, str | Path) and Path(path).exists()]  # not of pipes
    limit = limit_of(memory_limit, scheduler, reads, [target.absolute().parent])
    if normalize not in (None, *_NORMALIZE):
        raise InputError(f"normalize must be one of {', '.join(_NORMALIZE)}, got {normalize!r}")
    if target == STANDARD_INPUT:
        raise InputError("a dataset is a folder and cannot go to standard output: name it")
    train = None if like is None else replace(taken_over(like), names=not options.get("unlabelled"))
    if new_labels:
        train = without_labels(train, options)
    opened = opened_source(source, labels, train, format, options, normalize)

    def mask(store: Path) -> None:
        if observed is not None and not (store / "observed").exists():
            _store_observed(Path(observed), Dataset(store), limit)

    try:
        identity = {
            "version": _VERSION, "source": opened.identity, "options": {name: str(options[name]) for name in options},
            "format": opened.attributes["source_format"], "normalize": normalize, "columns": columns,
            "like": None if train is None else [str(asdict(train)), file_identity(train.path / "zarr.json")],
            "observed": None if observed is None else file_identity(Path(observed)),
        }  # fmt: skip
        done = made_before(target, identity) or (None if overwrite else _finished(target, identity))
        if done is None:
            refuse_all([target], lambda path: check_target(path, overwrite))
            if observed is not None:  # it is stored when all else is done
                refuse_no_pairs(Path(observed))
            before = {**stamps(opened.files), **before}  # some were found beside others
            with running(opened, limit, threads, scheduler) as (engine, plan):
                refuse_unless_it_fits(opened, limit, plan, fewer=scheduler is None)
                # of what is read once, nothing tells whether it was the same
                mark = {} if opened.alone else {MARK: digest_of(identity)}
                done = run_conversion(
                    opened, target, identity, train, normalize, columns, plan, engine, mark, before, overwrite, mask
                )
                peak = max(peak_resident(), engine.peak if engine else 0)
        else:
            mask(target)  # which somebody may have removed
            peak = peak_resident()
        bytes_in = opened.bytes_in or done["bytes_read"]  # of pipes only reading tells
    finally:
        opened.close()
    dataset = open_dataset(target)
    return dataset, {
        "dataset": str(target),
        "n_samples": dataset.n_samples,
        "n_features": dataset.n_features,
        "n_labels": dataset.n_labels,
        "nnz_features": int(dataset.attributes["nnz_features"]),
        "nnz_labels": int(dataset.attributes["nnz_labels"]),
        "bytes_in": bytes_in,
        "bytes_on_disk": folder_bytes(target),
        "seconds": time.perf_counter() - begin,
        "peak_rss": peak,
        "said": done["said"],
        "resumed": done["resumed"],
    }


def _store_observed(source: Path, dataset: Dataset, limit: MemoryLimit) -> None:
    """Store a file of pairs as the mask of a dataset."""
    from xmc_stream.convert.formats.pairs import store_pairs
    from xmc_stream.store.dataset import write_observed
    from xmc_stream.store.matrix import SparseMatrix
    from xmc_stream.system.folders import temporary_folder

    with temporary_folder(dataset.path.absolute().parent) as scratch:
        store_pairs(source, scratch / "pairs", dataset.n_samples, dataset.n_labels, limit)
        write_observed(dataset, SparseMatrix(scratch / "pairs").blocks(2**22))


def taken_over(like: str | Path | Dataset | StoredModel) -> Like:
    """What a test set takes over from a training set, given by path or opened, or from a model.

    Raises StoreError where a file of that is damaged.
    """
    from xmc_stream.convert.options import Like
    from xmc_stream.store.chunks import compare_arrays
    from xmc_stream.store.dataset import Dataset, open_dataset
    from xmc_stream.store.inventory import refuse_broken_seal
    from xmc_stream.store.model import StoredModel, is_model
    from xmc_stream.store.remote import as_path
    from xmc_stream.store.selection import selected_of

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
            f"{train.path} has {train.n_features} selected features of {of}: convert --like the data that they were selected "
            "from, then select them by `xmc-stream select-features`"
        )
    normalize = train.attributes.get("normalize", "none")
    if normalize not in _NORMALIZE:
        raise InputError(f"{train.path} is normalised by {normalize!r}, unknown here: set normalize yourself")
    base, label_base = (int(train.attributes.get(name, 0)) for name in ("base", "label_base"))
    return Like(
        str(train.path), train.path.absolute(), train.n_features, train.n_labels, normalize, base, label_base,
        beside=_columns_beside(train),
    )  # fmt: skip


def without_labels(like: Like | None, options: dict[str, Any]) -> Like:
    """What is taken over of the features alone. Raises InputError where that makes no sense."""
    if like is None or options.get("unlabelled"):
        raise InputError(
            "--new-labels says that labels are not those of --like: "
            + ("name it" if like is None else "rows without labels have none")
        )
    return replace(like, labels=False)


def _columns_beside(train: Dataset | StoredModel) -> tuple[int, ...]:
    """How many features the matrices beside had. Raises StoreError for what cannot be."""
    from xmc_stream.store.nodes import understood

    with understood(train.path):
        return tuple(int(one["n_features"]) for one in train.attributes.get("beside", ()))


def opened_source(
    source: Any, labels: Any, like: Like | None, format: str | None = None, options: dict[str, Any] | None = None,
    normalize: str | None = None,
) -> Source:  # fmt: skip
    """The source by what it is: paths of files, or matrices."""
    from xmc_stream.convert.options import Options

    options = dict(options or {})
    beside = _paths(options.pop("beside", None), "beside", "save a matrix by numpy.save and give its path")
    if beside or (like and like.beside):
        from xmc_stream.convert.formats.beside import BesideSource, words_of

        own = opened_source(source, labels, like and words_of(like, beside), format, options)
        joined: Any = BesideSource(
            own, beside, like, normalize or (like.normalize if like else None), options.get("skip", False)
        )
        return cast("Source", joined)
    names = {what: options.pop(f"{what[:-1]}_names", None) for what in ("features", "labels")}
    files = {what: Path(path) for what, path in names.items() if path is not None}
    if files:
        from xmc_stream.convert.formats.names import NamedSource

        named: Any = NamedSource(opened_source(source, labels, like, format, options), files)
        return cast("Source", named)
    if isinstance(source, str | os.PathLike) or (isinstance(source, list | tuple) and source):
        from xmc_stream.convert.formats.registry import open_source

        paths = _paths(source, "the source")
        return open_source(paths, Options(labels=_paths(labels, "labels"), **options), like, format)
    if labels is None:
        raise InputError("features were given as a matrix and labels were not: give Y as labels=")
    from xmc_stream.convert.formats.scipy_matrices import open_matrices

    return open_matrices(source, labels, Options(**options), like)


def _paths(given: Any, what: str, advice: str = "give files for both, or matrices for both") -> tuple[Path, ...]:
    if given is None:
        return ()
    several = given if isinstance(given, list | tuple) else [given]
    if not all(isinstance(path, str | os.PathLike) for path in several):
        kinds = ", ".join(sorted({type(path).__name__ for path in several}))
        raise InputError(f"{what} must be paths of files here, not {kinds}: {advice}")
    return tuple(Path(path) for path in several)


def _finished(target: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """What is said of a dataset that came of the same conversion."""
    from xmc_stream.runtime.making import stands
    from xmc_stream.store.dataset import Dataset

    if not stands(target, identity):
        return None
    said = f"{Dataset(target).attributes['source_format']}, converted before from the same input"
    return {"said": said, "resumed": True, "bytes_read": 0}


__all__ = ["convert", "convert_report"]
