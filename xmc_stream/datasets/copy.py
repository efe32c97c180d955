"""Copying finished stores to a URL, from a URL, or from folder to folder.

A file is compared with its checksum before it gets its name at the target, and the outermost zarr.json comes last: half
a copy is no store. What is half there goes on, as a file beside the others says of which store it is.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import google_crc32c

from xmc_stream.errors import InputError, StoreError, in_urls
from xmc_stream.memory import peak_resident
from xmc_stream.progress import working
from xmc_stream.stop import stop_if_unwanted
from xmc_stream.store.encoding import publish, writing
from xmc_stream.store.inventory import refuse_broken_seal, take_inventory
from xmc_stream.store.nodes import attributes_of
from xmc_stream.store.remote import (
    COPYING,
    as_path,
    fetch_to,
    file_system,
    is_mirrored,
    is_url,
    listing,
    local_path,
    persistent,
    size_of,
)

_AT_A_TIME = 4  # files: s3fs has each in memory, at most 32 MiB
_PIECE = 1 << 20
_LAST = "zarr.json"  # what makes it a store
_OURS = "xmc_stream "  # how the formats of this library begin


def copy(source: str | Path, target: str | Path, overwrite: bool = False, progress: bool = False) -> dict[str, Any]:
    """Copy a finished dataset, model or predictions to a URL, from a URL, or from folder to folder.

    Every file is compared with its checksum on the way. A copy that was killed goes on when it is asked for again: files
    that are there with their size are passed over.

    Parameters
    ----------
    source : str or Path
        The folder of the store, or its URL.
    target : str or Path
        Where the copy is to be, a folder or a URL.
    overwrite : bool, default False
        Replace a store at the target, or half a copy of another one.
    progress : bool, default False
        Show a bar on stderr, where that is a terminal.

    Returns
    -------
    dict
        source, target, n_files, bytes, copied_files, copied_bytes (without those passed over), seconds and peak_rss.

    Raises
    ------
    InputError
        Something stands at the target, or a URL cannot be that of a store.
    StoreError
        The source is no finished store, or is damaged, or a URL cannot be reached.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
    >>> X = sp.csr_matrix(np.repeat(np.eye(3, dtype=np.float32), 10, axis=0))  # row i has label i // 10
    >>> _ = xs.convert(X, "copied.xmc", labels=X)
    >>> report = xs.copy("copied.xmc", "memory://copied.xmc")
    >>> xs.open_dataset("memory://copied.xmc").n_samples
    30
    """
    began = time.perf_counter()
    path = as_path(source)
    sizes, crcs = _looked_at(path)
    about = (path / _LAST).read_bytes()
    to: _Target = _Remote(str(target)) if is_url(target) else _Folder(local_path(target).absolute())
    with working("copy", progress) as bar, writing(Path(to.where), "give the same command again, it goes on"):
        done, left = to.finished(), list[str]()
        if done is None or to.read(_LAST) != about or any(done.get(name) != size for name, size in sizes.items()):
            if done is not None:
                to.refuse_unless(overwrite)
                to.clear()
            there = to.begun(about, overwrite)
            left = [name for name, size in sizes.items() if name != _LAST and there.get(name) != size]
            n_bytes, given = max(sum(sizes[name] for name in left), 1), 0
            with tempfile.TemporaryDirectory(prefix="xmc_stream-") as scratch, ThreadPoolExecutor(_AT_A_TIME) as pool:

                def give(name: str) -> str:
                    stop_if_unwanted()
                    to.give(name, path / name, crcs.get(name), Path(scratch))
                    return name

                try:
                    for name in pool.map(give, left):
                        given += sizes[name]
                        bar.advance(given / n_bytes)
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
            to.finish(about)
            left.append(_LAST)
    return {
        "source": in_urls(str(path)), "target": str(target), "n_files": len(sizes), "bytes": sum(sizes.values()),
        "copied_files": len(left), "copied_bytes": sum(sizes[name] for name in left),
        "seconds": round(time.perf_counter() - began, 3), "peak_rss": peak_resident(),
    }  # fmt: skip


def _looked_at(path: Path) -> tuple[dict[str, int], dict[str, str]]:
    """Sizes of the files of a store, and what the checksums of its chunk files must be, "" where nobody noted it."""
    try:
        whole = str(attributes_of(path).get("format", "")).startswith(_OURS)
    except (FileNotFoundError, ValueError):
        whole = False
    if not whole:
        raise StoreError(f"{path} is no finished dataset or model: check the name")
    refuse_broken_seal(path)
    inventory = take_inventory(path)
    for line in inventory.damage:
        raise StoreError(f"{line}: the store is damaged; make it again")
    sizes = _sizes(path)
    crcs: dict[str, str] = {}
    for array in inventory.arrays:
        folder = Path(array.folder).relative_to(path)
        for k, name in enumerate(array.names()):
            crcs[str(folder / name)] = "" if array.crcs is None else array.crcs[8 * k : 8 * k + 8]
            if sizes[str(folder / name)] != array.chunk_bytes + 4:
                raise StoreError(f"{path / folder / name} has not its full size: the store is damaged; make it again")
    return sizes, crcs


def _refuse_damaged(file: Path, named: Path, noted: str) -> None:
    """Raise StoreError where a chunk file does not fit its checksum, or is another one's. noted: see `_looked_at`."""
    crc, left = 0, size_of(file) - 4
    with open(file, "rb") as opened:
        while left and (piece := opened.read(min(left, _PIECE))):
            crc, left = google_crc32c.extend(crc, piece), left - len(piece)
        stored = opened.read()
    if crc.to_bytes(4, "little") != stored or noted not in ("", f"{crc:08x}"):
        raise StoreError(f"{named} fails its checksum: the store is damaged; make it again")


