"""Which format an input has, by its content."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from xmc_stream.convert.lines.files import HEAD, STANDARD_INPUT, Buffers, TextRange, forget, name_of
from xmc_stream.convert.lines.parser import bom_length, shown
from xmc_stream.convert.source import Like, Options, Source
from xmc_stream.errors import InputError

# one module a format, asked in this order
_MODULES = ("npz", "numpy_arrays", "parquet", "anndata", "xmlrepo", "jsonl", "libsvm")
_TEXTS = ("xmlrepo", "jsonl", "libsvm")  # which are read from the beginning to the end, also from pipes


def formats() -> dict[str, Any]:
    """The modules of all formats by their names; none of them loads heavy libraries by itself."""
    modules = [import_module(f"xmc_stream.convert.formats.{name}") for name in _MODULES]
    return {module.NAME: module for module in modules}


def open_source(paths: Sequence[Path], options: Options, like: Like | None, format: str | None = None) -> Source:
    """The set in these files, of the format named, or else recognised from the content of the first one.

    Raises InputError where a file cannot be read or nothing recognises it.
    """
    known = formats()
    if format is not None and format not in known:
        raise InputError(f"format {format!r} is not known: it is one of {', '.join(known)}")
    try:
        if format is None:
            format = _recognised(paths[0], known)
        if format not in _TEXTS:
            _check_files(paths, format)
        _refuse_idle(paths[0], format, options)
        source: Source = known[format].open_source(paths, options, like)
    except BaseException:
        forget([*paths, *options.labels])
        raise
    return source


def _refuse_idle(path: Path, format: str, options: Options) -> None:
    """Raise InputError for an option that has nothing to do with the format: it may be a mistake of either."""
    if options.unlabelled and options.labels:
        raise InputError(f"{path}: labels are named, and are to be left out: leave one of them out yourself")
    if format != "anndata" and (options.layer is not None or options.label_key is not None):
        raise InputError(f"{path} is {format}: --layer and --label-key are of AnnData, leave them out")
    if format not in ("jsonl", "parquet") and options.text is not None:
        raise InputError(f"{path} is {format}: options of raw text go with jsonl and parquet, leave them out")


def _recognised(path: Path, known: dict[str, Any]) -> str:
    """The name of the format of a file."""
    head = _head(path)
    bom_length(name_of(path), head)
    for name, module in known.items():
        if module.recognises(path, head):
            return name
    if path.is_dir():
        raise InputError(f"{path} is a folder, and none of arrays (.npy) or of AnnData: name a file in it")
    line = shown(head[:HEAD].split(b"\n")[0])
    what = f"it begins with {line}" if head else "it is empty"
    raise InputError(
        f"{name_of(path)}:1: the format is not recognised, {what}, no header 'N D K' and no row: name it by --format "
        f"({', '.join(known)}), or check that this is the file you mean"
    )


def _check_files(paths: Sequence[Path], format: str) -> None:
    """Raises InputError for pipes, which are read once."""
    for path in paths:
        if path == STANDARD_INPUT or (path.exists() and not path.is_file() and not path.is_dir()):
            raise InputError(f"{name_of(path)} is {format} in a pipe, and is read at several places: save it to a file")


def _head(path: Path) -> bytes:
    """The first bytes of a file, decompressed; b"" of a folder."""
    if path.is_dir():
        return b""
    text = TextRange(path).open(Buffers())
    try:
        return text.head(HEAD)
    finally:
        text.leave()
