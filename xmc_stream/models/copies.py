"""Models that are written from others: a copy of the files, and which paths they may take."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from xmc_stream import flags
from xmc_stream.errors import InputError
from xmc_stream.runtime.ledger import unfinished_run
from xmc_stream.store.inventory import SEAL
from xmc_stream.store.model import is_model
from xmc_stream.store.nodes import attributes_of
from xmc_stream.store.places import target_path
from xmc_stream.store.remote import copy_file

if TYPE_CHECKING:
    from xmc_stream.runtime.job import Receipt
    from xmc_stream.runtime.ledger import Ledger


def copy_model(source: Path, path: Path, overwrite: bool) -> None:
    """Copy the files of a model. Raises InputError where something stands at `path`, StoreError where it cannot be written."""
    from xmc_stream.runtime.making import COMMAND, STORE, make

    def write(work: Path, ledger: Ledger) -> Receipt:
        shutil.copytree(source, work / STORE, copy_function=copy_file)
        return {}

    identity = {COMMAND: "save", "model": attributes_of(source).get(SEAL)}
    make(target_path(path), identity, write, lambda path: refuse_model(path, source, overwrite), anew=True)


def refuse_model(path: Path, source: Path, overwrite: bool) -> None:
    """Raise InputError where a model that is made of another one must not take this path."""
    if path.absolute() == source.absolute():
        raise InputError(f"{path} is the model itself: give another name")
    if path.exists() and not (overwrite and is_model(path)):
        raise InputError(f"{path} exists: give another name, or " + flags.OVERWRITE + " to replace a model")
    if run := unfinished_run(path):
        raise InputError(
            f"{run} is a training that is not finished: finish it by its train command, remove it, or give another name"
        )
