"""Files that are read, and temporary folders of this process.

What is read must be a regular file or, where a text may come through one, a pipe: a device may go on for ever.

Temporary folders are gone when the process ends, however it ends. All of them lie in one folder of the process. A shell
waits at a pipe whose other end this process holds. When the process ends, also by SIGTERM or SIGKILL, the system closes
that end, and the shell removes the folder. No handler of a signal is touched. Without a shell, an end by a signal leaves
the folder behind.
"""

from __future__ import annotations

import atexit
import errno
import mmap
import os
import shutil
import stat
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# bytes that the disk is asked for at a time: of more the kernel reads no more than its read-ahead, 128 KiB as it comes
ASKED = 1 << 17
_PREFIX = "xmc_stream-"
_WAIT = 'trap "" HUP INT TERM; read -r none; rm -rf -- "$1"'  # read ends at the end of file
# taken again by a thread that has it where the garbage collector, which runs anywhere, ends a block that was left
_lock = threading.RLock()
_roots: dict[tuple[int, str], Path] = {}  # by process and place: a forked process has one of its own


def regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file, for `open(path, "rb", opener=regular)`. Raises OSError, also for anything else."""
    # a pipe that nobody writes to is opened at once, and refused
    return _refusing(os.open(path, flags | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)), path, False)


def regular_or_pipe(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """The same, or of a pipe or terminal, whose writer is waited for."""
    return _refusing(os.open(path, flags | getattr(os, "O_CLOEXEC", 0)), path, True)


def _refusing(fd: int, path: str | os.PathLike[str], pipes: bool) -> int:
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode) or (pipes and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd))):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise OSError(errno.EINVAL, f"it is a {'' if pipes else 'pipe or '}device, and no file", os.fspath(path))


def own_folder(place: Path | None = None) -> Path:
    """A temporary folder, in `place` if given. It goes at the end of the process."""
    with _lock:
        return Path(tempfile.mkdtemp(dir=_root(place)))


@contextmanager
def temporary_folder(place: Path | None = None) -> Iterator[Path]:
    """A temporary folder, as long as the block lasts. place: where it is, as for what workers must see, or for large files."""
    folder = own_folder(place)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if place is not None:
            with _lock, suppress(OSError):  # another thread has one there
                folder.parent.rmdir()


@contextmanager
def kept_folder() -> Iterator[Path]:
    """A temporary folder that stays when the block ends, and goes when it fails."""
    folder = own_folder()
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def nameless_map(n_bytes: int, folder: Path) -> mmap.mmap:
    """Zeros in a file in a folder, mapped. It has no name: whoever holds the map has all there is of it.

    Raises OSError where the disk has no room.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):  # else a full disk ends the process, at some later write
            os.posix_fallocate(file.fileno(), 0, n_bytes)
        file.truncate(n_bytes)
        mapped = mmap.mmap(file.fileno(), n_bytes)
        if hasattr(mmap, "MADV_RANDOM"):  # a fault reads its page
            mapped.madvise(mmap.MADV_RANDOM)
        return mapped


def will_need(mapped: mmap.mmap, begin: int, n_bytes: int) -> None:
    """Have the disk begin to read some bytes of a map into the page cache."""
    if hasattr(mmap, "MADV_WILLNEED"):
        first, end = begin // mmap.PAGESIZE * mmap.PAGESIZE, min(begin + n_bytes, len(mapped))
        for at in range(first, end, ASKED):
            mapped.madvise(mmap.MADV_WILLNEED, at, min(ASKED, end - at))


def let_go(mapped: mmap.mmap) -> None:
    """Have the pages of a map leave this process: they stay in the page cache, or on disk."""
    if hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def outlives_process(path: str | Path) -> bool:
    """Whether a file may be wanted when this process has ended: it lies in none of its temporary folders.

    Else it need not be made durable: a fit of small data makes hundreds of files, and a slow disk takes milliseconds for each.
    """
    mine = (root for (process, _), root in list(_roots.items()) if process == os.getpid())
    return not any(str(path).startswith(f"{root}{os.sep}") for root in mine)


def removed_with(owner: object, folder: Path) -> None:
    """Have a temporary folder removed with an object of this process; a fork of the process leaves it alone."""
    weakref.finalize(owner, _remove_of, os.getpid(), folder)


def _root(place: Path | None) -> Path:
    """The folder of this process in a place, by default that for temporary files."""
    at = tempfile.gettempdir() if place is None else os.path.abspath(place)
    key = os.getpid(), at
    root = _roots.get(key)
    if root is None:
        hidden = "" if place is None else "."
        root = _roots[key] = Path(tempfile.mkdtemp(prefix=hidden + _PREFIX, dir=at))
        atexit.register(_remove_of, os.getpid(), root)
        _watch(root)
    else:  # what cleans up the place may have taken an empty one
        root.mkdir(mode=0o700, exist_ok=True)
    return root


def _remove_of(process: int, folder: Path) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _watch(folder: Path) -> None:
    """Start the shell that removes a folder when this process has ended. Its output goes nowhere."""
    read, _ = os.pipe()  # the end to write at stays open, and is not handed to programs that are started
    null = os.open(os.devnull, os.O_RDWR)
    actions = [(os.POSIX_SPAWN_DUP2, read, 0), *((os.POSIX_SPAWN_DUP2, null, n) for n in (1, 2))]
    try:
        with suppress(OSError, NotImplementedError):
            os.posix_spawn(
                "/bin/sh", ["sh", "-c", _WAIT, "sh", str(folder)], os.environ, file_actions=actions, setsid=True
            )
    finally:
        os.close(read)
        os.close(null)
