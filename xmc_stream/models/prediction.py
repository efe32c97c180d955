"""Predicting with a model of any kind: in memory, to stores, and to files: a .npz of arrays, or lines of text."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import InputError
from xmc_stream.models.execution import Execution, advising, behind, planned
from xmc_stream.models.held import check_k, rank, refuse_other_rows
from xmc_stream.models.samples import are_texts, asked, converted, normalised, samples
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.inventory import SEAL
from xmc_stream.store.names import ROW_IDS, WINDOW, Names
from xmc_stream.store.places import copy_folders, put_back, refuse_foreign_names, target_path
from xmc_stream.store.predictions import Predictions, begin_predictions, finish_predictions, refuse_to_replace
from xmc_stream.system.files import temporary_folder
from xmc_stream.system.memory import MemoryLimit, peak_resident
from xmc_stream.system.progress import LOG, working

STANDARD_OUTPUT = Path("-")
FILES = (".npz", ".txt", ".jsonl")
# of files of data that nothing here writes: a folder or a text of such a name would mislead
_OTHERS = frozenset(
    ".arff .arrow .avro .bin .bz2 .csv .dat .db .feather .gz .h5 .h5ad .hdf5 .html .ipc .joblib .json .libsvm .mat .md .mtx "
    ".ndjson .npy .ods .orc .parquet .pb .pkl .pickle .pq .pt .safetensors .sqlite .svm .tar .tsv .xls .xlsx .xml .xz .yaml "
    ".yml .zip .zst".split()
)
_ESCAPES = str.maketrans({"\\": r"\\", "\t": r"\t", "\n": r"\n", "\r": r"\r"})
_COMMAND = "predict"
_CHECKED = 0.05  # of a prediction, that comparing the model with its checksums takes

if TYPE_CHECKING:
    from xmc_stream.models.model import Model
    from xmc_stream.models.runs import Wanted
    from xmc_stream.runtime.job import Receipt
    from xmc_stream.runtime.ledger import Ledger
    from xmc_stream.runtime.plan import Needs


def predict_topk(
    model: Model, data: Any, k: int, execution: Execution | None
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The k best classes of each sample, in memory: see `Model.predict_topk`."""
    from xmc_stream.runtime.check import checked_reading

    execution = execution or Execution()
    if isinstance(data, str | Path):
        raise InputError(
            f"got {str(data)[:40]!r}: give texts as a list, also a single one, and a dataset by open_dataset(path)"
        )
    data = asked(data, execution)
    texts = are_texts(data)
    if not texts and not isinstance(data, Dataset):
        refuse_other_rows(model, data)
        data = normalised(model, data, execution)
    with checked_reading(data.path) if isinstance(data, Dataset) else nullcontext():
        found = rank(model, data, k, execution)
    if found is not None:
        return found
    with temporary_folder() as path, advising(path, "predict to a file"):
        dataset = data if isinstance(data, Dataset) else converted(data, model, path, execution)
        if texts and (found := rank(model, dataset, k, execution)) is not None:
            return found
        predict_to(model, dataset, path / "predictions", k, execution)
        labels, scores = Predictions(path / "predictions").rows(0, dataset.n_samples)
    return labels.astype(np.int64), scores


def predict_with(
    model: Model, data: Any, out: str | Path, k: int, execution: Execution, overwrite: bool = False,
    filter: str | Path | None = None, check: bool = True, **reading: Any,
) -> dict[str, Any]:  # fmt: skip
    """Write the k best classes of each sample of any data to disk: see `xmc_stream.predict`.

    reading: options of `convert` that say how a file of samples is read, see `samples`.
    """
    out = STANDARD_OUTPUT if str(out) == str(STANDARD_OUTPUT) else target_path(out)
    check_target(model, out, k, overwrite)
    folder = execution.scratch(model.path) if out == STANDARD_OUTPUT else out.absolute().parent
    with working("predict", execution.progress), samples(data, model, folder, execution, **reading) as dataset:
        return predict_to(model, dataset, out, k, execution, overwrite, filter, check)


