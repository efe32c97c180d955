"""Stores behind a URL: mirrored in a cache folder of the host, whose files are fetched when they are first opened.

A mirror is a folder like the store, `CACHE/xmc_stream-urls/s3:/bucket/train.xmc@VERSION`: its zarr.json files are there from
the beginning, and a chunk file that was not fetched yet is a symbolic link to nowhere that says its size. So the rest of
the library works with paths; it only opens files by `open_file`, which fetches. VERSION is a hash of the store's
zarr.json and of the names, sizes and ETags of its files: another content is another mirror. A path says by itself where
it comes from, so a job that carries it runs on any host.

Fetched chunk files go, those first that were opened longest ago, when the cache is larger than XMC_STREAM_CACHE_SIZE: each
becomes a link again, and who has it open or mapped keeps it. Credentials are the business of fsspec's configuration.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from xmc_stream.errors import MIRRORS, NO_ROOM, InputError, StoreError, XmcStreamError
from xmc_stream.system.files import regular
from xmc_stream.system.memory import parse_size
from xmc_stream.system.stop import stop_if_unwanted

_FETCHERS = 8  # files of a host's process that are fetched beside each other
_SMALL_FETCHERS = 32  # where files are small, their number makes the time
_TRIES, _PAUSE = 5, 0.5  # requests for a file, beside those that fsspec repeats itself; seconds before the second
_DEFAULT_BYTES = 20e9
_FREED = 0.1  # of the bound, that is made free at once
_SLOTS = 256  # locks of files: two files of one slot wait for each other
_WAITING = 64  # files that are asked for ahead, at most
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)
_MIRROR = re.compile(rf"(.*/{MIRRORS})/([a-z][a-z0-9+.-]*):/(.+?)@([0-9a-f]{{12}})(?:/(.*))?", re.DOTALL)
_CHUNK = re.compile(r"(?:.*/)?c(?:/\d+)+")
_LINK = re.compile(r"(\d+) bytes behind .*", re.DOTALL)
_SECRETS = ("secret", "token", "password", "key")
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
COPYING = "xmc_stream-copy.json"  # in a store that is being copied: of what

# of files that are fetched ahead, by process: a fork has no threads of its parent
_queues: dict[int, SimpleQueue[str]] = {}
_systems: dict[tuple[int, str, str], Any] = {}  # fsspec's, by process, protocol and host or bucket
_asked: set[str] = set()  # files in such a queue
_lock = threading.Lock()


def is_url(name: object) -> bool:
    """Whether a name is a URL, and no path."""
    return isinstance(name, str) and _URL.fullmatch(name) is not None


def is_mirrored(path: Path | str) -> bool:
    """Whether a path leads into the mirror of a store behind a URL."""
    return f"/{MIRRORS}/" in str(path)


def local_path(name: str | Path) -> Path:
    """The path of what is written, or is no store. Raises InputError for a URL."""
    if is_url(name) or is_mirrored(name):
        raise InputError(
            f"{name} is a URL, and here a file or folder is needed, of this host or shared: `xmc-stream copy` takes finished "
            "datasets and models to a URL, and from there"
        )
    return _no_lost_slash(name)


def _no_lost_slash(name: str | Path) -> Path:
    """The path. Raises InputError where it was a URL: pathlib makes s3:/bucket of s3://bucket."""
    path = Path(name)
    if re.match("[a-z][a-z0-9+.-]+:/", str(name)) and not path.exists():
        raise InputError(f"{name} looks like a URL that went through pathlib, which drops a slash: give URLs as a str")
    return path


def as_path(name: str | Path) -> Path:
    """The folder of a store that is read: for a URL its mirror, which is made, or looked up with the store as it is now.

    Raises InputError for a URL that cannot be one of a store, StoreError where it cannot be reached or has none.
    """
    if not is_url(name):
        return _no_lost_slash(name)
    fs, url = file_system(str(name))
    if url.startswith("file://"):
        return Path(url.removeprefix("file://"))
    files, version = _files(fs, url)
    path = _mirrors() / f"{url.replace('://', ':/', 1)}@{version}"
    _make_mirror(fs, url, _mirrors(), path, files)
    for old in path.parent.glob(f"{path.name[:-13]}@*"):  # the store was written again
        if old != path and _MIRROR.fullmatch(str(old)):
            shutil.rmtree(old, ignore_errors=True)
    return path


