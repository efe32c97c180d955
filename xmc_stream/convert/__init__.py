"""Conversion of what people have (files of text, arrays and matrices, frames) into a dataset on disk, in bounded memory.

One file a format, in convert/formats. A format gives a source: parts of rows that are read apart (convert/source.py).
Which source it is, convert/opening.py tells; what happens to it is in convert/conversion.py. The options of all are in
convert/options.py. What several formats share is in convert/lines, convert/matrices and convert/tfidf. Nothing here
depends on how a dataset lies on disk.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmc_stream.arguments import native_arguments
from xmc_stream.convert.options import ConvertOptions, with_overrides
from xmc_stream.system.progress import LOG, working

if TYPE_CHECKING:
    from xmc_stream.store.dataset import Dataset


@native_arguments
def convert(source: Any, target: str | Path, options: ConvertOptions | None = None, **overrides: Any) -> Dataset:
    """Convert a data set of a common format into a dataset on disk, and open it.

    The input is read once, in bounded memory. The format is recognised by the content; docs/convert.md describes the formats.
    How labels were understood is an INFO record of the logger "xmc_stream".
    A conversion of files that was killed goes on when the same call is made again. One that came to its end has nothing
    to do. Bad input leaves nothing at `target`.

    Parameters
    ----------
    source : str, Path, list of these, scipy sparse matrix or array (N x D), frame, or list, series or array of texts
        The samples. Several files are one set, their rows in this order. "-" is standard input. Stored zeros of a sparse
        matrix are kept. Of a frame (pandas, polars, pyarrow) X is made of the columns of text, or of all columns where
        they are numbers, but for that of the labels.
    target : str or Path
        The folder of the new dataset.
    options : ConvertOptions or None, default None
        The options that follow, as one object; keywords change some of them. None: the defaults.
    labels : str, Path, list of these, scipy sparse matrix or array (N x K), list of lists, series, or None, default None
        The labels, where the source has the features alone: as many files as there are sources. Or, beside a source in
        memory, a matrix in which a value other than zero is a positive, or the label or the labels of each row, names or
        ids from zero.
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
    text : TextOptions, str, tuple of str or None, default None
        How raw text becomes features, see `xmc_stream.TextOptions`; or the field (column) of the text alone, or
        several. None: its defaults.
    label : str or None, default None
        The field of the labels of raw text, or the column of a frame: in short for `TextOptions(label_field=...)`.
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
    TypeError
        A keyword is none of the options, or `options` is of another kind.

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

    And so do texts, and frames of them:

    >>> xs.convert(["a blue hat", "red shoes"], "texts.xmc", labels=[["hats", "blue"], ["shoes"]])
    Dataset('texts.xmc': 2 x 4, 3 labels)
    """
    dataset, _ = convert_report(source, target, options, **overrides)
    unlabelled = with_overrides(options, overrides).unlabelled
    if not (unlabelled or hasattr(source, "dtype")) and LOG.isEnabledFor(logging.INFO):
        from xmc_stream.convert.labels import understood

        LOG.info("%s", understood(dataset)["said"].in_python)
    return dataset


def _shown() -> inspect.Signature:
    """The signature of `convert` with every option by name. Only what is given by name overrides `options`."""
    asked = [one for one in inspect.signature(convert).parameters.values() if one.kind is not one.VAR_KEYWORD]
    kind = inspect.Parameter.KEYWORD_ONLY
    options = fields(ConvertOptions)
    named = [inspect.Parameter(one.name, kind, default=one.default, annotation=one.type) for one in options]
    return inspect.Signature([*asked, *named], return_annotation="Dataset")


convert.__signature__ = _shown()  # type: ignore[attr-defined]


def convert_report(
    source: Any, target: str | Path, options: ConvertOptions | None = None, **overrides: Any
) -> tuple[Dataset, dict[str, Any]]:
    """As `convert`, which names the options, with a report of the run.

    Returns
    -------
    dataset : Dataset
        The new dataset, opened.
    report : dict
        dataset, n_samples, n_features, n_labels, nnz_features, nnz_labels, bytes_in, bytes_on_disk, seconds, peak_rss
        (bytes), said (a line for people) and resumed.
    """
    from xmc_stream.convert.conversion import converted
    from xmc_stream.store.places import target_path

    options = with_overrides(options, overrides)
    with working("convert", options.progress):
        return converted(source, target_path(target), options)


__all__ = ["convert", "convert_report"]
