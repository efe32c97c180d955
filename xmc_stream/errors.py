"""The kinds of errors that xmc_stream raises: one line each, worded "what, where, what to do"."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

MIRRORS = "xmc_stream-urls"  # the folder of files fetched from stores behind URLs, see `store.remote`
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what the system says of a disk, quota or file that is full


# where a flag is not spelled as the argument is
_ARGUMENTS = {
    "--overwrite": "overwrite=True", "--force": "force=True", "--on-error=skip": "skip=True",
    "--duplicates=sum": "sum_duplicates=True", "--unseen=drop": "drop_unseen=True", "--zero-based": "base=0",
    "--one-based": "base=1", "--labels-count": "n_labels", "--features": "n_features", "--no-header": "header=False",
    "--normalize l2": "normalize='l2'", "--quote ''": "quote=''",
    "--id-field": "text=TextOptions(id_field=...)", "--text-field": "text=TextOptions(text_fields=...)",
    "--label-field": "text=TextOptions(label_field=...)",
    "--label-delimiter": "text=TextOptions(label_delimiter=...)", "--label-lists": "text=TextOptions(label_lists=True)",
}  # fmt: skip
# a whole command stays as it is
_FLAG = re.compile(
    r"xmc-stream [^,;:()`]*|`[^`]*`|(?<![\w-])(--set )|(?<![\w-])-(?=k \d)|(?<![\w-])--[a-z][a-z-]*(?:=[a-z]+| l2| '')?"
)


def in_python(message: str) -> str:
    """A message that names flags of commands, with Python's arguments in their place."""

    def argument(found: re.Match[str]) -> str:
        flag = found[0]
        if not flag.startswith("-"):
            return flag
        if found[1] or flag == "-":
            return ""
        return _ARGUMENTS.get(flag, flag[2:].replace("-", "_"))

    return _FLAG.sub(argument, message)


_MIRRORED = re.compile(rf"(?:/[^\s'\"]*)?/{MIRRORS}/([a-z][a-z0-9+.-]*):/([^\s'\"]+?)@[0-9a-f]{{12}}")


def in_urls(text: str) -> str:
    """A text, with the URLs of stores in the place of their folders in the cache."""
    return _MIRRORED.sub(r"\1://\2", text) if MIRRORS in text else text


def in_megabytes(limit: int) -> str:
    """A limit of so many bytes as `--memory-limit` takes it; not rounded down."""
    return f"{-(-limit // 10**6)}MB"


class XmcStreamError(Exception):
    """Base of every error raised on purpose by this library.

    Messages are written with the flags of commands; `str` of an error names Python's arguments in their place.
    """

    @property
    def in_shell(self) -> str:
        """The message as a command prints it."""
        return in_urls(str(self.args[0])) if self.args else ""

    def __str__(self) -> str:
        return in_python(self.in_shell)


class InputError(XmcStreamError, ValueError):
    """An argument, a parameter or a line of an input file is not usable."""


class StoreError(XmcStreamError, OSError):
    """A dataset, model or prediction store is missing, damaged, or of another kind than asked for."""


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
    def in_shell(self) -> str:
        """The message, as a command prints it."""
        said = super().in_shell
        return said if self.least is None else f"{said}: set --memory-limit to {in_megabytes(self.least)} or more"


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
        said = error.in_shell
        for thing, word in things.items():
            said = said.replace(thing, word)
        if said != error.in_shell:
            error.args = (said,)
        raise
