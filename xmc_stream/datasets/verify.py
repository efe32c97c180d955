"""Whether a store is what was written, and whether what was written can be true.

Rows and columns of a matrix are compared by the sum, modulo 2^64, of a hash of (row, column, value) over their entries.
It does not depend on the order, so each job adds up its own lines in any amount of memory. The hash is keyed anew in
every run, so what it overlooks is up to chance and not to the data: entries are unique in each order (checked), so the
two sides differ by sums of single hashes, and agree although they differ with odds of 2^-64. Feature counts are compared
by the sum of a hash of each entry's feature against the hashes of all features times their counts; where every count is
wrong by a multiple of 2^t, which damage has no reason to do, the odds are 2^(t-64).

Not checked: free words in attributes before the store was sealed.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.arguments import native_arguments
from xmc_stream.datasets.info import unfinished
from xmc_stream.datasets.kernels.check import DISORDER, N_STATE, NOT_FINITE, OUTSIDE, check_entries, sum_of_counts
from xmc_stream.errors import StoreError
from xmc_stream.models import Execution, planned
from xmc_stream.models.calibration import Calibration
from xmc_stream.models.model import Model, load_model
from xmc_stream.runtime.job import Notes, Phase, Receipt
from xmc_stream.runtime.plan import MIB, even_ranges
from xmc_stream.runtime.warmup import loading
from xmc_stream.store.chunks import open_array
from xmc_stream.store.dataset import FORMAT as DATASET
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import fingerprint_of
from xmc_stream.store.inventory import LOGS, ArrayFiles, Inventory, log_damage, seal_damage, take_inventory
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.store.model import FORMAT as MODEL
from xmc_stream.store.model import LABEL_COUNTS, StoredModel
from xmc_stream.store.names import ROW_IDS, SELECTED, read_selection
from xmc_stream.store.nodes import read_json
from xmc_stream.store.predictions import FORMAT as PREDICTIONS
from xmc_stream.store.predictions import Predictions
from xmc_stream.store.remote import as_path
from xmc_stream.system.memory import peak_resident
from xmc_stream.system.progress import working

_KINDS = {DATASET: "dataset", MODEL: "model", PREDICTIONS: "predictions"}
_MOST = 100  # lines of damage that are reported
_JOB_BYTES = 16 * MIB  # that a job of either kind holds at most
_WINDOW = 1 << 16  # lines whose ends are read at a time
_PIECE = 1 << 19  # entries read at a time
_LINES_JOB = 1 << 24  # entries of a job, about
_FILES_JOB = 1 << 28  # bytes of a job, about, unless one array is larger
_COMPILING = 2.0  # seconds
_NOTHING = hashlib.sha256().hexdigest()


@native_arguments
def verify(
    path: str | Path | Dataset | Model,
    *,
    memory_limit: str | int | None = None,
    threads: int | None = None,
    scheduler: Any = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Check a dataset, a model or predictions: every file, and all that must hold of what is in them.

    Parameters
    ----------
    path : str, Path, Dataset or Model
        The folder of the dataset, model or predictions, or one of these.
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
        sound (bool), damage (a line for each, at most 100), n_damage, kind ("dataset", "model", "predictions" or None),
        path, n_files, bytes_read, seconds, peak_rss and memory_limit (bytes).

    Raises
    ------
    StoreError
        There is nothing at `path`, or nothing that xmc_stream wrote.
    InputError
        The memory limit is not understood, threads is below 1, or no scheduler answers.
    MemoryLimitError
        The memory limit cannot work.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
    >>> X = sp.csr_matrix(np.repeat(np.eye(3, dtype=np.float32), 10, axis=0))  # row i has label i // 10
    >>> _ = xs.convert(X, "verified.xmc", labels=X)
    >>> report = xs.verify("verified.xmc")
    >>> report["kind"], report["sound"], report["damage"]
    ('dataset', True, [])
    """
    began = time.perf_counter()
    path = path.path if isinstance(path, Dataset | Model) else as_path(path)
    if under_way := unfinished(path):
        raise StoreError(f"{path} is an {under_way['kind']}, which nothing can be said of yet: {under_way['next']}")
    if not path.exists():
        raise StoreError(f"there is nothing at {path}: check the name")
    if not (path / "zarr.json").is_file():
        raise StoreError(f"{path} has no zarr.json: it is damaged, or not a dataset, a model or predictions at all")
    execution = Execution(memory_limit, threads, scheduler, progress)
    limit = execution.limit([path])
    with working("verify", execution.progress), planned(execution, limit, _Warm()) as (engine, plan):
        plan.refuse_unless({"reading": (plan.threads + 1) * _JOB_BYTES}, f"verifying on {plan.threads} threads")
        check = StoreCheck(path.absolute(), take_inventory(path.absolute()), secrets.randbits(64))
        report = engine.run(check.loop(), Notes())
        peak = max(engine.peak, peak_resident())
    seconds = round(time.perf_counter() - began, 3)
    return {"path": str(path), **report, "seconds": seconds, "peak_rss": peak, "memory_limit": limit.limit}