def predict_to(
    model: Model,
    dataset: Dataset,
    out: Path,
    k: int,
    execution: Execution,
    overwrite: bool = False,
    filter: str | Path | None = None,
    check: bool = True,
) -> dict[str, Any]:
    """Write the k best classes of each sample of a dataset to disk: see `xmc_stream.predict`."""
    from xmc_stream.convert.lines.files import file_identity
    from xmc_stream.models.runs import Wanted
    from xmc_stream.runtime.check import checked_reading
    from xmc_stream.runtime.making import COMMAND, STORE, make

    began = time.perf_counter()
    as_file = check_target(model, out, k, overwrite)
    if out == STANDARD_OUTPUT:
        shared = execution.scratch(model.path, dataset.path)
        with temporary_folder(shared) as folder:
            report = predict_to(model, dataset, folder / "predictions", k, execution, False, filter, check)
            write_standard_output(Predictions(folder / "predictions"), model.label_names())
        return {**report, "predictions": str(out), "seconds": round(time.perf_counter() - began, 3)}
    out = target_path(out)
    limit = execution.limit([model.path, dataset.path], [out.parent])
    peak = 0

    def run(folder: Path, ledger: Ledger) -> Receipt:
        nonlocal peak
        store = folder / ("predictions" if as_file else STORE)
        with stored_filter(filter, folder, dataset.n_samples, model.n_labels, limit) as filtered:
            beside = file_needs(out, dataset, k)
            work, result, peak = answer(model, dataset, k, Wanted(store, filtered), execution, limit, check, beside)
        attributes = {"model": model.path.name, "data": dataset.path.name, "k": k, **model.searched}
        if filter is not None:
            attributes["filter"] = Path(filter).name
        if dataset.row_ids() is not None:
            copy_folders(dataset.path, work, (ROW_IDS,))
        finish_predictions(work, store, attributes, False)
        if as_file:
            write_file(Predictions(store), folder / STORE, out.suffix.lower(), model.label_names())
        return result

    identity = {
        COMMAND: _COMMAND, "model": model.attributes.get(SEAL), "data": dataset.attributes.get(SEAL), "k": k,
        "filter": None if filter is None else file_identity(Path(filter)), "as": out.suffix, **model.searched,
    }  # fmt: skip
    with working("predict", execution.progress), checked_reading(dataset.path, check=check):
        result = make(out, identity, run, lambda path: refuse_to_replace(path, overwrite, as_file), anew=True)
    seconds = time.perf_counter() - began
    return {
        "predictions": str(out),
        "n_samples": dataset.n_samples,
        "k": k,
        "seconds": round(seconds, 3),
        "ms_per_sample": round(1000 * seconds / max(dataset.n_samples, 1), 5),
        "peak_rss": max(peak, peak_resident()),
        "memory_limit": limit.limit,
        **{name: value for name, value in result.items() if name != "resumed"},
    }


def answer(
    model: Model, dataset: Dataset, k: int, wanted: Wanted, execution: Execution, limit: MemoryLimit, check: bool,
    beside: Mapping[str, Needs],
) -> tuple[Path, Receipt, int]:  # fmt: skip
    """Predictions that are finished but for attributes and name: where they lie, what the jobs say, most bytes resident.

    wanted: where `out` is the path that they will have. check: whether the model is compared with its checksums first.
    beside: what the work after it needs, see `Together`.
    """
    from xmc_stream.runtime.job import Notes
    from xmc_stream.runtime.plan import Together, refuse_unless_it_fits

    evaluate = wanted.folder is not None
    with planned(execution, limit, model.warm_up(evaluate)) as (engine, plan):
        task = model.ranking(dataset, k, bool(wanted.filtered), evaluate, engine.once)
        refuse_unless_it_fits(Together(task, beside), plan)
        if task.unscored:
            LOG.info("note: average_auc is left out: %s", task.unscored)
        work = begin_predictions(wanted.out, dataset.n_samples, model.n_labels, k)
        loop = task.loop(plan, replace(wanted, out=work))
        if check:
            words = "comparing the model with its checksums"
            loop = behind("check the model", model.check_jobs(), words, _CHECKED, loop)
        return work, engine.run(loop, Notes()), engine.peak


def check_target(model: Model, out: Path, k: int, overwrite: bool) -> bool:
    """Whether k labels go to a file, and not to a store. Raises InputError where they cannot go there, before any work."""
    as_file = is_file(out)
    check_k(model, k)
    if out != STANDARD_OUTPUT:
        from xmc_stream.runtime.making import all_but_named, refuse_all

        refuse_foreign_names(out)
        put_back(out)
        if not all_but_named(out):
            refuse_all([out], lambda path: refuse_to_replace(path, overwrite, as_file), _COMMAND)
    return as_file


