"""A dataset that grows: new rows, and new labels, below those of an older one, whose files are shared and not written again.

`append` looks whether the sets fit (`_refuse_unfit`), plans, and runs the phases of `_Sets`, whose jobs are in `append_jobs`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xmc_stream import flags
from xmc_stream.arguments import native_arguments
from xmc_stream.convert.conversion import ColumnsJob
from xmc_stream.convert.plan import plan_writing
from xmc_stream.datasets.append_jobs import (
    BLOCK_BYTES,
    ArrayJob,
    CountsJob,
    LabelsJob,
    MatchJob,
    NamesJob,
    ObservedJob,
)
from xmc_stream.errors import InputError
from xmc_stream.models import Execution, planned
from xmc_stream.runtime.check import checked_reading
from xmc_stream.runtime.job import Job, Loop, Phase, Receipt
from xmc_stream.runtime.making import COMMAND, MARK, digest_of, made_before, make, refuse_all, stands
from xmc_stream.runtime.plan import MemoryPlan
from xmc_stream.runtime.warmup import loading
from xmc_stream.store import new_dataset as assembly
from xmc_stream.store.dataset import FORMAT, SIZES, VERSION, Dataset, as_dataset, open_dataset
from xmc_stream.store.encoding import COPY_BYTES, finish_matrix, folder_bytes, index_dtype
from xmc_stream.store.inventory import SEAL, refuse_broken_seal
from xmc_stream.store.names import (
    ROW_IDS,
    SELECTED,
    WRITER_BYTES,
    NamedIds,
    first_difference,
    open_vectorizer,
    selected_of,
)
from xmc_stream.store.new_dataset import check_target, load_kernels
from xmc_stream.store.nodes import attributes_of, understood
from xmc_stream.store.places import copy_folders, target_path
from xmc_stream.store.remote import link_or_copy
from xmc_stream.system.memory import available_threads, peak_resident
from xmc_stream.system.progress import working

_COMPILING = 5.0  # seconds
_JOBS = 8  # at a time, at most: each has an array
_MATCHED, _JOINED, _COLUMNS = 0.05, 0.6, 0.95  # where each step ends
_SHOWN_ROWS = 1000  # rows left out that are listed
_FEATURES = ("vectorizer", "names/features", SELECTED)  # what says which features there are
_SOURCES = ("source", "source_labels")
_COUNTS = (
    "skipped", "dropped_features", "dropped_labels", "summed_duplicates", "rows_without_class", "blank_lines",
    "unknown_words",
)  # fmt: skip
APPENDED = "appended"  # attribute: the sets, each with its name, fingerprint and rows
# attributes not handed on: sizes, and what is true of the rows of the older set alone
_OWN = (
    "format", "version", "n_samples", "n_labels", "nnz_features", "nnz_labels", SEAL, MARK, "split", "selection",
)  # fmt: skip

# of a vectorizer: where text and labels stood in the input, and what chose the vocabulary, which is compared itself
_FIELDS = (
    "text_fields", "label_field", "label_delimiter", "label_lists", "label_ids", "id_field", "min_df", "max_df",
    "max_features",
)  # fmt: skip


@native_arguments
def append(
    data: str | Path | Dataset,
    new: str | Path | Dataset | Sequence[str | Path | Dataset],
    out: str | Path,
    *,
    columns: bool = False,
    memory_limit: str | int | None = None,
    threads: int | None = None,
    scheduler: Any = None,
    overwrite: bool = False,
    progress: bool = False,
) -> Dataset:
    """Make a dataset of the rows of an older one and of new ones below them, without writing the older rows again.

    Its full chunk files are hard links to those of `data`, which stays as it is: what is written are new rows, the last
    chunk of each array, labels by columns and counts. Files are copied where the file system has no hard links to them.
    The result is what a conversion of all rows at once gives. Features must be the same: convert the new rows with
    `like=data`, and `new_labels=True` where they have labels that `data` has not.

    Labels are the same that have one name. Names that `data` does not have are new labels behind its own, in the order in
    which they come. Where no set has names of labels, they are the same that have one number.

    It goes on when it was killed and the same call is made again.

    Parameters
    ----------
    data : Dataset, str or Path
        The dataset that grows, or its path. Its rows come first, and its labels keep their numbers.
    new : Dataset, str, Path, or list of these
        The datasets whose rows follow, in this order.
    out : str or Path
        The folder of the grown dataset.
    columns : bool, default False
        Store X by columns too. Without it, `Dataset.X_columns` makes that when it is first asked for.
    memory_limit : str, int or None, default None
        Peak resident memory of the process, as "512MB" or in bytes; on a cluster of each worker. None: what it holds,
        and three quarters of what is free.
    threads : int or None, default None
        Threads of this process, from 1 on. None: as many as it has processors.
    scheduler : dask client, str or None, default None
        A client of dask.distributed, or the address of a scheduler, to run the jobs there. None: this process.
    overwrite : bool, default False
        Replace a dataset at `out`.
    progress : bool, default False
        Show a bar on stderr, where that is a terminal.

    Returns
    -------
    Dataset
        The grown dataset, opened. Its attribute `appended` names the sets.

    Raises
    ------
    InputError
        Features of two sets are not the same, or their labels cannot be matched; or something stands at `out`.
    StoreError
        A dataset cannot be opened or is damaged, or `out` cannot be written.
    ResumeError
        Another process makes `out`.
    MemoryLimitError
        The memory limit cannot work, or was nearly reached.
    JobError
        A job failed on a worker of a cluster.

    See Also
    --------
    convert : its parameters `like` and `new_labels` give new rows the features of an older set.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
    >>> X = sp.csr_matrix(np.repeat(np.eye(3, dtype=np.float32), 10, axis=0))  # row i has label i // 10
    >>> first = xs.convert(X[:20], "first.xmc", labels=X[:20, :2])
    >>> later = xs.convert(X[20:], "later.xmc", labels=X[20:])
    >>> xs.append(first, later, "grown.xmc")
    Dataset('grown.xmc': 30 x 3, 3 labels)
    """
    return append_report(
        data, new, out, columns=columns, memory_limit=memory_limit, threads=threads, scheduler=scheduler,
        overwrite=overwrite, progress=progress,
    )[0]  # fmt: skip


def append_report(
    data: str | Path | Dataset,
    new: str | Path | Dataset | Sequence[str | Path | Dataset],
    out: str | Path,
    *,
    columns: bool = False,
    memory_limit: str | int | None = None,
    threads: int | None = None,
    scheduler: Any = None,
    overwrite: bool = False,
    progress: bool = False,
) -> tuple[Dataset, dict[str, Any]]:
    """As `append`, with a report of the run.

    Returns
    -------
    dataset : Dataset
        The grown dataset, opened.
    report : dict
        dataset, n_samples, n_features, n_labels, nnz_features, nnz_labels, new_samples, new_labels, bytes_on_disk,
        bytes_linked (in files that this call shared with `data`), bytes_copied (of full chunks that it could not share),
        seconds, peak_rss (bytes), said (a line for people) and resumed.
    """
    began = time.perf_counter()
    several = list(new) if isinstance(new, Sequence) and not isinstance(new, str) else [new]
    if not several:
        raise InputError(f"nothing is to be appended to {data}: name one dataset or more")
    sets = [as_dataset(one) for one in (data, *several)]
    target = target_path(out).absolute()
    if target.resolve() in {dataset.path.resolve() for dataset in sets}:
        raise InputError(f"{target} is one of the sets that are joined: give another name")
    threads = available_threads() if threads is None else threads
    execution = Execution(memory_limit, min(threads, _JOBS), scheduler)
    limit = execution.limit([dataset.path for dataset in sets], [target.parent])
    identity = {
        COMMAND: "append", "columns": columns,
        "sets": [[dataset.fingerprint, dataset.attributes.get(SEAL), _observed_seal(dataset)] for dataset in sets],
    }  # fmt: skip
    peak = 0
    with working("append", progress):
        done = made_before(target, identity)
        if done is None and not overwrite and stands(target, identity):
            done = {"said": "appended before, from the same sets", "resumed": True, "linked": 0, "copied": 0}
        if done is None:
            refuse_all([target], lambda path: check_target(path, overwrite))
            for dataset in sets[1:]:
                _refuse_unfit(sets[0], dataset)
            warm = _Warm(_total(sets, "n_samples"), _total(sets, "n_labels"))
            with planned(execution, limit, warm) as (engine, memory):
                made = _Sets(tuple(sets), columns, _column_bytes(sets, columns, memory), digest_of(identity))
                with checked_reading(*(dataset.path for dataset in sets)):
                    done = make(
                        target,
                        identity,
                        lambda work, ledger: engine.run(made.loop(work), ledger),
                        lambda path: check_target(path, overwrite),
                    )
                peak = max(peak, engine.peak)
    dataset = open_dataset(target)
    sizes = {name: int(dataset.attributes[name]) for name in SIZES}
    return dataset, {
        "dataset": str(out), **sizes, "new_samples": dataset.n_samples - sets[0].n_samples,
        "new_labels": dataset.n_labels - sets[0].n_labels, "bytes_on_disk": folder_bytes(target),
        "bytes_linked": done["linked"], "bytes_copied": done["copied"],
        "seconds": round(time.perf_counter() - began, 3), "peak_rss": max(peak, peak_resident()), "said": done["said"],
        "resumed": done["resumed"],
    }  # fmt: skip


def _refuse_unfit(old: Dataset, new: Dataset) -> None:
    """Raise InputError where two sets cannot be one, saying what to do, and StoreError where `new` is damaged."""
    for dataset in (old, new):
        refuse_broken_seal(dataset.path)
    if old.attributes.get(SELECTED) != new.attributes.get(SELECTED):
        kinds = [
            f"has {'all' if n is None else f'selected features of {n}'}"
            for n in (selected_of(one.attributes) for one in (old, new))
        ]
        raise InputError(
            f"{old.path} {kinds[0]} and {new.path} {kinds[1]}: give both the same ones, by `xmc-stream select-features`"
        )
    again = f"convert the rows of {new.path} again with " + flags.LIKE + f" {old.path}"
    if new.attributes["nnz_labels"]:
        again += ", and " + flags.NEW_LABELS + " where it has labels of its own"
    # ids of libsvm text count from what each text was asked for by itself
    libsvm = all(str(one.attributes.get("source_format")).startswith("libsvm") for one in (old, new))
    mine, theirs = _told(old, libsvm), _told(new, libsvm)
    for what, value in mine.items():
        if value != theirs.get(what):
            raise InputError(f"{what} {value} in {old.path} and {theirs.get(what)} in {new.path}: " + again)
    _same_words(old, new, again)
    no_labels = not new.attributes["nnz_labels"] and _observed_seal(new) is None  # nor known ones
    for what, option, in_old, in_new in (
        ("ids of rows", "with " + flags.ID_FIELD + ", or without", old.row_ids(), new.row_ids()),
        ("a mask of known pairs", "with " + flags.OBSERVED + ", or without", _observed_seal(old), _observed_seal(new)),
        (
            "names of labels", "with names of labels, by " + flags.LABEL_NAMES + ", or ids", old.label_names(),
            old.label_names() if no_labels else new.label_names(),
        ),
    ):  # fmt: skip
        if (in_old is None) != (in_new is None):
            having, lacking = (old, new) if in_new is None else (new, old)
            raise InputError(
                f"{having.path} has {what} and {lacking.path} has none: convert one of them again, " + option
            )


def _told(dataset: Dataset, libsvm: bool) -> dict[str, Any]:
    """What must be the same of two sets, by the words of a message. libsvm: whether both are of such text."""
    about, text = dataset.attributes, open_vectorizer(dataset.path)
    with understood(dataset.path):
        beside = [one["n_features"] for one in about.get("beside", [])]
    told = {
        "the number of features is": dataset.n_features,
        "names of features are": "missing" if dataset.feature_names() is None else "known",
        "rows are normalised by": about.get("normalize", "none"),
        "matrices beside have columns": beside,
        "features are": "columns" if text is None else "words of raw text",
    }
    if text is not None:
        told |= {f"{name} of raw text is": value for name, value in text[0].items() if name not in _FIELDS}
    if libsvm:
        told["ids of features count from"] = about.get("base", 0)
        told["ids of labels count from"] = about.get("label_base", 0)
    return told


def _same_words(old: Dataset, new: Dataset, again: str) -> None:
    """Features have the same names and, if they are words, the same idf."""
    mine, theirs = old.feature_names(), new.feature_names()
    if mine is not None and theirs is not None and (i := first_difference(mine, theirs)) is not None:
        name, other = mine.read(i, i + 1)[0], theirs.read(i, i + 1)[0]
        raise InputError(f"feature {i} is {name!r:.50} in {old.path} and {other!r:.50} in {new.path}: " + again)
    texts = [text for one in (old, new) if (text := open_vectorizer(one.path)) is not None]
    if texts and not all(np.array_equal(*pair) for pair in zip(*(idf.windows() for _, idf in texts), strict=False)):
        raise InputError(f"{old.path} and {new.path} weigh words by other idf: " + again)


def _observed_seal(dataset: Dataset) -> str | None:
    """What tells a dataset's mask of known pairs from others, None where it has none; it is sealed apart."""
    path = dataset.path / "observed"
    return str(attributes_of(path).get(SEAL)) if path.exists() else None