def reach(path: str | Path) -> None:
    """Make the mirror that a path leads into, where this host does not have it. Raises StoreError where that fails."""
    found = _MIRROR.fullmatch(str(path))
    if found is None:
        return
    root, protocol, rest, version, _ = found.groups()
    folder, url = Path(f"{root}/{protocol}:/{rest}@{version}"), f"{protocol}://{rest}"
    if folder.is_dir():
        return
    fs, _ = file_system(url)
    files, now = _files(fs, url)
    if now != version:
        raise StoreError(f"{url} was changed while it was read: give the same command again")
    _make_mirror(fs, url, Path(root), folder, files)


def refuse_unreachable(path: str | Path) -> None:
    """Raise StoreError where a path leads into a mirror, and this process cannot read what stands behind its URL."""
    found = _MIRROR.fullmatch(str(path))
    if found is not None:
        reach(path)
        url = f"{found[2]}://{found[3]}/zarr.json"
        fs, _ = file_system(url)
        persistent(url, lambda: fs.cat_file(url))


def open_file(path: str | Path) -> int:
    """A descriptor to read a file of a store by. One that is not here yet is fetched. Raises OSError, also where it is none."""
    while True:
        try:
            fd = regular(path)
        except FileNotFoundError:
            if not is_mirrored(path):
                raise
            reach(path)
            if not os.path.lexists(path):
                raise
            _fetch(str(path))  # nothing where another did it meanwhile; and again, as another may have removed it since
        else:
            if is_mirrored(path):
                with suppress(OSError):  # when it was last wanted
                    os.utime(path)
            return fd


def size_of(file: int | str | Path) -> int:
    """Bytes of a file of a store, by its path or descriptor, whether it was fetched or not. Raises OSError."""
    while True:
        try:
            return os.stat(file).st_size
        except FileNotFoundError:
            if isinstance(file, int) or not is_mirrored(file):
                raise
            if (size := _announced(str(file))) is not None:
                return size
            if not os.path.lexists(file):
                raise  # else it was fetched just now


def copy_file(source: str | Path, target: str | Path) -> None:
    """Copy a file of a store."""
    with open(open_file(source), "rb") as read, open(target, "wb") as write:
        shutil.copyfileobj(read, write, 1 << 20)


def fetch_to(source: Path, target: Path) -> None:
    """Copy a file of a store; one of a mirror that is not here yet is fetched without a place in the cache."""
    found, size = _MIRROR.fullmatch(str(source)), _announced(str(source))
    if found is None or size is None:
        copy_file(source, target)
        return
    url = f"{found[2]}://{found[3]}/{found[5]}"
    _download(file_system(url)[0], url, target, size)


def link_or_copy(source: str | Path, target: str | Path) -> bool:
    """One file of two stores, as no file of a finished store is written again; whether it is one.

    A copy of what was fetched, which may go, and where the file system has no hard link to it.
    """
    if not is_mirrored(source):
        try:
            os.link(source, target)
            return True
        except OSError as error:
            if error.errno not in _NO_LINKS:  # above all where `target` is there: it may be the very file
                raise
    copy_file(source, target)
    return False


def ask_for(files: Sequence[Path]) -> bool:
    """Begin to fetch files that are not here yet, beside each other and beside the caller; whether there were some."""
    missing = [str(file) for file in files if _announced(str(file)) is not None]
    with _lock:
        queue = _queues.get(os.getpid())
        if missing and queue is None:
            queue = _queues[os.getpid()] = SimpleQueue()
            _asked.clear()
            for _ in range(_FETCHERS):  # daemons, as a process that ends does not wait for them
                threading.Thread(target=_fetch_ahead, args=(queue,), name="xmc_stream-fetch", daemon=True).start()
        for file in missing:
            if queue is not None and file not in _asked and len(_asked) < _WAITING:
                _asked.add(file)
                queue.put(file)
    return bool(missing)