class _Target(ABC):
    """Where a copy is made. where: its name."""

    def __init__(self, where: str) -> None:
        self.where = where

    def refuse_unless(self, overwrite: bool) -> None:
        """Raise InputError where the store that stands there must not be replaced, or is none of ours."""
        if not overwrite:
            raise InputError(
                f"{self.where} exists, and is another store: give another name, or --overwrite to replace it"
            )
        try:
            ours = str(json.loads(self.read(_LAST))["attributes"]["format"]).startswith(_OURS)
        except (ValueError, LookupError, TypeError, OSError):
            ours = False
        if not ours:
            raise InputError(f"{self.where} exists and is something else: give another name, or remove it yourself")

    def begun(self, about: bytes, overwrite: bool) -> dict[str, int]:
        """Sizes of what an earlier copy of the same store left. about: that store's outermost zarr.json."""
        mark = hashlib.sha256(about).hexdigest().encode()
        there = self.half()
        if there and (COPYING not in there or self.read(COPYING) != mark):
            if COPYING not in there or not overwrite:
                raise InputError(
                    f"{self.where} has half a copy of another store, or other files: remove them, or give another name"
                )
            self.clear()
            there = {}
        self.put(COPYING, mark)
        return there

    @abstractmethod
    def finished(self) -> dict[str, int] | None:
        """Sizes of the files of a store that is there."""

    @abstractmethod
    def half(self) -> dict[str, int]:
        """Sizes of the files of what is no store yet."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """A small file that is there."""

    @abstractmethod
    def put(self, name: str, content: bytes) -> None:
        """Write a small file."""

    @abstractmethod
    def give(self, name: str, file: Path, noted: str | None, scratch: Path) -> None:
        """Copy a file, after a look at its checksum. noted: as `_looked_at` has it; None for what is no chunk."""

    @abstractmethod
    def clear(self) -> None:
        """Remove all that is there."""

    @abstractmethod
    def finish(self, about: bytes) -> None:
        """Make it a store. about: its outermost zarr.json."""


class _Folder(_Target):
    """A folder. It is made under the name of an unfinished one."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path, self.work = path, path.with_name(path.name + ".partial")
        self._at = path if path.exists() else self.work

    def finished(self) -> dict[str, int] | None:
        return _sizes(self.path) if self.path.exists() else None

    def half(self) -> dict[str, int]:
        return _sizes(self.work)

    def read(self, name: str) -> bytes:
        return (self._at / name).read_bytes()

    def put(self, name: str, content: bytes) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        (self.work / name).write_bytes(content)

    def give(self, name: str, file: Path, noted: str | None, scratch: Path) -> None:
        target = self.work / name
        target.parent.mkdir(parents=True, exist_ok=True)
        coming = target.with_name(target.name + ".coming")
        fetch_to(file, coming)
        if noted is not None:
            _refuse_damaged(coming, file, noted)
        coming.replace(target)

    def clear(self) -> None:
        """What is finished stays until the copy takes its name."""
        self._at = self.work

    def finish(self, about: bytes) -> None:
        for stray in self.work.rglob("*.coming"):
            stray.unlink()
        (self.work / COPYING).unlink()
        (self.work / _LAST).write_bytes(about)
        publish(self.work, self.path)


class _Remote(_Target):
    """A URL."""

    def __init__(self, url: str) -> None:
        self.fs, self.url = file_system(url)
        super().__init__(self.url)
        self.there = listing(self.fs, self.url)

    def _sizes(self) -> dict[str, int]:
        return {name: size for name, (size, _) in self.there.items()}

    def finished(self) -> dict[str, int] | None:
        return self._sizes() if _LAST in self.there else None

    def half(self) -> dict[str, int]:
        return self._sizes()

    def read(self, name: str) -> bytes:
        content: bytes = persistent(self.url, lambda: self.fs.cat_file(f"{self.url}/{name}"))
        return content

    def put(self, name: str, content: bytes) -> None:
        persistent(self.url, lambda: self.fs.pipe_file(f"{self.url}/{name}", content))

    def give(self, name: str, file: Path, noted: str | None, scratch: Path) -> None:
        local, url = file, f"{self.url}/{name}"
        if is_mirrored(file):
            local = scratch / hashlib.sha256(name.encode()).hexdigest()
            fetch_to(file, local)
        if noted is not None:
            _refuse_damaged(local, file, noted)
        persistent(url, lambda: self.fs.put_file(str(local), self.fs._strip_protocol(url)))
        if local != file:
            local.unlink()

    def clear(self) -> None:
        for name in sorted(self.there, key=lambda name: name != _LAST):  # then it is no store any more
            persistent(self.url, lambda name=name: self.fs.rm_file(self.fs._strip_protocol(f"{self.url}/{name}")))
        self.there = {}

    def finish(self, about: bytes) -> None:
        self.put(_LAST, about)
        persistent(self.url, lambda: self.fs.rm_file(self.fs._strip_protocol(f"{self.url}/{COPYING}")))


def _sizes(folder: Path) -> dict[str, int]:
    """Sizes of all files below a folder."""
    return {str(file.relative_to(folder)): size_of(file) for file in sorted(folder.rglob("*")) if not file.is_dir()}


__all__ = ["copy"]
