"""Predicting few rows in the calling thread, by a model that stays in memory from call to call: no engine, no files.

The kernels, and every bit of what they find, are those of the engine's jobs. A model is held as long as the object that was
asked lives, until its files change, or until another plan is made: what is kept for speed alone gives way.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import InputError
from xmc_stream.models.execution import Execution
from xmc_stream.models.samples import are_texts
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import Block
from xmc_stream.system.memory import FEW_BYTES, MemoryLimit, available_threads, return_freed_memory, when_room_is_needed

if TYPE_CHECKING:
    from xmc_stream.convert.tfidf.vectorizer import TextRows
    from xmc_stream.models.kind import Held
    from xmc_stream.models.model import Model

_SHARE = 2  # one in so many bytes of the budget is taken at most: two threads may come at once
_RESULT_BYTES = 20  # of a row and rank: label and score, and what becomes of them
_ROW_BYTES = 24  # where a row begins, as it is read and in the block


@dataclass
class _Kept:
    """A model in memory. stamp: of the files it was read from; ranking: bytes that ranking takes; texts: its vocabulary,
    once it was asked about texts."""

    stamp: tuple[int, int, int]
    model: Model
    held: Held
    ranking: int
    texts: TextRows | None = None


_kept: WeakKeyDictionary[Model, _Kept] = WeakKeyDictionary()
_lock = threading.RLock()  # what is done to hold a model may call for room


def _let_go() -> None:
    with _lock:
        if _kept:
            _kept.clear()
            return_freed_memory()


when_room_is_needed(_let_go)


def rank(model: Model, data: Any, k: int, execution: Execution) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
    """The k best classes of the rows of a dataset, a scipy matrix or texts; None where that is work for an engine.

    That is so where the model, its vocabulary, or rows and results, take more than half of what the limit leaves, and where
    there are threads to share many rows. Raises what a prediction by an engine raises.
    """
    # kernels are loaded where there is something to predict, not by importing the package
    from xmc_stream.models.runs import HELD_ROWS, no_predictions

    texts = are_texts(data)
    n = len(data) if texts else data.n_samples if isinstance(data, Dataset) else data.shape[0]
    threads = available_threads() if execution.threads is None else execution.threads
    few = 0 < n <= HELD_ROWS or (n and threads == 1)
    if not few or threads < 1 or execution.scheduler is not None or execution.cuts is not None:
        return None
    kept = _held(model, execution)
    if kept is None or (texts and not _has_vocabulary(kept, execution)):
        return None
    check_k(kept.model, k)
    read, n_bytes = _reader(data, kept, texts)
    need = n_bytes + n * (k * _RESULT_BYTES + _ROW_BYTES)
    # to ask the system what is free takes longer than to rank a row
    if execution.memory_limit is not None or need > FEW_BYTES:
        budget = MemoryLimit.of(execution.memory_limit).budget()
        if need + kept.ranking > budget // _SHARE:
            return None
    x = read()
    labels, scores = no_predictions(n, k)
    for first in range(0, n, HELD_ROWS):
        mine = slice(first, min(first + HELD_ROWS, n))
        kept.held.rank(x.lines(mine.start, mine.stop), labels[mine], scores[mine])
    return labels, scores


def refuse_other_rows(model: Model, X: Any) -> None:
    """Raise InputError for what is no scipy matrix with the model's features."""
    sparse = hasattr(X, "tocsr")
    if not sparse or X.shape[1] != model.n_features:
        got = f"a matrix of {X.shape[1]} features" if sparse else type(X).__name__
        raise InputError(f"got {got}: give a Dataset, a matrix or an array with {model.n_features} features, or texts")


def check_k(model: Model, k: int) -> None:
    """Raise InputError for more classes than there are, or none."""
    if not 1 <= k <= model.n_labels:
        raise InputError(f"k must be between 1 and the model's {model.n_labels} labels. Got {k}.")


def _reader(data: Any, kept: _Kept, texts: bool) -> tuple[Callable[[], Block], int]:
    """What reads all rows, and the bytes that this takes."""
    if isinstance(data, Dataset):
        from xmc_stream.models.runs import check_features

        check_features(kept.model, data)
        X = data.X_rows()
        return lambda: X.block(0, X.n_lines), X.nnz * X.entry_bytes
    if texts and (words := kept.texts) is not None:
        return lambda: Block(0, *words.rows(data)), words.bytes_of(data)
    from xmc_stream.convert.matrices.memory import in_memory
    from xmc_stream.convert.matrices.sides import whole_bytes, whole_rows

    refuse_other_rows(kept.model, data)
    side = in_memory(data, "X")
    return lambda: Block(0, *whole_rows(side)), whole_bytes(side)


def _held(model: Model, execution: Execution) -> _Kept | None:
    """The model in memory, as it stands on disk now; None where it takes too much. It is compared with its checksums once.

    Threads that come while it is loaded wait for the one that loads it.
    """
    kept = _kept.get(model)
    if kept is not None and kept.stamp == _stamp(model):
        return kept
    with _lock:
        kept = _kept.get(model)
        if kept is not None and kept.stamp == _stamp(model):
            return kept
        _kept.pop(model, None)
        del kept
        limit = MemoryLimit.of(execution.memory_limit)
        MemoryLimit.kept(limit.limit, spare=True)  # what loading it frees goes back
        while True:
            stamp = _stamp(model)
            if stamp is None:
                return None
            now = model.reopened()
            now.warm_up().run()
            room = limit.budget() // _SHARE
            needs = now.held_needs(room)
            if sum(needs.values()) > room:
                return None
            for job in now.check_jobs():
                job.run()
            held = now.hold(room)
            if stamp == _stamp(model):  # else it was replaced meanwhile
                _kept[model] = _Kept(stamp, now, held, needs["ranking"])
                return _kept[model]
            del held


def _has_vocabulary(kept: _Kept, execution: Execution) -> bool:
    """Whether the vocabulary is in memory: it is read once, and goes with the model. Raises InputError where there is none."""
    if kept.texts is not None:
        return True
    from xmc_stream.convert.formats.beside import words_of
    from xmc_stream.convert.options import taken_over
    from xmc_stream.convert.tfidf.vectorizer import TextRows

    with _lock:
        if kept.texts is None:
            like = taken_over(kept.model)
            texts = TextRows(words_of(like, ()) if like.beside else like)
            if texts.needs > MemoryLimit.of(execution.memory_limit).budget() // _SHARE:
                return False
            kept.texts = texts.load()
    return True


def _stamp(model: Model) -> tuple[int, int, int] | None:
    """What changes whenever a model is written: it is replaced as a whole, and what changes it replaces this file."""
    try:
        about = os.stat(model.path / "zarr.json")
    except OSError:
        return None
    return about.st_ino, about.st_mtime_ns, about.st_size
