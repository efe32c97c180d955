"""Trained models: opening them and predicting with them. A kind of model has a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xmc_stream.arguments import native_arguments
from xmc_stream.models.execution import Execution, advising, behind, planned
from xmc_stream.models.model import Model, as_model, load_model
from xmc_stream.models.prediction import answer, predict_to, predict_with, stored_filter

__all__ = [
    "Execution", "Model", "advising", "answer", "as_model", "behind", "load_model", "planned",
    "predict", "predict_to", "predict_with", "stored_filter",
]  # fmt: skip


@native_arguments
def predict(
    model: Model | str | Path,
    data: Any,
    out: str | Path,
    k: int = 5,
    *,
    overwrite: bool = False,
    filter: str | Path | None = None,
    check: bool = True,
    memory_limit: str | int | None = None,
    threads: int | None = None,
    scheduler: Any = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Write the k best classes of each sample to disk.

    By the name of `out` that is a zarr group (any other name), a .npz file of the arrays `labels` and `scores` (n x k),
    a .txt file with a line `label:score label:score ...` a sample, or a .jsonl file with an object a sample, in which
    labels have their names. Names of other files of data, as .csv, are refused. "-" is standard output, which takes
    what a .jsonl file would. Best classes come first; ties go to the lower label. Rows that have ids of their own keep
    them: as the array `ids`, as `id` of an object, and before a tab that begins a line of text.

    Parameters
    ----------
    model : Model, str or Path
        A trained model, or its path.
    data : Dataset, str, Path, scipy sparse matrix, array or frame (n x D), or list, series or array of str
        The samples, with as many features as the model. Their labels are not read. At a path lies a dataset, or a file
        that `convert` takes with the model as `like`. Texts are for a model that was trained on raw text.
    out : str or Path
        Where the predictions are written.
    k : int, default 5
        Classes of each sample, from 1 to the number of labels.
    overwrite : bool, default False
        Replace predictions at `out`.
    filter : str, Path or None, default None
        A file of lines `row label`, counted from zero: pairs that are not predicted. Other classes move up; -1 stands
        where fewer than k are left.
    check : bool, default True
        Compare the model with its checksums first, and a dataset as it is read.
    memory_limit : str, int or None, default None
        Peak resident memory of the process, as "4GB" or in bytes. On a cluster: of each worker. None: what it holds,
        and three quarters of what is free.
    threads : int or None, default None
        Threads of this process, from 1 on. None: as many as it has processors.
    scheduler : dask client, str or None, default None
        A client of dask.distributed, or the address of a scheduler, to run the jobs there. None: this process.
    progress : bool, default False
        Show a bar on stderr, where that is a terminal.

    Returns
    -------
    dict
        predictions (the path), n_samples, k, seconds, ms_per_sample, peak_rss and memory_limit (bytes), bytes_read and
        row_blocks.

    Raises
    ------
    InputError
        The data do not match the model, k is out of range, or something stands at `out`.
    StoreError
        The model or the data are damaged, or `out` cannot be written.
    MemoryLimitError
        The memory limit cannot work, or was nearly reached.
    JobError
        A job failed on a worker of a cluster.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
    >>> X = sp.csr_matrix(np.repeat(np.eye(3, dtype=np.float32), 10, axis=0))  # row i has label i // 10
    >>> data = xs.convert(X, "predict.xmc", labels=X)
    >>> model = xs.PPDSparse().fit(data).model_
    >>> report = xs.predict(model, data, "predictions.npz", k=2)
    >>> report["n_samples"], np.load("predictions.npz")["labels"].shape
    (30, (30, 2))
    """
    return predict_with(
        as_model(model), data, out, k, Execution(memory_limit, threads, scheduler, progress), overwrite, filter, check
    )
