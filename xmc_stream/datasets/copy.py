"""Copying finished stores to a URL, from a URL, or from folder to folder.

A file is compared with its checksum before it gets its name at the target, and what is there already is read and compared
too. Half a copy is no store: a folder gets its name when it is whole, and at a URL the outermost zarr.json comes last. What
is half there goes on, as a file beside the others says of which store it is.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from xmc_stream import flags
from xmc_stream.arguments import native_arguments
from xmc_stream.errors import InputError, StoreError, in_urls
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.ledger import Ledger
from xmc_stream.runtime.making import COMMAND, STORE, make
from xmc_stream.store.inventory import APART, files_of_store, refuse_broken_seal, take_inventory
from xmc_stream.store.nodes import CHECKSUM_BYTES, attributes_of, checksum
from xmc_stream.store.places import LOCK, put_back, remove_left, target_path, work_folder, writing
from xmc_stream.store.remote import (
    COPYING,
    as_path,
    fetch_to,
    file_system,
    is_mirrored,
    is_url,
    listing,
    persistent,
    size_of,
)
from xmc_stream.system.files import temporary_folder
from xmc_stream.system.memory import peak_resident
from xmc_stream.system.progress import current, working
from xmc_stream.system.stop import stop_if_unwanted

_AT_A_TIME = 4  # files: s3fs has each in memory, at most 32 MiB
_LAST = "zarr.json"  # what makes it a store
_OURS = "xmc_stream "  # how the formats of this library begin


@native_arguments
def copy(source: str | Path, target: str | Path, overwrite: bool = False, progress: bool = False) -> dict[str, Any]:
    """Copy a finished dataset, model or predictions to a URL, from a URL, or from folder to folder.

    Every file is compared with its checksum on the way. A copy that was killed goes on when it is asked for again: files
    that are there are read, compared with their checksums, and passed over where they are right.

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
    given = _looked_at(path)
    about, sizes = (path / _LAST).read_bytes(), given.sizes
    with working("copy", progress), writing(Path(str(target)), "give the same command again, it goes on"):
        if is_url(target):
            left = _to_url(given, _Remote(str(target)), about, overwrite)
        else:
            left = _to_folder(given, target_path(target).absolute(), about, overwrite)
    return {
        "source": in_urls(str(path)), "target": str(target), "n_files": len(sizes), "bytes": sum(sizes.values()),
        "copied_files": len(left), "copied_bytes": sum(sizes[name] for name in left),
        "seconds": round(time.perf_counter() - began, 3), "peak_rss": peak_resident(),
    }  # fmt: skip


@dataclass(frozen=True)
class _Given:
    """The store that is copied. sizes: of its files; crcs: what those of chunk files must be, "" where nobody noted it."""

    path: Path
    sizes: dict[str, int]
    crcs: dict[str, str]

    def left(self, to: _Folder | _Remote, there: dict[str, int]) -> list[str]:
        """The files that are not at the target as they are here. there: sizes of what is there."""

        def differs(name: str) -> bool:
            if there.get(name) != self.sizes[name]:
                return True
            if noted := self.crcs.get(name):
                with to.opened(name) as file:
                    return checksum(file, self.sizes[name] - CHECKSUM_BYTES) != noted
            return to.read(name) != (self.path / name).read_bytes()

        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            return [name for name, new in zip(self.sizes, pool.map(differs, self.sizes), strict=True) if new]

    def give(self, to: _Folder | _Remote, names: list[str]) -> None:
        """Copy files, some at a time, each after a look at its checksum."""
        whole, done, bar = max(sum(self.sizes[name] for name in names), 1), 0, current()
        with temporary_folder() as scratch, ThreadPoolExecutor(_AT_A_TIME) as pool:

            def give(name: str) -> str:
                stop_if_unwanted()
                to.give(name, self.path / name, self.crcs.get(name), scratch)
                return name

            try:
                for name in pool.map(give, names):
                    done += self.sizes[name]
                    bar.advance(done / whole)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def _to_folder(given: _Given, target: Path, about: bytes, overwrite: bool) -> list[str]:
    """Copy to a folder; returns the files that were copied."""
    there = _sizes(target) if (target / _LAST).is_file() else {}
    if there and not given.left(_Folder(target), there):
        put_back(target)
        remove_left(work_folder(target) / LOCK)
        return []

    def refuse(path: Path) -> None:
        if os.path.lexists(path):
            _refuse(_Folder(path), str(path), overwrite)

    def run(work: Path, ledger: Ledger) -> Receipt:
        to = _Folder(work / STORE)
        to.path.mkdir(exist_ok=True)
        ledger.add("begun", {})  # or what is there would not be gone on from
        left = given.left(to, _sizes(to.path))
        given.give(to, left)
        return {"left": left}

    identity = {COMMAND: "copy", "of": hashlib.sha256(about).hexdigest()}
    done = make(target, identity, run, refuse, spoilt=())
    return list(done["left"])


