"""The kinds of errors that xmc_stream raises: one line each, worded "what, where, what to do"."""

from __future__ import annotations

import errno

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what the system says of a disk, quota or file that is full


class XmcStreamError(Exception):
    """Base of every error raised on purpose by this library."""


class InputError(XmcStreamError, ValueError):
    """An argument, a parameter or a line of an input file is not usable."""


class StoreError(XmcStreamError, OSError):
    """A dataset, model or prediction store is missing, damaged, or of another kind than asked for."""


class MemoryLimitError(MemoryError, XmcStreamError):  # in this order dask's workers can send it
    """The memory limit cannot work, or was nearly reached; a run that had begun can be resumed."""


class ResumeError(XmcStreamError, ValueError):
    """An unfinished or finished run stands in the way: other data, parameters, versions or processor."""


class JobError(XmcStreamError, RuntimeError):
    """A job failed on a worker for a reason that is not an error of this library's own kinds."""
