"""A conversion as a whole: what is read, whether it was done before, its jobs, and what is said of it.

Parts become pieces; what all of them say is settled; pieces become the arrays of a dataset. It goes on where it was killed.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from xmc_stream import flags
from xmc_stream.convert.formats.pairs import refuse_no_pairs, store_pairs
from xmc_stream.convert.lines.files import STANDARD_INPUT, Stamps, file_identity, reading, stamps, unchanged
from xmc_stream.convert.opening import are_files, open_source
from xmc_stream.convert.options import ConvertOptions, Like, taken_over, without_labels
from xmc_stream.convert.pieces import DamagedPieceError, Piece, new_piece, work_folder
from xmc_stream.convert.plan import ConversionPlan, plan_memory, plan_writing, refuse_unless_it_fits
from xmc_stream.convert.source import Part, PartRead, Settled, Source
from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.runtime.engine import Engine, limit_of
from xmc_stream.runtime.job import Loop, Phase, Receipt, run_here
from xmc_stream.runtime.ledger import Ledger
from xmc_stream.runtime.making import MARK, digest_of, made_before, make, refuse_all, stands
from xmc_stream.runtime.warmup import loading
from xmc_stream.store import new_dataset as assembly
from xmc_stream.store.dataset import Dataset, open_dataset, write_observed
from xmc_stream.store.encoding import finish_matrix, folder_bytes
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.store.model import StoredModel
from xmc_stream.store.names import copy_names
from xmc_stream.store.places import fsync_folder
from xmc_stream.store.remote import as_path
from xmc_stream.system.files import regular, temporary_folder
from xmc_stream.system.memory import MemoryLimit, available_threads, format_size, peak_resident
from xmc_stream.system.progress import current

_VERSION = 1  # of the work folder of a conversion
_READ, _SETTLED, _LABELS, _WRITTEN = 0.6, 0.7, 0.75, 0.95  # of a conversion: where each step ends
_COMPILING = 5.0  # seconds
_SMALL = 2**25  # bytes of input below which one thread does all


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
    """What is said of the conversion, which may have been done before: sizes, said, resumed and peak_rss.

    Bad input leaves nothing behind.
    """
    observed = None if options.observed is None else Path(options.observed)
    identity = {
        "version": _VERSION, "source": opened.identity, "options": options.identity(),
        "format": opened.attributes["source_format"], "normalize": options.normalize, "columns": options.columns,
        "like": None if like is None else [str(asdict(like)), file_identity(like.path / "zarr.json")],
        "observed": None if observed is None else file_identity(observed),
    }  # fmt: skip
    done = made_before(target, identity) or (None if options.overwrite else _finished(target, identity))
    if done is not None:
        _store_observed(observed, target, limit)  # which somebody may have removed
        return {**done, "peak_rss": peak_resident()}
    refuse = partial(assembly.check_target, overwrite=options.overwrite)
    refuse_all([target], refuse)
    if observed is not None:  # it is stored when all else is done
        refuse_no_pairs(observed)
    before = {**stamps(opened.files), **before}  # some were found beside others
    with running(opened, limit, options.threads, options.scheduler) as (engine, plan):
        refuse_unless_it_fits(opened, limit, plan, fewer=options.scheduler is None)
        # of what is read once, nothing tells whether it was the same
        mark = {} if opened.alone else {MARK: digest_of(identity)}

        def convert(work: Path, ledger: Ledger) -> Receipt:
            run = ConversionRun(opened, work, options, like, plan, mark)
            with unchanged(before):
                for job in run.part_jobs if engine and opened.alone else ():  # which workers cannot read
                    ledger.add(job.key, job.run())
                said = run_here(run.loop(), ledger, current()) if engine is None else engine.run(run.loop(), ledger)
            _store_observed(observed, run.store, limit)
            return said

        done = make(target, identity, convert, refuse, (InputError, DamagedPieceError), opened.alone)
        return {**done, "peak_rss": max(peak_resident(), engine.peak if engine else 0)}


def _store_observed(observed: Path | None, target: Path, limit: MemoryLimit) -> None:
    """Store a file of pairs as the mask of a dataset that has none."""
    if observed is None or (target / "observed").exists():
        return
    dataset = Dataset(target)
    with temporary_folder(target.absolute().parent) as scratch:
        store_pairs(observed, scratch / "pairs", dataset.n_samples, dataset.n_labels, limit)
        write_observed(dataset, SparseMatrix(scratch / "pairs").blocks(2**22))


def _finished(target: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """What is said of a dataset that came of the same conversion."""
    if not stands(target, identity):
        return None
    said = f"{Dataset(target).attributes['source_format']}, converted before from the same input"
    return {"said": said, "resumed": True, "bytes_read": 0}


def threads_for(source: Source, threads: int | None) -> int:
    """Threads that a conversion in this process uses at most; None for all processors."""
    return 1 if source.bytes_in < _SMALL else threads or available_threads()


@contextmanager
def running(
    source: Source, limit: MemoryLimit, threads: int | None, scheduler: Any
) -> Iterator[tuple[Engine | None, ConversionPlan]]:
    """The engine that runs the jobs, None where this thread does, and the memory plan when all code is loaded."""
    load = LoadJob(source)
    if scheduler is not None:
        with Engine(limit, threads or 1, scheduler) as engine:
            if source.alone:
                load.run()
            budget = limit.budget(engine.warm(load))
            yield engine, plan_memory(source, budget, engine.threads, fewer=False)
        return
    with loading(f"convert {type(source).__name__}", _COMPILING):
        load.run()
    threads = threads_for(source, threads)
    plan = plan_memory(source, limit.budget(), threads)
    if threads == 1:
        yield None, plan
    else:
        with Engine(limit, plan.threads) as engine:
            yield engine, plan


class ConversionRun:
    """The jobs of a conversion into `work`, which holds the finished dataset as `store` at the end.

    like: what was taken over, whatever `options` names; plan: bytes and jobs at a time; mark: an attribute for the dataset.
    """

    def __init__(
        self, source: Source, work: Path, options: ConvertOptions, like: Like | None, plan: ConversionPlan,
        mark: Mapping[str, str],
    ) -> None:  # fmt: skip
        self._source = source
        self._work = work
        self.store = work / "store"
        self._options = options
        self._like = like
        self._plan = plan
        self._mark = mark
        self.part_jobs = [PartJob(i, part, str(work / "pieces")) for i, part in enumerate(source.parts())]

    def loop(self) -> Loop:
        """Yields the phases, is sent their receipts; returns sizes, attributes and `said`."""
        receipts = yield Phase("read", self.part_jobs, "reading the input", (0.0, _READ), twice=True)
        read = [
            PartRead({side: Piece.of(piece) for side, piece in receipt["pieces"].items()}, receipt["notes"])
            for receipt in receipts
        ]
        with current().part(_READ, _SETTLED):
            settled = yield from self._source.settle(self._work, read)
        sizes = _sizes(settled)
        asked = self._options.normalize or (self._like.normalize if self._like else settled.normalize)
        normalize = asked or "none"
        max_bytes = self._room_to_write(settled, sizes)
        assembly.begin(self.store)
        labels = Phase("write labels", [], "writing the labels", (_SETTLED, _LABELS))
        yield from self._rows("Y", settled, normalize, labels)
        turn = ColumnsJob(str(self.store), "Y", max_bytes)
        yield from self._rows(
            "X", settled, normalize, Phase("write", [turn], "writing the features", (_LABELS, _WRITTEN))
        )
        if self._options.columns:
            turn = ColumnsJob(str(self.store), "X", max_bytes)
            yield Phase("write columns", [turn], "writing the features by columns", (_WRITTEN, 1.0))
        for name, folder in settled.folders.items():
            if folder.exists():  # else a run that was killed has moved it
                shutil.rmtree(self.store / name, ignore_errors=True)  # or moved it, and it was made anew
                (self.store / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.move(folder, self.store / name)
        self._keep_names(settled)
        attributes = {**self._source.attributes, **settled.attributes, "normalize": normalize, **self._mark}
        if self._like:
            attributes["like"] = Path(self._like.name).name
        assembly.finish(self.store, {**sizes, **attributes})
        return {**sizes, "said": settled.said, "bytes_read": sum(receipt["bytes_read"] for receipt in receipts)}

    def _room_to_write(self, settled: Settled, sizes: Mapping[str, int]) -> int:
        """Bytes for turning a matrix. Raises MemoryLimitError where writing the dataset takes more than there is."""
        plan = plan_writing(
            self._plan.budget,
            self._plan.threads,
            settled.n_features,
            settled.n_labels,
            sizes["nnz_features"],
            sizes["nnz_labels"],
            4 * max((piece.longest for piece in settled.x), default=0),
            self._options.columns,
        )
        if plan.need > self._plan.budget:
            needs = ", ".join(f"{name} {format_size(size)}" for name, size in plan.needs.items())
            raise MemoryLimitError(
                f"the dataset needs {format_size(plan.need)} ({needs}) and the memory limit leaves "
                f"{format_size(self._plan.budget)}: raise "
                + flags.MEMORY_LIMIT
                + " and give the same command, it goes on"
            )
        return plan.max_bytes

    def _keep_names(self, settled: Settled) -> None:
        """Copy names of the training set that the source has not."""
        if not self._like or not self._like.names:
            return
        sizes = {"features": settled.n_features, "labels": settled.n_labels}
        kept = sizes if self._like.labels else ("features",)
        for kind in {name for name in kept if f"names/{name}" not in settled.folders}:
            copy_names(self._like.path, self.store, kind, sizes[kind])

    def _rows(
        self, side: assembly.Side, settled: Settled, normalize: str, phase: Phase
    ) -> Generator[Phase, list[Receipt], None]:
        """Write X or Y by rows, an array a job, in a phase that may have other jobs too."""
        pieces, base, bound = (
            (settled.x, settled.x_base, settled.n_features)
            if side == "X"
            else (settled.y, settled.y_base, settled.n_labels)
        )
        names = ("data", "indices", "lengths") if side == "X" else ("indices", "lengths")
        jobs = [ArrayJob(str(self.store), side, name, tuple(pieces), base, bound, normalize) for name in names]
        receipts = yield replace(phase, jobs=[*jobs, *phase.jobs])
        hashes = [receipt["sha256"] for receipt in receipts[: len(jobs)]]
        shape, nnz = (sum(piece.n_rows for piece in pieces), bound), sum(piece.nnz for piece in pieces)
        finish_matrix(self.store / side / "rows", "csr_matrix", shape, nnz, hashes[::-1])


def _sizes(settled: Settled) -> dict[str, int]:
    """Of the dataset. Raises InputError where X and Y have not as many rows, or no row is sound."""
    sizes = {
        "n_samples": sum(piece.n_rows for piece in settled.x),
        "n_features": settled.n_features,
        "n_labels": settled.n_labels,
        "nnz_features": sum(piece.nnz for piece in settled.x),
        "nnz_labels": sum(piece.nnz for piece in settled.y),
    }
    if sizes["n_samples"] != (n_rows := sum(piece.n_rows for piece in settled.y)):
        raise InputError(
            f"there are {sizes['n_samples']} rows of features and {n_rows} of labels: they must be as many"
        )
    if not sizes["n_samples"] and settled.attributes.get("skipped"):
        file, line, reason = settled.attributes["skipped_rows"][0]
        raise InputError(f"{file}:{line}: {reason}; and no other row is sound: correct them")
    return sizes


@dataclass(frozen=True)
class PartJob:
    """Part `number` of a source to pieces below `folder`."""

    number: int
    part: Part
    folder: str

    @property
    def key(self) -> str:
        return f"read/{self.number:05d}"

    def run(self) -> Receipt:
        """Read the part."""
        own, *folders = (Path(self.folder) / f"{self.number:05d}-{what}" for what in ("own", *self.part.sides))
        with ExitStack() as stack:
            notes: dict[str, Any] = {"folder": str(stack.enter_context(work_folder(own, durable=False)))}
            writers = [
                stack.enter_context(new_piece(folder, side == "X"))
                for folder, side in zip(folders, self.part.sides, strict=True)
            ]
            for block in self.part.blocks(notes):
                for writer, rows in zip(writers, block, strict=True):
                    writer.append(*rows)
        pieces = {side: writer.piece().receipt() for side, writer in zip(self.part.sides, writers, strict=True)}
        notes["folder"] = str(own)
        if any(own.iterdir()):  # they are durable, and now have this name
            fsync_folder(own.parent)
        return {"pieces": pieces, "notes": notes, "bytes_read": notes.get("bytes_read", 0)}


@dataclass(frozen=True)
class ArrayJob:
    """An array of X or Y by rows, from its pieces. array: "lengths", "indices" or "data"; bound: D or K."""

    path: str
    side: assembly.Side
    array: str
    pieces: tuple[Piece, ...]
    base: int
    bound: int
    normalize: str

    @property
    def key(self) -> str:
        return f"write/{self.side}/{self.array}"

    def run(self) -> Receipt:
        """Write the array. Raises InputError where an index is out of range."""
        path = Path(self.path)
        if self.array == "lengths":
            return assembly.write_lengths(path, self.side, self._all(Piece.lengths))
        if self.array == "indices":
            return assembly.write_indices(path, self.side, self._all(Piece.indices), self.base, self.bound)
        return assembly.write_values(path, self._all(Piece.values), self.normalize)

    def _all(self, read: Callable[[Piece], Iterator[Any]]) -> Iterator[Any]:
        for piece in self.pieces:
            yield from read(piece)


@dataclass(frozen=True)
class ColumnsJob:
    """X or Y by columns, from rows that are finished, in buffers of max_bytes."""

    path: str
    side: assembly.Side
    max_bytes: int

    @property
    def key(self) -> str:
        return f"write/{self.side}/columns"

    def run(self) -> Receipt:
        """Transpose."""
        assembly.make_columns(Path(self.path), self.side, self.max_bytes)
        return {}


@dataclass(frozen=True)
class LoadJob:
    """Loads what the other jobs call: some 70 MB of compiled code, to be there before the plan counts what is left.

    source: whose own kernels are loaded too; where its parts are read elsewhere, they are not.
    """

    source: Source

    @property
    def key(self) -> str:
        """Never in a ledger."""
        return "load"

    def run(self) -> Receipt:
        """Compile or load."""
        assembly.load_kernels(*(n or 0 for n in (self.source.n_samples, self.source.n_features, self.source.n_labels)))
        self.source.load_kernels()
        return {}
