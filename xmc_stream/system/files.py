"""Opening what is read: regular files, and where a text may come through one, pipes. A device may go on for ever."""

from __future__ import annotations

import errno
import os
import stat


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