def _to_url(given: _Given, to: _Remote, about: bytes, overwrite: bool) -> list[str]:
    """Copy to a URL; returns the files that were copied. The outermost zarr.json comes last: half a copy is no store."""
    if _LAST in to.there:
        if not given.left(to, to.there):
            to.unmark()
            return []
        _refuse(to, to.url, overwrite)
        to.clear()
    left = [name for name in given.left(to, to.begun(about, overwrite)) if name != _LAST]
    given.give(to, left)
    to.put(_LAST, about)
    to.unmark()
    return [*left, _LAST]


def _looked_at(path: Path) -> _Given:
    """A store, finished and, as far as sizes and seals tell, whole."""
    try:
        whole = str(attributes_of(path).get("format", "")).startswith(_OURS)
    except (FileNotFoundError, ValueError):
        whole = False
    if not whole:
        raise StoreError(f"{path} is no finished dataset or model: check the name")
    for part in (path, *(path / name for name in APART if (path / name).exists())):
        refuse_broken_seal(part)
    inventory = take_inventory(path)
    for line in inventory.damage:
        raise StoreError(f"{line}: the store is damaged; make it again")
    sizes = _sizes(path)
    crcs: dict[str, str] = {}
    for array in inventory.arrays:
        folder = Path(array.folder).relative_to(path)
        for k, name in enumerate(array.names()):
            crcs[str(folder / name)] = "" if array.crcs is None else array.crcs[8 * k : 8 * k + 8]
            if sizes[str(folder / name)] != array.chunk_bytes + CHECKSUM_BYTES:
                raise StoreError(f"{path / folder / name} has not its full size: the store is damaged; make it again")
    return _Given(path, sizes, crcs)


def _refuse_damaged(file: Path, named: Path, noted: str) -> None:
    """Raise StoreError where a chunk file does not fit its checksum, or is another one's. noted: as in `_Given`."""
    with open(file, "rb") as opened:
        crc = checksum(opened, size_of(file) - CHECKSUM_BYTES)
    if not crc or noted not in ("", crc):
        raise StoreError(f"{named} fails its checksum: the store is damaged; make it again")


def _refuse(target: _Folder | _Remote, where: str, overwrite: bool) -> None:
    """Raise InputError where the store that stands there must not be replaced, or is none of ours."""
    try:
        ours = str(json.loads(target.read(_LAST))["attributes"]["format"]).startswith(_OURS)
    except (ValueError, LookupError, TypeError, OSError):
        ours = False
    if not ours:
        raise InputError(f"{where} exists and is something else: give another name, or remove it yourself")
    if not overwrite:
        raise InputError(
            f"{where} exists, and is another store, or damaged: give another name, or "
            + flags.OVERWRITE
            + " to replace it"
        )


@dataclass(frozen=True)
class _Folder:
    """A folder."""

    path: Path

    def read(self, name: str) -> bytes:
        """A small file that is there."""
        return (self.path / name).read_bytes()

    def opened(self, name: str) -> BinaryIO:
        """A file that is there, to be read once."""
        return open(self.path / name, "rb")

    def give(self, name: str, file: Path, noted: str | None, scratch: Path) -> None:
        """Copy a file, and look at its checksum. noted: as in `_Given`; None for what is no chunk."""
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        fetch_to(file, target)
        if noted is not None:
            _refuse_damaged(target, file, noted)


class _Remote:
    """A URL, with what `_Folder` has."""

    def __init__(self, url: str) -> None:
        self.fs, self.url = file_system(url)
        self.there = {name: size for name, (size, _) in listing(self.fs, self.url).items()}

    def begun(self, about: bytes, overwrite: bool) -> dict[str, int]:
        """Sizes of what an earlier copy of the same store left. about: that store's outermost zarr.json."""
        mark = hashlib.sha256(about).hexdigest().encode()
        if self.there and (COPYING not in self.there or self.read(COPYING) != mark):
            if COPYING not in self.there or not overwrite:
                raise InputError(
                    f"{self.url} has half a copy of another store, or other files: remove them, or give another name"
                )
            self.clear()
        self.put(COPYING, mark)
        return self.there

    def read(self, name: str) -> bytes:
        content: bytes = persistent(self.url, lambda: self.fs.cat_file(f"{self.url}/{name}"))
        return content

    def opened(self, name: str) -> BinaryIO:
        return io.BytesIO(self.read(name))

    def put(self, name: str, content: bytes) -> None:
        """Write a small file."""
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
        """Remove all that is there."""
        for name in sorted(self.there, key=lambda name: name != _LAST):  # then it is no store any more
            self._remove(name)
        self.there = {}

    def unmark(self) -> None:
        """It is a store: the file that says of which store it is half a copy goes."""
        if COPYING in listing(self.fs, self.url):
            self._remove(COPYING)

    def _remove(self, name: str) -> None:
        persistent(self.url, lambda: self.fs.rm_file(self.fs._strip_protocol(f"{self.url}/{name}")))


def _sizes(folder: Path) -> dict[str, int]:
    """Sizes of the files of a store."""
    return {name: size_of(folder / name) for name in sorted(files_of_store(folder))}
