"""Predicting with a model of any kind: converting what is given, writing stores and files."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import InputError
from xmc_stream.memory import MemoryLimit, format_size, peak_resident
from xmc_stream.models.execution import Execution, planned
from xmc_stream.models.held import check_k, rank, refuse_other_rows
from xmc_stream.store.dataset import Dataset, open_dataset
from xmc_stream.store.encoding import folder_bytes, writing
from xmc_stream.store.inventory import LOGS, SEAL
from xmc_stream.store.model import KIND
from xmc_stream.store.predictions import Predictions, begin_predictions, finish_predictions, refuse_to_replace

if TYPE_CHECKING:
    from xmc_stream.jobs.job import Loop
    from xmc_stream.models.model import Model


def predict_topk(
    model: Model, data: Any, k: int, execution: Execution | None
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The k best classes of each sample, in memory: see `Model.predict_topk`."""
    execution = execution or Execution()
    if isinstance(data, str | Path):
        raise InputError(
            f"got {str(data)[:40]!r}: give texts as a list, also a single one, and a dataset by open_dataset(path)"
        )
    texts = isinstance(data, Sequence) and all(isinstance(text, str) for text in data)
    if not texts and (found := rank(model, data, k, execution)) is not None:
        return found
    with tempfile.TemporaryDirectory(prefix="xmc_stream-") as folder:
        path = Path(folder)
        if texts:
            dataset = _texts_as_dataset(data, model, path, execution)
            if (found := rank(model, dataset, k, execution)) is not None:
                return found
        elif isinstance(data, Dataset):
            dataset = data
        else:
            dataset = _as_dataset(data, model, path / "data.xmc", execution.memory_limit)
        predict(model, dataset, path / "predictions", k, execution)
        labels, scores = Predictions(path / "predictions").rows(0, dataset.n_samples)
    return labels.astype(np.int64), scores


def _as_dataset(X: Any, model: Model, path: Path, memory_limit: str | int | None) -> Dataset:
    """A scipy matrix as a dataset without labels."""
    import scipy.sparse

    from xmc_stream.convert import convert

    refuse_other_rows(model, X)
    empty = np.zeros(0, np.float32), np.zeros(0, np.int32), np.zeros(X.shape[0] + 1, np.int32)
    none = scipy.sparse.csr_matrix(empty, shape=(X.shape[0], model.n_labels))
    return convert(X, path, labels=none, memory_limit=memory_limit)


def _texts_as_dataset(texts: Sequence[str], model: Model, folder: Path, execution: Execution) -> Dataset:
    """Texts as a dataset without labels, by the model's own vectorizer."""
    from xmc_stream.convert import convert
    from xmc_stream.convert.options import TextOptions

    with open(folder / "texts.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    options = TextOptions(text_fields=("text",), label_field="")
    return convert(
        folder / "texts.jsonl",
        folder / "data.xmc",
        like=model.path,
        text=options,
        format="jsonl",
        memory_limit=execution.memory_limit,
        threads=execution.threads,
    )


@contextmanager
def samples(data: Path, model: Model, folder: Path, execution: Execution) -> Iterator[Dataset]:
    """The dataset at `data`; anything else is converted for the model, somewhere in `folder`, while the block lasts.

    Labels need not be there, and any that are count for nothing. Raises InputError naming file and line.
    """
    from xmc_stream.convert import convert
    from xmc_stream.convert.formats.registry import formats

    if data.is_dir() and not any(module.recognises(data, b"") for module in formats().values()):
        yield open_dataset(data)
        return

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".xmc_stream-", dir=folder.absolute()) as scratch:
        yield convert(
            data,
            Path(scratch) / f"{data.name}.xmc",
            like=model.path,
            unlabelled=True,
            memory_limit=execution.memory_limit,
            threads=execution.threads,
            scheduler=execution.scheduler,
            progress=execution.progress,
        )


