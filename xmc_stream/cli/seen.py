"""What a command shows while it works: on a terminal a bar, and lines of the library's log; elsewhere lines alone."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from xmc_stream.system.progress import LOG, STEPS, working


class _Lines(logging.Handler):
    """Writes lines to stderr, above a bar where there is one, which says itself how far the work is."""

    def emit(self, record: logging.LogRecord) -> None:
        line, bar = record.getMessage(), sys.stderr.isatty()
        if record.name == STEPS.name:
            if bar and record.levelno >= logging.INFO:
                return
            line = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {line}"
        if bar:
            from tqdm import tqdm  # see `progress`

            tqdm.write(line, file=sys.stderr)
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()


@contextmanager
def seen(what: str, verbose: bool = False, quiet: bool = False) -> Iterator[None]:
    """A command that works long, from its first second to its end."""
    handler, level = _Lines(), LOG.level
    LOG.setLevel(logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO)
    LOG.addHandler(handler)
    try:
        with working(what, not quiet):
            yield
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(level)
