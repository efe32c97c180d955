"""Where a command may write, and how what is whole gets its name: names that are free, work folders, what is replaced.

What becomes NAME is made in the folder NAME.partial, which a ledger or lock file in it marks as ours. One process at a time
holds that file. What stood at NAME is in NAME.replaced, marked likewise, until the new one has the name. Whatever lies under
these names without such a mark is somebody else's: it is refused, never touched. No link is followed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from xmc_stream.errors import NO_ROOM, InputError, ResumeError, StoreError, XmcStreamError
from xmc_stream.store.chunks import compare_arrays
from xmc_stream.store.remote import copy_file, local_path
from xmc_stream.system.files import outlives_process
from xmc_stream.system.stop import copy_name, stop_if_unwanted, work_name

LOCK = "ledger"  # the file that marks a work folder
LEDGER = "ledger.jsonl"  # that of a training or tuning
_MARKS = (LOCK, LEDGER)
_BEGINS = b'{"key":"identity"'  # how a ledger begins; of one that has just been made, a part or nothing is there
_STORE = "store"
_DESCRIPTION = "zarr.json"
_AT_A_TIME = 8  # files that are made durable beside each other


def target_path(path: str | Path) -> Path:
    """The path of what a command makes. Raises InputError for a URL, and where no store or file can have that name.

    A name must be one of its own: not that of the current folder, and not inside a store, which it would damage.
    """
    path = local_path(path)
    if path.name in ("", ".."):
        raise InputError(
            f"{str(path)!r} is a folder that is in use: name what is to be made there, as in {path / 'NAME'}"
        )
    refuse_inside_store(path)
    return path


def refuse_inside_store(path: Path) -> None:
    """Raise InputError where a path lies in a store, or below a file."""
    parent = path.parent.resolve()
    for folder in (parent, *parent.parents):
        if (folder / _DESCRIPTION).is_file():
            raise InputError(f"{path} lies in the store {folder}, which it would damage: give a place outside of it")
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{path}: {folder} is a file, not a folder: give another place")


def target_paths(paths: Sequence[str | Path]) -> list[Path]:
    """The paths of what a command makes together. Raises InputError, also where one of them lies in another."""
    targets = [target_path(path) for path in paths]
    places = [path.parent.resolve() / path.name for path in targets]
    for path, place in zip(targets, places, strict=True):
        for other, there in zip(targets, places, strict=True):
            if path is not other and place.is_relative_to(there):
                raise InputError(f"{path} and {other} cannot both be made: give names of which none lies in another")
    return targets


def make_folder(path: Path) -> None:
    """Make a folder, durably, and those on the way to it, if they are not there."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        fsync_folder(path.parent)


def fsync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    if outlives_process(path):
        fsync(path)


def fsync(path: str | Path) -> None:
    """Make a file, or the names in a folder, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_tree(path: Path, apart: Collection[str] = ()) -> None:
    """Make a file, or every file and folder under `path`, durable, but those in its folders `apart`.

    Some at a time: the file system then writes its journal once for many of them, where one by one it does for each.
    """
    if not outlives_process(path):
        return
    names = [str(path)] if path.is_file() else []
    for folder, folders, files in os.walk(path):
        if folder == str(path):
            folders[:] = [name for name in folders if name not in apart]
        names += (os.path.join(folder, name) for name in [*files, "."])
    n = min(_AT_A_TIME, len(names) // 4 + 1)
    with ThreadPoolExecutor(n) as pool:
        for _ in pool.map(lambda some: list(map(fsync, some)), (names[first::n] for first in range(n))):
            pass


def work_folder(path: Path) -> Path:
    """Where what becomes `path` is made."""
    return path.with_name(path.name + ".partial")


def is_ours(folder: Path) -> bool:
    """Whether a folder is a work folder: it has a mark of ours, or no file at all. What is not there is none."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    for name in _MARKS:
        with suppress(OSError):
            fd = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(fd, "rb") as file:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    continue
                begin = file.read(len(_BEGINS))
                if _BEGINS.startswith(begin):
                    return True
    return not any(
        files or any(os.path.islink(os.path.join(at, name)) for name in folders)
        for at, folders, files in os.walk(folder)
    )