def _total(datasets: Sequence[Dataset], name: str) -> int:
    """The sum of a size, as "nnz_features"."""
    return sum(int(dataset.attributes[name]) for dataset in datasets)


def _column_bytes(sets: Sequence[Dataset], columns: bool, memory: MemoryPlan) -> int:
    """Of the buffers that make columns. Raises MemoryLimitError where the jobs do not fit."""
    n_labels, named = _total(sets, "n_labels"), sets[0].label_names() is not None
    beside = {
        "copies": memory.threads * 2 * COPY_BYTES,
        "counts": 8 * (sets[0].n_features + 2 * n_labels),  # a sum, and what is added to it
        "names": WRITER_BYTES * (named + (sets[0].row_ids() is not None)),
        "labels by other numbers": 8 * n_labels + BLOCK_BYTES if named else 0,
    }
    matching = {"labels by name": named * (NamedIds.BYTES + 16) * n_labels}  # before all others
    writing = plan_writing(
        memory.budget - sum(beside.values()), memory.threads, sets[0].n_features, n_labels, None,
        _total(sets, "nnz_labels"), 0, columns,
    )  # fmt: skip
    memory.refuse_unless(max({**writing.needs, **beside}, matching, key=lambda stage: sum(stage.values())), "append")
    return writing.max_bytes


