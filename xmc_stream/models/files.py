"""The files of a model's folder: taken along by a pickle, written from one, and copied."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from xmc_stream.engine.summary import unfinished_run
from xmc_stream.errors import InputError
from xmc_stream.store.encoding import publish, writing
from xmc_stream.store.model import is_model
from xmc_stream.store.remote import copy_file, local_path


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path in it. Raises OSError where there is none."""
    folder.stat()
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write what `files_of` gave."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def copy_model(source: Path, path: Path, overwrite: bool) -> None:
    """Copy the files of a model. Raises InputError where something stands at `path`, StoreError where it cannot be written."""
    path = local_path(path)
    if path.absolute() == source.absolute():
        raise InputError(f"{path} is the model itself: give another name")
    if path.exists() and not (overwrite and is_model(path)):
        raise InputError(f"{path} exists: give another name, or overwrite=True to replace a model")
    if run := unfinished_run(path):
        raise InputError(f"{run} is a training that is not finished: finish it, remove it, or give another name")
    work = path.with_name(path.name + ".partial")
    with writing(path, "save again"):
        shutil.rmtree(work, ignore_errors=True)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, work, copy_function=copy_file)
            publish(work, path)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