def refuse_foreign(folder: Path, mark: str = LOCK) -> None:
    """Raise InputError where the name of a work folder, or of what is replaced, is somebody else's.

    mark: of the command that asks; that of another kind of command tells that this one has not ended.
    """
    for other in _MARKS:
        if other != mark and is_ours(folder) and (folder / other).exists():
            raise InputError(f"{folder} is of another command that has not ended: let it go on, or remove the folder")
    if os.path.lexists(folder) and not is_ours(folder):
        raise InputError(
            f"{folder} is in the way, and is not from a command of xmc_stream: move it away, or give another name"
        )


def refuse_foreign_names(path: Path, mark: str = LOCK) -> None:
    """Raise InputError where a name that making `path` takes is somebody else's. mark: see `refuse_foreign`."""
    refuse_foreign(work_folder(path), mark)
    refuse_foreign(_aside(path))


def hold(file: Path, wait: bool = False) -> int:
    """Open the lock file of a work folder, which is made, and lock it; returns the file descriptor.

    wait: until nobody has it. Raises ResumeError where another process has it.
    """
    folder = file.parent
    while True:
        make_folder(folder)
        try:
            fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # who had it before has removed the folder
            continue
        try:
            if not any(try_lock(fd, fcntl.LOCK_EX, seconds) for seconds in (0.0, 0.05, 0.2)):  # others may look at it
                if not wait:
                    raise ResumeError(
                        f"{file.parent} is being written by another run: wait for it, or give another name"
                    )
                fcntl.flock(fd, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(file, follow_symlinks=False)):
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # it was removed between: there may be another one


def try_lock(fd: int, kind: int, seconds: float = 0.0) -> bool:
    """Lock a file, after a while, if no other process has."""
    time.sleep(seconds)
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def claimed(path: Path) -> Iterator[Path]:
    """The work folder of what becomes `path` inside a store, empty, for this process alone; it is gone when the block ends.

    Another process that has it is waited for: so it may be that `path` is there by now.
    """
    work = work_folder(path)
    fd = hold(work / LOCK, wait=True)
    try:
        empty(work, work / LOCK)
        put_back(path)
        yield work
    finally:
        remove_held(work / LOCK)
        os.close(fd)


def remove_tree(path: Path) -> None:
    """Remove a folder or file, if it is there; of a link to a folder the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def empty(folder: Path, *but: Path) -> None:
    """Remove what is in a folder; what cannot be removed, as a job that was interrupted writes there still, stays."""
    for path in folder.iterdir():
        if path not in but:
            with suppress(OSError):
                remove_tree(path)


def remove_held(file: Path) -> None:
    """Remove a work folder whose lock file this process holds; the file goes last, so that the rest is known as ours."""
    with suppress(OSError):
        os.truncate(file, 0)  # what it said is not true of what is left
    empty(file.parent, file)
    with suppress(OSError):
        file.unlink()
    try:
        file.parent.rmdir()
    except OSError:  # a job that was interrupted writes there still: the next command may remove it
        with suppress(OSError):
            file.touch()


def remove_work(file: Path) -> None:
    """Remove a work folder, by its lock file, if it is there. Raises ResumeError where somebody is at work in it."""
    if os.path.lexists(file.parent):
        refuse_foreign(file.parent, file.name)
        fd = hold(file)
        remove_held(file)
        os.close(fd)


def refuse_unwritable(path: Path) -> None:
    """Raise OSError where no work folder for `path` can be made, or InputError where one is somebody else's."""
    work = work_folder(path)
    if not is_ours(work):
        refuse_foreign(work)
        make_folder(work)
        remove_work(work / LOCK)


def remove_left(file: Path) -> None:
    """Remove a work folder, by its lock file, if it is there, is ours, and nobody is at work in it."""
    if is_ours(file.parent):
        with suppress(InputError, ResumeError):
            remove_work(file)


