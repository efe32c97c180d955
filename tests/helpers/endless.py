"""A process with a temporary folder, to be ended by signals. A module of its own: a forked process loads nothing else."""

from __future__ import annotations

import os
import tempfile
import time


def endless(folder: str, fits: bool) -> None:
    """Prints a temporary folder below another one, that of a model or an empty one, and sleeps."""
    os.setsid()
    tempfile.tempdir = folder
    if fits:
        import xmc_stream as xs

        clf = xs.PPDSparse(memory_limit="4GB").fit([[1.0, 0], [0, 1]] * 5, [0, 1] * 5)
        print(clf.model_.path, flush=True)
    else:
        from xmc_stream.system.files import own_folder

        print(own_folder(), flush=True)
    time.sleep(60)
