"""The kinds of errors that xmc_stream raises: one line each, worded "what, where, what to do"."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from xmc_stream.flags import MEMORY_LIMIT, Wording

MIRRORS = "xmc_stream-urls"  # the folder of files fetched from stores behind URLs, see `store.remote`
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what the system says of a disk, quota or file that is full
_MIRRORED = re.compile(rf"(?:/[^\s'\"]*)?/{MIRRORS}/([a-z][a-z0-9+.-]*):/([^\s'\"]+?)@[0-9a-f]{{12}}")


def in_urls(text: str) -> str:
    """A text, with the URLs of stores in the place of their folders in the cache."""
    return _MIRRORED.sub(r"\1://\2", text) if MIRRORS in text else text


def in_megabytes(limit: int) -> str:
    """A limit of so many bytes as the memory limit is given; not rounded down."""
    return f"{-(-limit // 10**6)}MB"


class XmcStreamError(Exception):
    """Base of every error raised on purpose by this library.

    A message that names arguments is a `Wording`, put together with those of `flags`; `str` of an error is Python's spelling.
    """

    @property
    def said(self) -> Wording:
        """The message, as the shell and as Python spell it."""
        return Wording.of(self.args[0] if self.args else "").each(in_urls)

    @property
    def in_shell(self) -> str:
        """The message as a command prints it."""
        return str(self.said)

    def __str__(self) -> str:
        return self.said.in_python


class InputError(XmcStreamError, ValueError):
    """An argument, a parameter or a line of an input file is not usable."""


class StoreError(XmcStreamError, OSError):
    """A dataset, model or prediction store is missing, damaged, or of another kind than asked for."""


def spoilt_state(path: object) -> StoreError:
    """A file that a run left for itself holds what it cannot hold."""
    return StoreError(f"{path} has what it cannot have: remove the unfinished run and begin anew")


class MemoryLimitError(MemoryError, XmcStreamError):  # in this order dask's workers can send it
    """The memory limit cannot work, or was nearly reached; a run that had begun can be resumed.

    least: the least limit that works, in bytes, where that is known; the message names it, in whole megabytes.
    """

    def __init__(self, said: str = "", least: int | None = None) -> None:
        super().__init__(said, least)

    @property
    def least(self) -> int | None:
        """The least limit that works, in bytes; None where it is not known."""
        return self.args[1] if len(self.args) > 1 else None

    @property
    def said(self) -> Wording:
        """The message with the least limit, as the shell and as Python spell it."""
        said = super().said
        return (
            said if self.least is None else said + ": set " + MEMORY_LIMIT + f" to {in_megabytes(self.least)} or more"
        )


class ResumeError(XmcStreamError, ValueError):
    """An unfinished or finished run stands in the way: other data, parameters, versions or processor."""


class JobError(XmcStreamError, RuntimeError):
    """A job failed on a worker for a reason that is not an error of this library's own kinds."""


@contextmanager
def renaming(things: Mapping[str, str]) -> Iterator[None]:
    """Errors of the block name things by other words, such as X for the file that it was written to."""
    try:
        yield
    except XmcStreamError as error:

        def renamed(text: str) -> str:
            for thing, word in things.items():
                text = text.replace(thing, word)
            return text

        said = error.said.each(renamed)
        if said != error.said:
            error.args = (said,)
        raise