def put_back(path: Path) -> None:
    """End what a process that was killed did to replace `path`: if nothing has the name, what was there has it again."""
    aside = _aside(path)
    refuse_foreign(aside)
    if aside.exists():
        fd = hold(aside / LOCK, wait=True)
        _end(aside, path)
        os.close(fd)


def replace(work: Path, path: Path) -> None:
    """Give a finished store or file its name; what had the name is removed when the new one has it."""
    if not os.path.lexists(path):
        work.rename(path)
        return
    aside = _aside(path)
    refuse_foreign(aside)
    fd = hold(aside / LOCK, wait=True)
    try:
        empty(aside, aside / LOCK)
        path.rename(aside / _STORE)
        work.rename(path)
    finally:
        _end(aside, path)
        os.close(fd)


def _end(aside: Path, path: Path) -> None:
    """What was replaced goes, or goes back where nothing has the name."""
    with suppress(FileNotFoundError):  # half of it, if this is killed, must not be put back
        (aside / _STORE).rename(aside / "old" if os.path.lexists(path) else path)
    remove_held(aside / LOCK)


def _aside(path: Path) -> Path:
    return path.with_name(path.name + ".replaced")


def publish(
    work: Path, path: Path, apart: Collection[str] = (), before: int | None = None, durable: bool = True
) -> None:
    """Give a finished work folder its name; what had the name is removed.

    apart: folders in it whose stores are durable. before: `number_of` the path when the work began, where that is one of
    several copies of a job: what has the name since then is of another copy, and stays. durable: all of it is durable before
    and after; else the caller waits for the disk.
    """
    stop_if_unwanted()
    if durable:
        fsync_tree(work, apart)
    if before is not None and number_of(path) not in (0, before):
        shutil.rmtree(work)
    elif before != 0:
        replace(work, path)
    else:
        try:
            work.rename(path)
        except OSError as error:  # the other copy came between
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(work)
    if durable:
        fsync_folder(path.parent)


def number_of(path: Path) -> int:
    """The file system's number of what has a name, 0 where nothing has."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0


def remove(path: Path) -> None:
    """Remove a folder, if it is there, under another name: a process killed at it leaves no half of it under its own."""
    old = path.with_name(path.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    with suppress(FileNotFoundError):
        path.rename(old)
    remove_tree(old)


def remove_unfinished(folder: Path) -> None:
    """Remove what killed writers left in a folder."""
    for work in folder.glob("*.partial"):
        remove_tree(work)


def copy_folders(
    source: Path,
    target: Path,
    names: Sequence[str],
    copy: Callable[[str, str], object] = copy_file,
    check: bool = True,
) -> None:
    """Copy folders of a store that are there into another one under construction, in place of what is there.

    check: their files are compared with their checksums. Raises StoreError naming one that is damaged.
    """
    for name in names:
        shutil.rmtree(target / name, ignore_errors=True)
        if (source / name).exists():
            if check:
                compare_arrays(source / name)
            shutil.copytree(source / name, target / name, copy_function=copy)
            fsync_tree(target / name)


@contextmanager
def new_folder(path: Path, work: Path | None = None, durable: bool = True) -> Iterator[Path]:
    """The work name of a folder that is to be made in the block, renamed to `path` when that ends well, else removed.

    work: elsewhere, on the same disk, than beside `path`. durable: as of `publish`; else the caller waits for the disk.
    A killed process leaves `NAME.partial`, which no reader opens and the next writer of that name removes; a killed worker
    `NAME.COPY.partial`, see `remove_unfinished`.
    """
    work, before = work or work_name(path), number_of(path) if copy_name() else None
    if work.exists():
        shutil.rmtree(work)
    try:
        with naming(path):
            yield work
            publish(work, path, before=before, durable=durable)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the system in the block that name no file name `path`: writing to a full disk tells none."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def writing(path: Path, again: str) -> Iterator[None]:
    """Errors of the system in the block become a StoreError that names the file, or `path`, and what to do."""
    try:
        yield
    except OSError as error:
        if isinstance(error, XmcStreamError):
            raise
        advice = "make room there" if error.errno in NO_ROOM else "mend that"
        raise StoreError(f"{error.filename or path}: {error.strerror or error}: {advice} and {again}") from error