def _fetch_ahead(queue: SimpleQueue[str]) -> None:
    while True:
        file = queue.get()
        with suppress(XmcStreamError, OSError):  # who needs the file is told
            _fetch(file)
        _asked.discard(file)


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the URL without a slash at its end.

    Raises InputError for a URL that no store can have, StoreError where a library is missing.
    """
    found = _URL.fullmatch(url)
    protocol, rest = found.groups() if found else ("", "")
    if "@" in rest.partition("/")[0]:
        raise InputError(
            f"the URL {protocol}://... has a user or a password in it: leave them out, and give credentials by fsspec's "
            "configuration, as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    rest = rest.rstrip("/")
    parts = rest.split("/")
    if any(part in ("", ".", "..") for part in parts[1:]) or re.search(r"[?#\s\0]|::", rest) or not rest.strip("/"):
        raise InputError(f"{url.partition('?')[0]} is not the URL of a store: write it as s3://bucket/folder/train.xmc")
    url, key = f"{protocol}://{rest}", (os.getpid(), protocol, parts[0])
    if key in _systems:
        return _systems[key], url
    import fsspec

    try:
        fs, _ = fsspec.core.url_to_fs(url)
    except ImportError as error:
        extra = "'xmc_stream[s3]'" if protocol in ("s3", "s3a") else str(error)
        raise StoreError(f"{url} needs a library that is not installed: pip install {extra}") from None
    except ValueError:
        raise InputError(f"{url}: no library of fsspec opens {protocol}:// URLs: check the name") from None
    _systems[key] = fs  # fsspec has one for each thread, and each takes a tenth of a second and a connection
    return fs, url


def persistent(url: str, work: Any) -> Any:
    """What a request about a URL gives, a function of no arguments. Raises StoreError where it fails again and again."""
    for again in range(_TRIES):
        stop_if_unwanted()
        try:
            return work()
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 (each library of fsspec has kinds of errors of its own)
            last = error
            final = isinstance(error, FileNotFoundError | NotImplementedError) or _denied(error)
            if final or getattr(error, "errno", None) in NO_ROOM:
                break
            if again + 1 < _TRIES:
                time.sleep(_PAUSE * 2**again)
    raise _failed(url, last) from None


def _denied(error: Exception) -> bool:
    # the second is botocore's, which is no OSError
    return isinstance(error, PermissionError) or "Credentials" in type(error).__name__


def _failed(url: str, error: Exception) -> StoreError:
    said = " ".join(f"{type(error).__name__}: {error}".split())
    for name, value in os.environ.items():
        if len(value) > 3 and any(word in name.lower() for word in _SECRETS):
            said = said.replace(value, "***")
    if getattr(error, "errno", None) in NO_ROOM:
        return StoreError(
            f"{url}: no room for it in the cache folder: make some there, or set XMC_STREAM_CACHE to another folder, or "
            "XMC_STREAM_CACHE_SIZE to fewer bytes"
        )
    if isinstance(error, FileNotFoundError):
        return StoreError(f"{url} is not there: check the name ({said[:200]})")
    if _denied(error):
        return StoreError(
            f"{url} may not be read or written ({said[:200]}): give credentials by fsspec's configuration, as "
            "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or AWS_PROFILE"
        )
    return StoreError(f"{url} cannot be reached ({said[:200]}): look at the network and give the same command again")


def listing(fs: Any, url: str) -> dict[str, tuple[int, str]]:
    """Size and ETag of each file of a folder behind a URL, by its name in it; {} where there is none."""
    key = fs._strip_protocol(url)

    def find() -> dict[str, Any]:
        fs.invalidate_cache()
        with suppress(FileNotFoundError):
            return dict(fs.find(key, detail=True))
        return {}

    files = {}
    for name, about in sorted(persistent(url, find).items()):
        inside = name.removeprefix(key).lstrip("/")
        size = about.get("size")
        if size is None:
            size = persistent(url, lambda name=name: fs.size(name))
        stamp = next((str(about[of]) for of in ("ETag", "etag", "mtime", "created") if about.get(of)), "")
        if about.get("type") != "directory" and inside:
            files[inside] = int(size), stamp
    return files


def _files(fs: Any, url: str) -> tuple[dict[str, tuple[int, str]], str]:
    """The files of a store, as `listing` has them, and its version. Raises StoreError where there is none."""
    files = listing(fs, url)
    if "zarr.json" not in files:
        half = "a copy that is not finished: give its `xmc-stream copy` again" if COPYING in files else "check the name"
        raise StoreError(f"{url} is no dataset and no model, as it has no zarr.json: {half}")
    files.pop(COPYING, None)
    about = persistent(url, lambda: fs.cat_file(f"{url}/zarr.json"))
    return files, hashlib.sha256(about + repr(sorted(files.items())).encode()).hexdigest()[:12]


def _mirrors() -> Path:
    named = os.environ.get("XMC_STREAM_CACHE")
    top = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return top.absolute() / MIRRORS


def _make_mirror(fs: Any, url: str, root: Path, path: Path, files: dict[str, tuple[int, str]]) -> None:
    """All folders, all files that are no chunks, and links for the chunks."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root, f"mirror-{_slot(str(path))}"):
            if path.is_dir():
                return
            work = path.with_name(path.name + ".partial")
            shutil.rmtree(work, ignore_errors=True)
            for folder in sorted({str(work / name).rpartition("/")[0] for name in files}):
                os.makedirs(folder, exist_ok=True)
            small = []
            for name, (size, _) in files.items():
                if _CHUNK.fullmatch(name):
                    os.symlink(f"{size} bytes behind {url}/{name}", work / name)
                else:
                    small.append(name)
            with ThreadPoolExecutor(_SMALL_FETCHERS) as pool:
                list(pool.map(lambda name: _download(fs, f"{url}/{name}", work / name, files[name][0]), small))
            work.rename(path)
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(
            f"{error.filename or root}: {error.strerror or error}: it is the folder for what is fetched from {url}: set "
            "XMC_STREAM_CACHE to one that can be written, on every host"
        ) from None