@contextmanager
def stored_filter(
    source: str | Path | None, folder: Path, n_samples: int, n_labels: int, limit: MemoryLimit
) -> Iterator[str]:
    """The pairs of a filter file as a matrix, somewhere in `folder`, while the block lasts; "" without a file."""
    if source is None:
        yield ""
        return
    from xmc_stream.convert.formats.pairs import store_pairs

    with temporary_folder(folder) as scratch:
        target = scratch / "filter"
        store_pairs(Path(source), target, n_samples, n_labels, limit)
        yield str(target)


def is_file(out: Path) -> bool:
    """Whether predictions of this name go to a file, and not to a store. Raises InputError for a file of another kind."""
    if out.suffix.lower() in _OTHERS:
        raise InputError(
            f"{out}: no {out.suffix} is written: predictions go to a name that ends in {', '.join(FILES)}, or to a folder of "
            "any other name"
        )
    return out.suffix.lower() in FILES


def file_needs(out: Path, dataset: Dataset, k: int) -> dict[str, Needs]:
    """What writing predictions of some samples as a file of that name needs, see `Together`."""
    if out.suffix.lower() != ".npz":
        return {}
    n, longest = dataset.n_samples, _longest(dataset.row_ids())
    return {f"writing {out.name}": lambda _: {"labels and scores": 24 * n * k, "ids of rows": 4 * n * longest}}


def _longest(ids: Names | None) -> int:
    return max((len(name) for window in ids.windows() for name in window), default=0) if ids else 0


def write_file(predictions: Predictions, out: Path, kind: str, names: Names | None) -> None:
    """Write predictions to a file. kind: one of FILES; names: of labels."""
    if kind == ".npz":
        _write_arrays(predictions, out)
    else:
        with open(out, "wb") as file:
            file.writelines(_objects(predictions, names) if kind == ".jsonl" else _lines(predictions))


def write_standard_output(predictions: Predictions, names: Names | None) -> None:
    """Write an object a row, as to a .jsonl file."""
    sys.stdout.buffer.writelines(_objects(predictions, names))
    sys.stdout.buffer.flush()


def _write_arrays(predictions: Predictions, out: Path) -> None:
    n, ids = predictions.n_samples, predictions.row_ids()
    labels, scores = predictions.rows(0, n)
    arrays: dict[str, Any] = {"labels": labels, "scores": scores}
    if ids is not None:
        arrays["ids"] = np.empty(n, f"U{max(_longest(ids), 1)}")
        for start in range(0, n, WINDOW):
            arrays["ids"][start : start + WINDOW] = ids.read(start, min(start + WINDOW, n))
    with open(out, "wb") as file:
        np.savez(file, **arrays)


def _blocks(predictions: Predictions) -> Iterator[tuple[Any, Any, list[str] | None]]:
    """Labels, scores and ids of some rows at a time."""
    ids = predictions.row_ids()
    for start, labels, scores in predictions.blocks():
        yield labels, scores, None if ids is None else ids.read(start, start + len(labels))


def _objects(predictions: Predictions, names: Names | None) -> Iterator[bytes]:
    """{"id": ..., "labels": [...], "scores": [...]} of each row; labels by their names, if they have any."""
    for labels, scores, ids in _blocks(predictions):
        found = np.unique(labels[labels >= 0]).astype(np.int64)
        called: dict[int, Any] = dict(zip(found.tolist(), names.take(found) if names else found.tolist(), strict=True))
        for row, values, name in zip(labels.tolist(), scores.tolist(), ids or repeat(None), strict=False):
            n = sum(label >= 0 for label in row)  # behind them are -1
            best = {"labels": [called[i] for i in row[:n]], "scores": [float(f"{v:.6g}") for v in values[:n]]}
            yield (json.dumps({"id": name, **best} if ids else best, ensure_ascii=False) + "\n").encode()


def _lines(predictions: Predictions) -> Iterator[bytes]:
    """`label:score label:score ...` of each row, behind `id TAB` if rows have ids."""
    for labels, scores, ids in _blocks(predictions):
        for row, values, name in zip(labels.tolist(), scores.tolist(), ids or repeat(None), strict=False):
            pairs = (f"{label}:{value:.6g}" for label, value in zip(row, values, strict=True) if label >= 0)
            before = "" if name is None else name.translate(_ESCAPES) + "\t"
            yield (before + " ".join(pairs) + "\n").encode()
