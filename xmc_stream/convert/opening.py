"""Which source an input is: paths of files or what is in memory, with a matrix beside it, and with names of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from xmc_stream.convert.options import ConvertOptions, Like
from xmc_stream.convert.source import Source
from xmc_stream.errors import InputError


def open_source(source: Any, options: ConvertOptions, like: Like | None) -> Source:
    """The source by what it is: paths of files, or matrices. like: as it was taken over, whatever `options` names."""
    beside = paths_of(options.beside, "beside", "save a matrix by numpy.save and give its path")
    if beside or (like and like.beside):
        from xmc_stream.convert.formats.beside import BesideSource, words_of

        own = open_source(source, replace(options, beside=None), like and words_of(like, beside))
        normalize = options.normalize or (like.normalize if like else None)
        return cast("Source", BesideSource(own, beside, like, normalize, options.skip))
    names = {"features": options.feature_names, "labels": options.label_names}
    files = {what: Path(path) for what, path in names.items() if path is not None}
    if files:
        from xmc_stream.convert.formats.beside import NamedSource

        own = open_source(source, replace(options, feature_names=None, label_names=None), like)
        return cast("Source", NamedSource(own, files))
    options = replace(options, like=None, scheduler=None)  # parts are sent with them to workers
    if are_files(source, options.labels):
        from xmc_stream.convert.formats.registry import open_source as open_files

        paths = paths_of(source, "the source")
        return open_files(paths, replace(options, labels=paths_of(options.labels, "labels")), like)
    from xmc_stream.convert.formats.memory import open_memory

    return open_memory(source, options, like)


def are_files(source: Any, labels: Any) -> bool:
    """Whether a source is a path, or several. A list of strings is texts where its labels are in memory too."""
    if not isinstance(source, list | tuple):
        return isinstance(source, str | os.PathLike)
    return _all_paths(source) and (
        labels is None or _all_paths(labels if isinstance(labels, list | tuple) else [labels])
    )


def _all_paths(several: Sequence[Any]) -> bool:
    return bool(several) and all(isinstance(path, str | os.PathLike) for path in several)


def paths_of(given: Any, what: str, advice: str = "give files for both, or matrices for both") -> tuple[Path, ...]:
    """Paths, of one or of several. Raises InputError for anything else."""
    if given is None:
        return ()
    several = given if isinstance(given, list | tuple) else [given]
    if not all(isinstance(path, str | os.PathLike) for path in several):
        kinds = ", ".join(sorted({type(path).__name__ for path in several}))
        raise InputError(f"{what} must be paths of files here, not {kinds}: {advice}")
    return tuple(Path(path) for path in several)
