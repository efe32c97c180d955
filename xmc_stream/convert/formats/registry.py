"""Which format an input has: by its name, or by its content."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from xmc_stream import flags
from xmc_stream.convert.formats import (
    anndata,
    delimited,
    jsonl,
    libsvm,
    matrix_files,
    npz,
    numpy_arrays,
    parquet,
    xmlrepo,
)
from xmc_stream.convert.lines.files import HEAD, STANDARD_INPUT, Buffers, TextRange, forget, name_of
from xmc_stream.convert.lines.parser import bom_length
from xmc_stream.convert.messages import shown
from xmc_stream.convert.options import ConvertOptions, Like
from xmc_stream.convert.source import Source
from xmc_stream.errors import InputError


@dataclass(frozen=True)
class Format:
    """A format of files.

    recognises: whether a file is of it, by its path and first bytes (b"" of a folder); open_source: the set in some
    files; streams: whether they are read from the beginning to the end, and so from pipes too.
    """

    recognises: Callable[[Path, bytes], bool]
    open_source: Callable[[Sequence[Path], ConvertOptions, Like | None], Source]
    streams: bool = False


# by the name that --format takes, asked in this order
_FORMATS = {
    "npz": Format(npz.recognises, partial(matrix_files.open_source, npz.open_side)),
    "npy": Format(numpy_arrays.recognises, partial(matrix_files.open_source, numpy_arrays.open_side)),
    "parquet": Format(parquet.recognises, parquet.open_source),
    "anndata": Format(anndata.recognises, anndata.open_source),
    "xmlrepo": Format(xmlrepo.recognises, xmlrepo.open_source, streams=True),
    "jsonl": Format(jsonl.recognises, jsonl.open_source, streams=True),
    "libsvm": Format(libsvm.recognises, libsvm.open_source, streams=True),
    "csv": Format(delimited.recognises, delimited.open_source, streams=True),
}


def formats() -> dict[str, Format]:
    """All formats by their names."""
    return dict(_FORMATS)


def open_source(paths: Sequence[Path], options: ConvertOptions, like: Like | None) -> Source:
    """The set in these files, of the format named, or else recognised from the content of the first one.

    Raises InputError where a file cannot be read or nothing recognises it.
    """
    format = options.format
    if format is not None and format not in _FORMATS:
        raise InputError(f"format {format!r} is not known: it is one of {', '.join(_FORMATS)}")
    try:
        if format is None:
            format = _recognised(paths[0], "csv" if _of_csv(options) else None)
        if not _FORMATS[format].streams:
            _check_files(paths, format)
        _refuse_idle(paths[0], format, options)
        source = _FORMATS[format].open_source(paths, options, like)
    except BaseException:
        forget([*paths, *options.label_files])
        raise
    return source


def _refuse_idle(path: Path, format: str, options: ConvertOptions) -> None:
    """Raise InputError for an option that has nothing to do with the format: it may be a mistake of either."""
    if options.unlabelled and options.label_files:
        raise InputError(f"{path}: labels are named, and are to be left out: leave one of them out yourself")
    if format != "anndata" and (options.layer is not None or options.label_key is not None):
        raise InputError(
            f"{path} is {format}: " + flags.LAYER + " and " + flags.LABEL_KEY + " are of AnnData, leave them out"
        )
    if format not in ("jsonl", "parquet", "csv") and options.text_options is not None:
        raise InputError(f"{path} is {format}: options of raw text go with jsonl, parquet and csv, leave them out")
    if format != "csv" and _of_csv(options):
        of_csv = flags.DELIMITER + ", " + flags.QUOTE + " and " + flags.NO_HEADER
        raise InputError(f"{path} is {format}: " + of_csv + " are of csv, leave them out")


def _of_csv(options: ConvertOptions) -> bool:
    """Whether options of CSV were given."""
    return (options.delimiter, options.quote, options.header) != (None, None, True)


def _recognised(path: Path, otherwise: str | None) -> str:
    """The name of the format of a file; otherwise: where nothing recognises it."""
    head = _head(path)
    bom_length(name_of(path), head)
    for name, known in _FORMATS.items():
        if known.recognises(path, head):
            return name
    if otherwise:
        return otherwise
    if path.is_dir():
        raise InputError(f"{path} is a folder, and none of arrays (.npy) or of AnnData: name a file in it")
    line = shown(head[:HEAD].split(b"\n")[0])
    what = f"it begins with {line}" if head else "it is empty"
    raise InputError(
        f"{name_of(path)}:1: the format is not recognised, {what}, no header 'N D K' and no row: "
        "name it by " + flags.FORMAT + f" ({', '.join(_FORMATS)}), or check that this is the file you mean"
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
