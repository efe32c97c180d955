"""Which format an input has: by its name, or by its content. A format's module is loaded when it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from xmc_stream import flags
from xmc_stream.convert.formats.texts import looked_at
from xmc_stream.convert.lines.files import HEAD, STANDARD_INPUT, forget, name_of
from xmc_stream.convert.messages import shown
from xmc_stream.convert.options import ConvertOptions, Like, refuse_idle
from xmc_stream.convert.source import Source
from xmc_stream.errors import InputError


@dataclass(frozen=True)
class Format:
    """A format of files.

    module: that reads it; begins: the first bytes of its files; holds: what stands in its folders; streams: texts, of which
    the module tells whether they are of this format, and which are read from the beginning to the end, and so from pipes
    too; matrix: it opens X or Y alone, see `matrix_files`.
    """

    module: str
    begins: tuple[bytes, ...] = ()
    holds: tuple[str, ...] = ()
    streams: bool = False
    matrix: bool = False

    def recognises(self, path: Path, head: bytes) -> bool:
        """Whether a file is of this format, by its path and first bytes (b"" of a folder)."""
        if path.is_dir():
            return bool(self.holds) and all((path / name).exists() for name in self.holds)
        return bool(_module(self.module).recognises(head)) if self.streams else head.startswith(self.begins)

    def open_source(self, paths: Sequence[Path], options: ConvertOptions, like: Like | None) -> Source:
        """The set in some files. Raises InputError."""
        module = _module(self.module)
        if self.matrix:
            source: Source = _module("matrix_files").open_source(module.open_side, paths, options, like)
        else:
            source = module.open_source(paths, options, like)
        return source


def _module(name: str) -> Any:
    return import_module(f"xmc_stream.convert.formats.{name}")


# by the name that --format takes, asked in this order
FORMATS = {
    "npz": Format("npz", (b"PK\x03\x04", b"PK\x05\x06"), matrix=True),  # the second of an empty zip file
    "npy": Format("numpy_arrays", (b"\x93NUMPY",), ("indptr.npy",), matrix=True),
    "parquet": Format("parquet", (b"PAR1",)),
    "anndata": Format("anndata", (b"\x89HDF\r\n\x1a\n",), ("obs", "var")),
    "xmlrepo": Format("xmlrepo", streams=True),
    "jsonl": Format("jsonl", streams=True),
    "libsvm": Format("libsvm", streams=True),
    "csv": Format("delimited", streams=True),
}


def open_source(paths: Sequence[Path], options: ConvertOptions, like: Like | None) -> Source:
    """The set in these files, of the format named, or else recognised from the content of the first one.

    Raises InputError where a file cannot be read or nothing recognises it.
    """
    format = options.format
    if format is not None and format not in FORMATS:
        raise InputError(f"format {format!r} is not known: it is one of {', '.join(FORMATS)}")
    try:
        if format is None:
            format = _recognised(paths[0], "csv" if options.of_csv else None)
        if not FORMATS[format].streams:
            _check_files(paths, format)
        if options.unlabelled and options.label_files:
            raise InputError(f"{paths[0]}: labels are named, and are to be left out: leave one of them out yourself")
        refuse_idle(paths[0], format, options)
        return FORMATS[format].open_source(paths, options, like)
    except BaseException:
        forget([*paths, *options.label_files])
        raise


def _recognised(path: Path, otherwise: str | None) -> str:
    """The name of the format of a file; otherwise: where nothing recognises it."""
    head = _head(path)
    for name, known in FORMATS.items():
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
        "name it by " + flags.FORMAT + f" ({', '.join(FORMATS)}), or check that this is the file you mean"
    )


def _check_files(paths: Sequence[Path], format: str) -> None:
    """Raises InputError for pipes, which are read once."""
    for path in paths:
        if path == STANDARD_INPUT or (path.exists() and not path.is_file() and not path.is_dir()):
            raise InputError(f"{name_of(path)} is {format} in a pipe, and is read at several places: save it to a file")


def _head(path: Path) -> bytes:
    """The first bytes of a file, decompressed; b"" of a folder. Raises InputError for UTF-16."""
    if path.is_dir():
        return b""
    with looked_at(path) as file:
        return file.head(HEAD)