@dataclass(frozen=True)
class _Sets:
    """Sets that become one, the one that grows first.

    columns: whether X is written by columns too; max_bytes: of the buffers that make columns; mark: see `making`.
    """

    sets: tuple[Dataset, ...]
    columns: bool
    max_bytes: int
    mark: str

    def loop(self, work: Path) -> Loop:
        """Yields the phases, is sent their receipts; makes `work / "store"`; returns linked, copied (bytes) and `said`."""
        old, store = self.sets[0], work / "store"
        paths, match = tuple(str(dataset.path) for dataset in self.sets), ""
        n_labels, added = max(dataset.n_labels for dataset in self.sets), [0] * (len(self.sets) - 1)
        if old.label_names() is not None:
            match = str(work / "match")
            (matched,) = yield Phase(
                "match", [MatchJob(str(work), paths, "match")], "matching labels", (0.0, _MATCHED), twice=True
            )
            n_labels, added = matched["n_labels"], matched["added"]
        assembly.begin(store)
        jobs = self._jobs(store, match, n_labels, added)
        joined = yield Phase("join", jobs, "joining the rows", (_MATCHED, _JOINED))
        receipts = {job.key: receipt for job, receipt in zip(jobs, joined, strict=True)}
        n_samples = _total(self.sets, "n_samples")
        for side, bound, nnz, arrays in (
            ("X", old.n_features, _total(self.sets, "nnz_features"), ("indptr", "indices", "data")),
            ("Y", n_labels, _total(self.sets, "nnz_labels"), ("indptr", "indices")),
        ):
            hashes = [receipts[f"join/{side}/rows/{name}"]["sha256"] for name in arrays]
            finish_matrix(store / side / "rows", "csr_matrix", (n_samples, bound), nnz, hashes)
        sides: list[Job] = [ColumnsJob(str(store), "Y", self.max_bytes)]
        if self.columns:
            sides.append(ColumnsJob(str(store), "X", self.max_bytes))
        yield Phase("columns", sides, "writing columns", (_JOINED, _COLUMNS), kept=False)  # not durable yet
        copy_folders(old.path, store, _FEATURES, link_or_copy)
        sizes = {
            "n_samples": n_samples, "n_features": old.n_features, "n_labels": n_labels,
            "nnz_features": _total(self.sets, "nnz_features"), "nnz_labels": _total(self.sets, "nnz_labels"),
        }  # fmt: skip
        assembly.finish(store, {**self._attributes(), **sizes, MARK: self.mark})
        if _observed_seal(old) is not None:
            masks = [ObservedJob(str(store), paths, "observed", match, n_labels, self.max_bytes)]
            yield Phase("observed", masks, "writing the known pairs", (_COLUMNS, 1.0), kept=False, twice=True)
        linked, copied = (sum(receipt.get(name, 0) for receipt in receipts.values()) for name in ("linked", "copied"))
        return {"linked": linked, "copied": copied, "said": self._said(n_labels)}

    def _jobs(self, store: Path, match: str, n_labels: int, added: Sequence[int]) -> list[Job]:
        """What is put one behind the other."""
        folder, paths = str(store), tuple(str(dataset.path) for dataset in self.sets)
        index = index_dtype(self.sets[0].n_features).name
        arrays = {"X/rows/data": "float32", "X/rows/indices": index, "statistics/row_norms": "float32"}
        arrays |= {"X/rows/indptr": "int64", "Y/rows/indptr": "int64"}
        jobs: list[Job] = [
            *(ArrayJob(folder, paths, name, dtype) for name, dtype in arrays.items()),
            LabelsJob(folder, paths, "Y/rows/indices", match, n_labels),
            CountsJob(folder, paths, "statistics", match, n_labels),
        ]
        if match:
            more = (f"{match}/names-{number}" for number, n in enumerate(added, 1) if n)
            jobs.append(NamesJob(folder, (f"{paths[0]}/names/labels", *more), "names/labels"))
        if self.sets[0].row_ids() is not None:
            jobs.append(NamesJob(folder, tuple(f"{path}/{ROW_IDS}" for path in paths), ROW_IDS))
        return jobs

    def _attributes(self) -> dict[str, Any]:
        """Those of the older set; counts are added up, and rows left out and sources listed for all."""
        every = [dataset.attributes for dataset in self.sets]
        kept = {name: value for name, value in every[0].items() if name not in _OWN}
        for name in _SOURCES:
            found = [about.get(name, ()) for about in every]
            sources = [source for some in found for source in ([some] if isinstance(some, str) else some)]
            if sources:
                kept[name] = sources if len(sources) > 1 else sources[0]
        for name in _COUNTS:
            if count := sum(int(about.get(name, 0)) for about in every):
                kept[name] = count
        if rows := [row for about in every for row in about.get("skipped_rows", ())]:
            kept["skipped_rows"] = rows[:_SHOWN_ROWS]
        before = kept.get(APPENDED, _entries(self.sets[:1]))
        return {**kept, "format": FORMAT, "version": VERSION, APPENDED: [*before, *_entries(self.sets[1:])]}

    def _said(self, n_labels: int) -> str:
        old, by = self.sets[0], "name" if self.sets[0].label_names() is not None else "number"
        n_new = _total(self.sets[1:], "n_samples")
        said = f"{n_new:,} rows and {n_labels - old.n_labels:,} labels are new, labels matched by {by}"
        text = open_vectorizer(old.path)
        return said + (f", words weighed by the idf of {old.path.name}" if text and text[0].get("idf") else "")


def _entries(sets: Sequence[Dataset]) -> list[dict[str, Any]]:
    """What is noted of each set."""
    return [{"of": one.path.name, "fingerprint": one.fingerprint, "n_samples": one.n_samples} for one in sets]


@dataclass(frozen=True)
class _Warm:
    """Loads what the jobs call. n_samples, n_labels: at most."""

    n_samples: int
    n_labels: int
    key: str = "warm"

    def run(self) -> Receipt:
        """Compile or load."""
        with loading("append", _COMPILING):
            load_kernels(self.n_samples, 0, self.n_labels)
        return {}
