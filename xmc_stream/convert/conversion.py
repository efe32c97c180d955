"""A conversion from its options to its report: what is read, whether it was done before, the run, what is said of it."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmc_stream.convert.formats.pairs import refuse_no_pairs, store_pairs
from xmc_stream.convert.lines.files import STANDARD_INPUT, Stamps, file_identity, stamps
from xmc_stream.convert.matrices.arrays import reading
from xmc_stream.convert.opening import are_files, open_source, taken_over, without_labels
from xmc_stream.convert.plan import refuse_unless_it_fits
from xmc_stream.convert.run import run_conversion, running
from xmc_stream.errors import InputError
from xmc_stream.runtime.engine import limit_of
from xmc_stream.runtime.making import made_before, refuse_all, stands
from xmc_stream.store.dataset import Dataset, open_dataset, write_observed
from xmc_stream.store.encoding import folder_bytes
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.store.model import StoredModel
from xmc_stream.store.new_dataset import check_target
from xmc_stream.store.remote import as_path
from xmc_stream.system.files import regular, temporary_folder
from xmc_stream.system.memory import MemoryLimit, peak_resident

if TYPE_CHECKING:
    from xmc_stream.convert.options import ConvertOptions, Like
    from xmc_stream.convert.source import Source

_VERSION = 1  # of the work folder of a conversion


def converted(source: Any, target: Path, options: ConvertOptions) -> tuple[Dataset, dict[str, Any]]:
    """See `xmc_stream.convert.convert_report`."""
    begin = time.perf_counter()
    if isinstance(options.like, str | Path):
        options = replace(options, like=as_path(options.like))
    given = [options.beside, options.label_names, options.feature_names]
    given += [source, options.labels] if are_files(source, options.labels) else []
    named = [path for some in given for path in (some if isinstance(some, list | tuple) else [some])]
    # of folders the source tells what it reads
    before = stamps(Path(path) for path in named if isinstance(path, str | Path) and Path(path).is_file())
    named.append(options.like.path if isinstance(options.like, Dataset | StoredModel) else options.like)
    for path in (options.label_names, options.feature_names, options.observed):  # which are read last
        if path is not None:
            with reading(path):
                os.close(regular(path))
    reads = [path for path in named if isinstance(path, str | Path) and Path(path).exists()]  # not of pipes
    limit = limit_of(options.memory_limit, options.scheduler, reads, [target.absolute().parent])
    if target == STANDARD_INPUT:
        raise InputError("a dataset is a folder and cannot go to standard output: name it")
    like = None if options.like is None else replace(taken_over(options.like), names=not options.unlabelled)
    if options.new_labels:
        like = without_labels(like, vars(options))
    opened = open_source(source, options, like)
    try:
        done = _done(opened, target, options, like, before, limit)
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
        "peak_rss": done["peak_rss"],
        "said": done["said"],
        "resumed": done["resumed"],
    }


def _done(
    opened: Source, target: Path, options: ConvertOptions, like: Like | None, before: Stamps, limit: MemoryLimit
) -> dict[str, Any]:
    """What is said of the conversion, which may have been done before: sizes, said, resumed and peak_rss."""
    observed = None if options.observed is None else Path(options.observed)

    def mask(store: Path) -> None:
        if observed is not None and not (store / "observed").exists():
            _store_observed(observed, Dataset(store), limit)

    identity = {
        "version": _VERSION, "source": opened.identity, "options": options.identity(),
        "format": opened.attributes["source_format"], "normalize": options.normalize, "columns": options.columns,
        "like": None if like is None else [str(asdict(like)), file_identity(like.path / "zarr.json")],
        "observed": None if observed is None else file_identity(observed),
    }  # fmt: skip
    done = made_before(target, identity) or (None if options.overwrite else _finished(target, identity))
    if done is not None:
        mask(target)  # which somebody may have removed
        return {**done, "peak_rss": peak_resident()}
    refuse_all([target], lambda path: check_target(path, options.overwrite))
    if observed is not None:  # it is stored when all else is done
        refuse_no_pairs(observed)
    before = {**stamps(opened.files), **before}  # some were found beside others
    with running(opened, limit, options.threads, options.scheduler) as (engine, plan):
        refuse_unless_it_fits(opened, limit, plan, fewer=options.scheduler is None)
        done = run_conversion(opened, target, options, like, identity, (engine, plan), before, mask)
        return {**done, "peak_rss": max(peak_resident(), engine.peak if engine else 0)}


def _store_observed(source: Path, dataset: Dataset, limit: MemoryLimit) -> None:
    """Store a file of pairs as the mask of a dataset."""
    with temporary_folder(dataset.path.absolute().parent) as scratch:
        store_pairs(source, scratch / "pairs", dataset.n_samples, dataset.n_labels, limit)
        write_observed(dataset, SparseMatrix(scratch / "pairs").blocks(2**22))


def _finished(target: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """What is said of a dataset that came of the same conversion."""
    if not stands(target, identity):
        return None
    said = f"{Dataset(target).attributes['source_format']}, converted before from the same input"
    return {"said": said, "resumed": True, "bytes_read": 0}
