"""A row-sparse model with its selected features as its only columns."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from xmc_stream.grouplasso.rows import ROWS, WINDOW, RowSparseWeights, new_rows
from xmc_stream.models.model import refuse_model
from xmc_stream.store.inventory import LOGS, SEAL
from xmc_stream.store.model import CHUNK_BYTES, COMPACTED, LABEL_COUNTS, begin_model, finish_model
from xmc_stream.store.names import SELECTED, n_converted, select_names, write_selection
from xmc_stream.store.remote import copy_file
from xmc_stream.system.memory import MemoryLimit

if TYPE_CHECKING:
    from xmc_stream.runtime.job import Receipt
    from xmc_stream.runtime.ledger import Ledger

_COMMAND = "compact"
# of the training: a compact model is not its outcome, and no training goes on from it
_LEFT_OUT = ("format", "version", "identity", LOGS, SEAL, SELECTED)


def compact(model: RowSparseWeights, path: Path, overwrite: bool, memory_limit: str | float | None) -> None:
    """Write it: see `Model.compact`."""
    from xmc_stream.runtime.making import COMMAND, STORE, make, refuse_all

    def refuse(path: Path) -> None:
        refuse_model(path, model.path, overwrite)

    refuse_all([path], refuse, _COMMAND)
    needs = {
        "selected features": 5 * 8 * model.n_selected,
        "rows": 2 * 4 * max(WINDOW, model.n_labels),
        "writers": 2 * CHUNK_BYTES,
    }
    MemoryLimit.kept(memory_limit).check(needs, "compacting a model")

    def write(work: Path, ledger: Ledger) -> Receipt:
        _write(model, work / "model", work / STORE)
        return {}

    make(path, {COMMAND: _COMMAND, "model": model.attributes.get(SEAL)}, write, refuse, anew=True)


def _write(model: RowSparseWeights, work: Path, path: Path) -> None:
    begin_model(work)
    with new_rows(work / ROWS, model.n_selected, model.n_labels) as writer:
        for first, rows in model.rows.blocks():
            writer.append(np.arange(first, first + len(rows)), rows)
    select_names(model.path, work, model.rows.features())
    if (model.path / LABEL_COUNTS).exists():
        shutil.copytree(model.path / LABEL_COUNTS, work / LABEL_COUNTS, copy_function=copy_file)
    kept = {name: value for name, value in model.attributes.items() if name not in _LEFT_OUT}
    attributes = {
        **kept,
        "n_features": model.n_selected,
        COMPACTED: {"of": model.path.name},
        **write_selection(work, model.selected_features(), n_converted(model.attributes)),
    }
    finish_model(work, path, attributes)