def predict(
    model: Model,
    dataset: Dataset,
    out: str | Path,
    k: int = 5,
    execution: Execution | None = None,
    overwrite: bool = False,
    filter: str | Path | None = None,
    check: bool = True,
) -> dict[str, Any]:
    """Write the k best classes of each sample to disk.

    By the name of `out` that is a zarr group (any other name), a .npz file of the arrays `labels` and `scores` (n x k),
    a .txt file with a line `label:score label:score ...` a sample, or a .jsonl file with an object a sample, in which
    labels have their names. Best classes come first; ties go to the lower label.

    Parameters
    ----------
    model : Model
        A trained model.
    dataset : Dataset
        The samples, with as many features as the model. Their labels are not read.
    out : str or Path
        Where the predictions are written.
    k : int, default 5
        Classes of each sample, from 1 to the number of labels.
    execution : Execution or None, default None
        Memory limit, threads, cluster. None: `Execution()`.
    overwrite : bool, default False
        Replace predictions at `out`.
    filter : str, Path or None, default None
        A file of lines `row label`, counted from zero: pairs that are not predicted. Other classes move up; -1 stands
        where fewer than k are left.
    check : bool, default True
        Compare the model with its checksums first.

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
    from xmc_stream.jobs.job import Notes

    began = time.perf_counter()
    execution = execution or Execution()
    limit = execution.limit()
    out = Path(out)
    check_k(model, k)
    as_file = out.suffix in (".npz", ".txt", ".jsonl")
    refuse_to_replace(out, overwrite, as_file)
    store = out.with_name(out.name + ".store") if as_file else out
    with writing(out, "give the same command again"), _removed_on_failure(store, out, as_file):
        with (
            stored_filter(filter, store.parent, dataset.n_samples, model.n_labels, limit) as filtered,
            planned(execution, limit, model.warm_up()) as (engine, plan),
        ):
            run = model.predicting(dataset, k, store.with_name(store.name + ".partial").absolute(), plan, filtered)
            begin_predictions(store, dataset.n_samples, model.n_labels, k)
            result = engine.run(checked(model, run.loop(), check), Notes())
            peak = engine.peak
        attributes = {"model": model.path.name, "data": dataset.path.name, "k": k}
        if filter is not None:
            attributes["filter"] = Path(filter).name
        # beside a file, a store of that name is what a killed prediction left
        finish_predictions(run.out, store, attributes, overwrite or as_file)
        if as_file:
            _export(Predictions(store), out, limit, model)
    seconds = time.perf_counter() - began
    return {
        "predictions": str(out),
        "n_samples": dataset.n_samples,
        "k": k,
        "seconds": round(seconds, 3),
        "ms_per_sample": round(1000 * seconds / max(dataset.n_samples, 1), 5),
        "peak_rss": max(peak, peak_resident()),
        "memory_limit": limit.limit,
        **result,
    }


def checked(model: Model, loop: Loop, check: bool) -> Loop:
    """A loop, behind the comparison of the model with its checksums."""
    from xmc_stream.jobs.job import Phase

    if check:
        yield Phase("check the model", model.check_jobs())
    return (yield from loop)


@contextmanager
def _removed_on_failure(store: Path, out: Path, as_file: bool) -> Iterator[None]:
    """Predictions that are not whole are of no use to the next run: they go, and free the disk."""
    try:
        yield
    except BaseException:
        shutil.rmtree(store.with_name(store.name + ".partial"), ignore_errors=True)
        if as_file:
            shutil.rmtree(store, ignore_errors=True)
            out.with_name(out.name + ".partial").unlink(missing_ok=True)
        raise


@contextmanager
def stored_filter(
    source: str | Path | None, folder: Path, n_samples: int, n_labels: int, limit: MemoryLimit
) -> Iterator[str]:
    """The pairs of a filter file as a matrix, somewhere in `folder`, while the block lasts; "" without a file."""
    if source is None:
        yield ""
        return
    from xmc_stream.convert.formats.pairs import store_pairs

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".xmc_stream-", dir=folder.absolute()) as scratch:
        target = Path(scratch) / "filter"
        store_pairs(Path(source), target, n_samples, n_labels, limit)
        yield str(target)


def _export(predictions: Predictions, out: Path, limit: MemoryLimit, model: Model) -> None:
    """Turn a store of predictions into a .npz file, or lines: `label:score` pairs, or objects with names; best first."""
    work = out.with_name(out.name + ".partial")
    if out.suffix == ".npz":
        limit.check({"labels and scores": 24 * predictions.n_samples * predictions.k}, f"writing {out.name}")
        labels, scores = predictions.rows(0, predictions.n_samples)
        with open(work, "wb") as file:
            np.savez(file, labels=labels, scores=scores)
    elif out.suffix == ".jsonl":
        names = model.label_names()
        with open(work, "w", encoding="utf-8") as text:
            for _, labels, scores in predictions.blocks():
                ids = np.unique(labels[labels >= 0]).astype(np.int64)
                called: dict[int, Any] = dict(
                    zip(ids.tolist(), names.take(ids) if names else ids.tolist(), strict=True)
                )
                for row, values in zip(labels.tolist(), scores.tolist(), strict=True):
                    n = sum(label >= 0 for label in row)  # behind them are -1
                    best = {"labels": [called[i] for i in row[:n]], "scores": [float(f"{v:.6g}") for v in values[:n]]}
                    text.write(json.dumps(best, ensure_ascii=False) + "\n")
    else:
        with open(work, "w", encoding="ascii") as text:
            for _, labels, scores in predictions.blocks():
                for row, values in zip(labels.tolist(), scores.tolist(), strict=True):
                    pairs = (f"{label}:{value:.6g}" for label, value in zip(row, values, strict=True) if label >= 0)
                    text.write(" ".join(pairs) + "\n")
    work.replace(out)
    shutil.rmtree(predictions.path)


def describe(model: Model) -> dict[str, Any]:
    """Sizes and report of a model, for `info`; run: what its event log says in sum (see `summarise_events`), and totals."""
    from xmc_stream.engine.summary import summarise_events

    n_bytes = folder_bytes(model.path)
    hidden = ("tiles", "units", "identity", KIND, LOGS, SEAL)
    shown = {name: value for name, value in model.attributes.items() if name not in hidden}
    run = {**shown.pop("run", {}), "rounds": shown.get("rounds"), **summarise_events(model.path / "events.jsonl")}
    return {**shown, "bytes_on_disk": n_bytes, "size": format_size(n_bytes), "run": run}