def _download(fs: Any, url: str, target: Path, size: int) -> None:
    """Fetch a file. Raises StoreError where it cannot be had, or has another size than its folder says."""

    def fetch() -> None:
        fs.get_file(fs._strip_protocol(url), str(target))
        if (got := target.stat().st_size) != size:
            raise OSError(f"{got} bytes came of {size}")

    persistent(url, fetch)


def _announced(path: str) -> int | None:
    """Bytes of a file of a mirror that was not fetched; None for any other path."""
    if not is_mirrored(path):
        return None
    try:
        link = _LINK.fullmatch(os.readlink(path))
    except OSError:
        return None
    return int(link[1]) if link else None


def _fetch(path: str) -> None:
    """Fetch a chunk file, unless that is done: once for all threads and processes of the host."""
    found = _MIRROR.fullmatch(path)
    if found is None:
        raise FileNotFoundError(path)
    root, protocol, rest, _, inside = found.groups()
    url, slot = f"{protocol}://{rest}/{inside}", _slot(path)
    with _locked(Path(root), slot):
        size = _announced(path)
        if size is None:
            return
        target = Path(root) / ".partial" / slot
        target.parent.mkdir(exist_ok=True)
        _make_room(Path(root), size)
        _download(file_system(url)[0], url, target, size)
        target.replace(path)


def _slot(path: str) -> str:
    return str(int(hashlib.sha256(path.encode()).hexdigest()[:8], 16) % _SLOTS)


@contextmanager
def _locked(root: Path, name: str) -> Iterator[int]:
    """One thread of one process of the host at a time; what is given is the lock file, open."""
    folder = root / ".locks"
    folder.mkdir(exist_ok=True)
    fd = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


def _make_room(root: Path, size: int) -> None:
    """Count a file that is fetched, and remove those wanted longest ago where all would be larger than the bound."""
    with _locked(root, "room") as fd:
        told = os.pread(fd, 32, 0)
        used = int(told) if told.isdigit() else None
        bound = _bound(root, used or 0)
        if used is None or used + size > bound:
            # others that are being fetched are not here yet: a process may hold a few chunks more than the bound
            used = _removed_down_to(root, bound - size, (1 - _FREED) * bound - size)
        told = str(used + size).encode()
        os.pwrite(fd, told, 0)
        os.ftruncate(fd, len(told))


def _bound(root: Path, used: int) -> float:
    if named := os.environ.get("XMC_STREAM_CACHE_SIZE"):
        try:
            return parse_size(named)
        except InputError:
            raise InputError(f"XMC_STREAM_CACHE_SIZE is {named!r}: write bytes as 200GB") from None
    return min(_DEFAULT_BYTES, (shutil.disk_usage(root).free + used) / 2)


def _removed_down_to(root: Path, most: float, to: float) -> int:
    """Where more bytes are here than `most`, remove files until there are `to`; returns how many are left."""
    files = []
    for folder, _, names in os.walk(root):
        for name in names:
            path = f"{folder}/{name}"
            found = _MIRROR.fullmatch(path)
            if found and _CHUNK.fullmatch(path) and not os.path.islink(path):
                with suppress(OSError):
                    about = os.stat(path)
                    files.append((about.st_mtime_ns, about.st_size, path, f"{found[2]}://{found[3]}/{found[5]}"))
    used = sum(size for _, size, _, _ in files)
    if used <= most:
        return used
    for _, size, path, url in sorted(files):
        if used <= to:
            break
        link = root / ".partial" / "removed"
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        os.symlink(f"{size} bytes behind {url}", link)
        link.replace(path)
        used -= size
    return used
