"""One conversion: parts to pieces, what all of them say, pieces to a dataset; it goes on where it was killed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmc_stream import flags
from xmc_stream.convert.jobs import ArrayJob, ColumnsJob, LoadJob, PartJob
from xmc_stream.convert.lines.files import Stamps, unchanged
from xmc_stream.convert.options import ConvertOptions, Like
from xmc_stream.convert.pieces import DamagedPieceError, Piece
from xmc_stream.convert.plan import ConversionPlan, plan_memory, plan_writing
from xmc_stream.convert.source import PartRead, Settled, Source
from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.runtime.job import Job, Loop, Phase, Receipt, run_here
from xmc_stream.runtime.ledger import Ledger
from xmc_stream.runtime.making import MARK, digest_of, make
from xmc_stream.runtime.warmup import loading
from xmc_stream.store import new_dataset as assembly
from xmc_stream.store.encoding import finish_matrix
from xmc_stream.store.names import copy_names
from xmc_stream.store.new_dataset import check_target
from xmc_stream.system.memory import MemoryLimit, available_threads, format_size
from xmc_stream.system.progress import current

if TYPE_CHECKING:
    from xmc_stream.runtime.engine import Engine

_READ, _SETTLED, _LABELS, _WRITTEN = 0.6, 0.7, 0.75, 0.95  # of a conversion: where each step ends
_COMPILING = 5.0  # seconds
_SMALL = 2**25  # bytes of input below which one thread does all


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
        labels = yield Phase(
            "write labels", self._arrays("Y", settled, normalize), "writing the labels", (_SETTLED, _LABELS)
        )
        self._finish("Y", sizes, labels)
        jobs: list[Job] = [*self._arrays("X", settled, normalize), ColumnsJob(str(self.store), "Y", max_bytes)]
        features = yield Phase("write", jobs, "writing the features", (_LABELS, _WRITTEN))
        self._finish("X", sizes, features[:3])
        if self._options.columns:
            columns: list[Job] = [ColumnsJob(str(self.store), "X", max_bytes)]
            yield Phase("write columns", columns, "writing the features by columns", (_WRITTEN, 1.0))
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

    def _arrays(self, side: assembly.Side, settled: Settled, normalize: str) -> list[ArrayJob]:
        pieces, base, bound = (
            (settled.x, settled.x_base, settled.n_features)
            if side == "X"
            else (settled.y, settled.y_base, settled.n_labels)
        )
        job = ArrayJob(str(self.store), side, "data", tuple(pieces), base, bound, normalize)
        names = ("data", "indices", "lengths") if side == "X" else ("indices", "lengths")
        return [replace(job, array=name) for name in names]

    def _finish(self, side: assembly.Side, sizes: Mapping[str, int], receipts: list[dict[str, Any]]) -> None:
        """receipts: of data (X alone), indices and lengths."""
        bound, nnz = (
            (sizes["n_features"], sizes["nnz_features"]) if side == "X" else (sizes["n_labels"], sizes["nnz_labels"])
        )
        hashes = [receipt["sha256"] for receipt in (receipts[-1], receipts[-2], *receipts[:-2])]
        finish_matrix(self.store / side / "rows", "csr_matrix", (sizes["n_samples"], bound), nnz, hashes)


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


def threads_for(source: Source, threads: int | None) -> int:
    """Threads that a conversion in this process uses at most; None for all processors."""
    return 1 if source.bytes_in < _SMALL else threads or available_threads()


@contextmanager
def running(
    source: Source, limit: MemoryLimit, threads: int | None, scheduler: Any
) -> Iterator[tuple[Engine | None, ConversionPlan]]:
    """The engine that runs the jobs, None where this thread does, and the memory plan when all code is loaded."""
    load = LoadJob(source)
    if scheduler is None:
        threads = threads_for(source, threads)
        if threads > 1:
            from xmc_stream.runtime.engine import Engine
        with loading(f"convert {type(source).__name__}", _COMPILING):
            load.run()
        plan = plan_memory(source, limit.budget(), threads)
        if threads == 1:
            yield None, plan
        else:
            with Engine(limit, plan.threads) as engine:
                yield engine, plan
    else:
        from xmc_stream.runtime.engine import Engine

        with Engine(limit, threads or 1, scheduler) as engine:
            if source.alone:
                load.run()
            budget = limit.budget(engine.warm(load))
            yield engine, plan_memory(source, budget, engine.threads, fewer=False)


def run_conversion(
    source: Source, target: Path, options: ConvertOptions, like: Like | None, identity: Mapping[str, Any],
    runs: tuple[Engine | None, ConversionPlan], before: Stamps, finish: Callable[[Path], None],
) -> dict[str, Any]:  # fmt: skip
    """Convert, from where a killed run was; returns sizes, said, resumed. Bad input leaves nothing behind.

    runs: what `running` gave; before: of the files that are read, from before they were opened; finish: is called with the
    dataset, whole but for its name.
    """
    engine, plan = runs
    # of what is read once, nothing tells whether it was the same
    mark = {} if source.alone else {MARK: digest_of(identity)}

    def refuse(path: Path) -> None:
        check_target(path, options.overwrite)

    def convert(work: Path, ledger: Ledger) -> Receipt:
        run = ConversionRun(source, work, options, like, plan, mark)
        with unchanged(before):
            for job in run.part_jobs if engine and source.alone else ():  # which workers cannot read
                ledger.add(job.key, job.run())
            done = run_here(run.loop(), ledger, current()) if engine is None else engine.run(run.loop(), ledger)
        finish(run.store)
        return done

    return make(target, identity, convert, refuse, (InputError, DamagedPieceError), source.alone)
