"""Which format an input has, by its content."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from xmc_stream.convert.parser import bom_length
from xmc_stream.convert.source import Like, Options, Source
from xmc_stream.convert.text import HEAD, Buffers, TextRange
from xmc_stream.errors import InputError

# one module a format, asked in this order
_MODULES = ("npz", "numpy_arrays", "parquet", "anndata", "xmlrepo", "jsonl", "libsvm")


def formats() -> dict[str, Any]:
    """The modules of all formats by their names; none of them loads heavy libraries by itself."""
    modules = [import_module(f"xmc_stream.convert.{name}") for name in _MODULES]
    return {module.NAME: module for module in modules}


def open_source(paths: Sequence[Path], options: Options, like: Like | None, format: str | None = None) -> Source:
    """The set in these files, of the format named, or else recognised from the content of the first one.

    Raises InputError where a file cannot be read or nothing recognises it.
    """
    known = formats()
    if format is not None and format not in known:
        raise InputError(f"format {format!r} is not known: it is one of {', '.join(known)}")
    if format is None:
        head = _head(paths[0])
        bom_length(str(paths[0]), head)
        format = next((name for name, module in known.items() if module.recognises(paths[0], head)), None)
        if format is None and paths[0].is_dir():
            raise InputError(
                f"{paths[0]} is a folder, and holds neither indptr.npy nor AnnData: name a file, or the files, in it"
            )
        if format is None:
            shown = head[:40].split(b"\n")[0].decode("utf-8", "backslashreplace")
            what = f"it begins with {shown!r}" if head else "it is empty"
            raise InputError(
                f"{paths[0]}:1: the format is not recognised, {what}: name it by --format ({', '.join(known)})"
            )
    source: Source = known[format].open_source(paths, options, like)
    return source


def _head(path: Path) -> bytes:
    """The first bytes of a file, decompressed; b"" of a folder."""
    if path.is_dir():
        return b""
    text = TextRange(path).open(Buffers())
    try:
        return text.head(HEAD)
    finally:
        text.leave()