@dataclass(frozen=True)
class FilesJob:
    """All chunk files of some arrays. The receipt has the sha256 of each array's values, by folder."""

    arrays: tuple[ArrayFiles, ...]

    @property
    def key(self) -> str:
        """The first array."""
        return f"files/{self.arrays[0].folder}"

    def run(self) -> Receipt:
        """Read and compare."""
        hashes, damage = {}, []
        for array in self.arrays:
            hashes[array.folder], lines = array.check()
            damage += lines
        n_bytes = sum(array.file_bytes for array in self.arrays)
        return {"hashes": hashes, "damage": damage, "bytes_read": n_bytes}


def files_jobs(arrays: Sequence[ArrayFiles]) -> list[FilesJob]:
    """Jobs for all arrays, the largest first: an array is hashed from its beginning to its end, in one job."""
    ordered = sorted(arrays, key=lambda array: (-array.n_bytes, array.folder))
    ends = itertools.accumulate(array.file_bytes for array in ordered)
    groups = itertools.groupby(zip(ends, ordered, strict=True), lambda pair: pair[0] // _FILES_JOB)
    return [FilesJob(tuple(array for _, array in group)) for _, group in groups]


@dataclass(frozen=True)
class LinesJob:
    """Lines [first, last) of a matrix whose files are whole.

    norms, counts: folders of arrays that must hold the norm, or the number of entries, of each line; "" for none.
    key_: of the hashes; the receipt has their sums, unless the lines cannot be told apart.
    """

    matrix: str
    first: int
    last: int
    hash_key: int
    norms: str = ""
    counts: str = ""

    @property
    def key(self) -> str:
        """The lines."""
        return f"lines/{self.matrix}/{self.first}-{self.last}"

    def run(self) -> Receipt:
        """Read and check, by windows of lines and pieces of entries."""
        matrix = SparseMatrix(self.matrix)
        damage: list[str] = []
        sums = np.zeros(2, np.uint64)
        for low in range(self.first, self.last, _WINDOW):
            high = min(low + _WINDOW, self.last)
            fault = self._window(matrix, low, high, sums, damage)
            if fault:
                return {"damage": [*damage, fault], "sums": None, "bytes_read": matrix.bytes_read}
        return {"damage": damage, "sums": sums.tolist(), "bytes_read": matrix.bytes_read}

    def _window(
        self, matrix: SparseMatrix, low: int, high: int, sums: NDArray[np.uint64], damage: list[str]
    ) -> str | None:
        """Check lines [low, high); returns what is wrong with their ends, as then nothing else can be checked."""
        line = "row" if matrix.encoding == "csr_matrix" else "column"
        window = matrix.indptr.read(low, high + 1)
        lengths, last = np.diff(window), matrix.nnz if high == matrix.n_lines else None
        if (lengths < 0).any() or window[0] < 0 or window[-1] > matrix.nnz or (low == 0 and window[0] != 0):
            return f"{matrix.path}/indptr does not ascend from 0 to {matrix.nnz} in {line}s {low} to {high - 1}"
        if last is not None and window[-1] != last:
            return f"{matrix.path}/indptr ends with {window[-1]}, and there are {last} indices"
        state = np.full(N_STATE, -1, np.int64)
        squares = np.zeros(high - low)
        bound = matrix.shape[1] if line == "row" else matrix.shape[0]
        for begin in range(int(window[0]), int(window[-1]), _PIECE):
            end = min(begin + _PIECE, int(window[-1]))
            indices = matrix.indices.read(begin, end)
            values = np.empty(0, np.float32) if matrix.data is None else matrix.data.read(begin, end)
            check_entries(
                window[1:], begin, low, indices, values, values.view(np.uint32), bound, line == "column",
                np.uint64(self.hash_key), state, sums, squares,
            )  # fmt: skip
        for at, what in (
            (DISORDER, "has indices that do not ascend, or one twice"),
            (OUTSIDE, f"has an index that is not below {bound}"),
            (NOT_FINITE, "has a value that is not finite"),
        ):
            if state[at] >= 0:
                damage.append(f"{matrix.path}: {line} {state[at]} {what}")
        if self.norms:
            with np.errstate(over="ignore"):
                _compare(self.norms, low, np.sqrt(squares).astype(np.float32), f"norm of {line}", damage)
        if self.counts:
            _compare(self.counts, low, lengths, f"number of entries of {line}", damage)
        return None


def _compare(folder: str, start: int, true: NDArray[np.generic], what: str, damage: list[str]) -> None:
    stored = open_array(Path(folder)).read(start, start + len(true))
    wrong = np.flatnonzero(stored != true)
    for i in wrong[:1].tolist():
        damage.append(f"{folder}: the {what} {start + i} is {stored[i]}, not {true[i]} (and {len(wrong) - 1} more)")


def lines_jobs(matrix: SparseMatrix, hash_key: int, norms: str = "", counts: str = "") -> list[LinesJob]:
    """Jobs for all lines of a matrix."""
    parts = even_ranges(matrix.n_lines, max(1, matrix.nnz // _LINES_JOB, matrix.n_lines // _LINES_JOB))
    return [LinesJob(str(matrix.path), a, b, hash_key, norms, counts) for a, b in parts if b > a]


def index_counts_sum(folder: Path, hash_key: int) -> int:
    """What the sums of hashes of indices alone must be, from how often each occurs."""
    total = first = 0
    for window in open_array(folder).windows():
        total += int(sum_of_counts(first, window, np.uint64(hash_key)))
        first += len(window)
    return total % 2**64


@dataclass
class StoreCheck:
    """One store, by its absolute path. damage: found so far; hashes: sha256 of an array's values, by its folder."""

    path: Path
    inventory: Inventory
    hash_key: int
    damage: list[str] = field(default_factory=list)
    hashes: dict[str, str] = field(default_factory=dict)
    bytes_read: int = 0

    def loop(self) -> Generator[Phase, list[Receipt], Receipt]:
        """All files, then what is in those that are whole."""
        self.damage += [*seal_damage(self.path), *self.inventory.damage]
        for receipt in (
            yield Phase(
                "verify: files",
                files_jobs(self.inventory.arrays),
                "comparing files with their checksums",
                (0.0, 0.5),
                twice=True,
            )
        ):
            self.hashes |= receipt["hashes"]
            self.damage += receipt["damage"]
            self.bytes_read += receipt["bytes_read"]
        kind = self._kind()
        try:
            if kind == "dataset":
                yield from self._dataset()
            elif kind == "model":
                yield from self._model()
            elif kind == "predictions":
                self._predictions()
            else:
                self.damage.append(f"{self.path} does not say that it is a dataset, a model or predictions")
        except (StoreError, KeyError, ValueError, TypeError) as error:  # attributes that are not what they must be
            self.damage.append(f"{self.path} cannot be opened as {kind}: {error}")
        return {
            "kind": kind,
            "sound": not self.damage,
            "n_damage": len(self.damage),
            "damage": self.damage[:_MOST],
            "n_files": self.inventory.n_files,
            "bytes_read": self.bytes_read,
        }

    def _kind(self) -> str | None:
        with suppress(OSError, ValueError, KeyError, TypeError):
            return _KINDS.get(read_json(self.path / "zarr.json")["attributes"]["format"])
        return None

    def whole(self, folder: Path) -> bool:
        """Whether all files under a folder are there and as they were written."""
        return not any(line.startswith(f"{folder}/") for line in self.damage)

    def expect(self, what: str, found: Any, wanted: Any) -> None:
        """Note what is not as it must be."""
        if found != wanted:
            self.damage.append(f"{self.path}: {what} is {found}, not {wanted}")

    def matrix(self, folder: Path, shape: tuple[int, int], encoding: str) -> SparseMatrix | None:
        """A matrix whose files are whole and whose sizes and fingerprint are right, else None."""
        if not self.whole(folder):
            return None
        before = len(self.damage)
        try:
            matrix = SparseMatrix(folder)
        except StoreError as error:
            self.damage.append(str(error))
            return None
        self.expect(f"the shape of {folder}", list(matrix.shape), list(shape))
        self.expect(f"the encoding of {folder}", matrix.encoding, encoding)
        names = ["indptr", "indices", *(["data"] if matrix.data is not None else [])]
        hashes = [self.hashes.get(str(folder / name), _NOTHING) for name in names]
        true = fingerprint_of(matrix.encoding, matrix.shape, hashes)
        self.expect(f"the fingerprint of {folder}", matrix.attributes.get("fingerprint"), true)
        return matrix if len(self.damage) == before else None

    def _dataset(self) -> Generator[Phase, list[Receipt], None]:
        dataset = Dataset(self.path)
        self.damage += log_damage(self.path, {})
        x_shape, y_shape = (dataset.n_samples, dataset.n_features), (dataset.n_samples, dataset.n_labels)
        statistics = self.path / "statistics"
        arrays = {name: statistics / name for name in ("row_norms", "feature_counts", "label_counts")}
        for (name, folder), n in zip(arrays.items(), (dataset.n_samples, *x_shape[1:], *y_shape[1:]), strict=True):
            self.expect_size(folder, n, name)
        norms, features, labels = (str(folder) if self.whole(folder) else "" for folder in arrays.values())
        self._beside(dataset)
        self._names(self.path / ROW_IDS, "rows", dataset.n_samples)
        wanted = [
            ("X/rows", x_shape, "csr_matrix", norms, ""),
            ("Y/rows", y_shape, "csr_matrix", "", ""),
            ("Y/columns", y_shape, "csc_matrix", "", labels),
        ]
        if (self.path / "X" / "columns").exists():
            wanted.append(("X/columns", x_shape, "csc_matrix", "", features))
            self.damage += seal_damage(self.path / "X" / "columns")
        if (self.path / "observed").exists():
            wanted += [
                ("observed/rows", y_shape, "csr_matrix", "", ""),
                ("observed/columns", y_shape, "csc_matrix", "", ""),
            ]
            self.damage += seal_damage(self.path / "observed")
        jobs, nnz = {}, {}
        for name, shape, encoding, norm, counts in wanted:
            matrix = self.matrix(self.path / name, shape, encoding)
            if matrix is not None:
                jobs[name] = lines_jobs(matrix, self.hash_key, norm, counts)
                nnz[name] = matrix.nnz
        sums = yield from self._sums(jobs)
        for name, of in (("nnz_features", "X/rows"), ("nnz_labels", "Y/rows")):
            if of in nnz:
                self.expect(f"the attribute {name}", dataset.attributes.get(name), nnz[of])
        for side in ("X", "Y", "observed"):
            rows, columns = sums.get(f"{side}/rows"), sums.get(f"{side}/columns")
            if rows and columns and (nnz[f"{side}/rows"] != nnz[f"{side}/columns"] or rows[0] != columns[0]):
                self.damage.append(f"{self.path / side}: rows and columns do not hold the same entries")
        if features and "X/rows" in sums and sums["X/rows"][1] != index_counts_sum(Path(features), self.hash_key):
            self.damage.append(f"{features}: the counts are not those of the features in X/rows")

    def _beside(self, store: Dataset | StoredModel) -> None:
        """Names, ids of selected features, and what text becomes features by, have an entry for each feature or label."""
        if self.whole(self.path / SELECTED):
            read_selection(self.path, store.attributes, store.n_features)
            self.expect(f"whether there is {SELECTED}", (self.path / SELECTED).exists(), SELECTED in store.attributes)
        for kind, n in (("features", store.n_features), ("labels", store.n_labels)):
            self._names(self.path / "names" / kind, kind, n)
        idf = self.path / "vectorizer" / "idf"
        if idf.exists() and self.whole(idf):
            array = open_array(idf)
            self.expect("the size of vectorizer/idf", array.size, store.n_features)
            self.finite(idf)

    def _names(self, folder: Path, kind: str, n: int) -> None:
        """Names end where they can, and are as many as there must be. kind: of what, for messages."""
        if not (folder.exists() and self.whole(folder)):
            return
        ends, size = open_array(folder / "ends"), open_array(folder / "bytes").size
        self.expect(f"the number of names of {kind}", ends.size, n)
        last = 0
        for window in ends.windows():
            if int(window[0]) < last or (np.diff(window) < 0).any():
                self.damage.append(f"{folder / 'ends'} does not ascend")
            last = int(window[-1])
        self.expect(f"the end of the last name of {kind}", last, size)

    def expect_size(self, folder: Path, n: int, name: str) -> None:
        """Note an array of another size."""
        if self.whole(folder):
            self.expect(f"the size of {name}", open_array(folder).size, n)

    def finite(self, folder: Path) -> None:
        """Note an array with a value that is not finite."""
        if not all(np.isfinite(window).all() for window in open_array(folder).windows()):
            self.damage.append(f"{folder} has a value that is not finite")

    def lines(self, matrices: Mapping[str, SparseMatrix]) -> Generator[Phase, list[Receipt], None]:
        """Check every line of some matrices."""
        yield from self._sums({name: lines_jobs(matrix, self.hash_key) for name, matrix in matrices.items()})

    def _sums(self, jobs: dict[str, Any]) -> Generator[Phase, list[Receipt], dict[str, tuple[int, int]]]:
        """Run all jobs in one phase; returns the sums of each matrix whose lines could all be told apart."""
        every = [job for some in jobs.values() for job in some]
        receipts = iter((yield Phase("verify: content", every, "checking what the files say", (0.5, 1.0), twice=True)))
        sums = {}
        for name, some in jobs.items():
            mine = [next(receipts) for _ in some]
            for receipt in mine:
                self.damage += receipt["damage"]
                self.bytes_read += receipt["bytes_read"]
            if all(receipt["sums"] for receipt in mine):
                pairs, indices = (sum(receipt["sums"][i] for receipt in mine) % 2**64 for i in range(2))
                sums[name] = (pairs, indices)
        return sums

    def _model(self) -> Generator[Phase, list[Receipt], None]:
        model = load_model(self.path)
        if LOGS in model.attributes:
            self.damage += log_damage(self.path, model.attributes[LOGS])
        self._beside(model)
        self._calibration(model)
        yield from model.verify(self)

    def _calibration(self, model: Model) -> None:
        """What scores are calibrated by, if they are: the training rows of each label."""
        calibration, folder = Calibration.of(self.path, model.attributes), self.path / LABEL_COUNTS
        if not folder.exists():
            if calibration is not None:
                self.damage.append(f"{folder} is missing")
        elif self.whole(folder):
            self.expect_size(folder, model.n_labels, LABEL_COUNTS)
            if any((window < 0).any() for window in open_array(folder).windows()):
                self.damage.append(f"{folder} has a number below 0")

    def _predictions(self) -> None:
        if not (self.whole(self.path / "labels") and self.whole(self.path / "scores")):
            return
        predictions = Predictions(self.path)
        self.damage += log_damage(self.path, {})
        self._names(self.path / ROW_IDS, "rows", predictions.n_samples)
        for start, labels, scores in predictions.blocks():
            # places without a label come last
            falling = (labels[:, 1:] < 0) | ((labels[:, :-1] >= 0) & (scores[:, :-1] >= scores[:, 1:]))
            wrong = np.flatnonzero((labels < -1).any(1) | ~falling.all(1))
            if len(wrong):
                self.damage.append(f"{self.path}: row {start + wrong[0]} is not a list of labels by falling score")


@dataclass(frozen=True)
class _Warm:
    """Loads what the jobs call."""

    key: str = "warm"

    def run(self) -> Receipt:
        """Check nothing, of both types of indices."""
        ends, none = np.zeros(0, np.int64), np.empty(0, np.float32)
        with loading("verify", _COMPILING):
            for dtype in (np.int32, np.int64):
                check_entries(
                    ends, 0, 0, np.empty(0, dtype), none, none.view(np.uint32), 0, False, np.uint64(0),
                    np.zeros(N_STATE, np.int64), np.zeros(2, np.uint64), np.zeros(0),
                )  # fmt: skip
            sum_of_counts(0, ends, np.uint64(0))
        return {}
