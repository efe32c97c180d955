"""What one sees of work that takes long: one bar on a terminal, lines of a log elsewhere.

A command has one `Progress`, from its first second to its end. What it calls finds that by `current` and says where the
work stands: phases in words, and the share of the whole that is done. Of a command within a command (a conversion before
a prediction, trainings that are compared) the share is that of a `part`.

Lines go to the logger "xmc_stream": a plan and notes as INFO, and as its child "xmc_stream.progress" phases as DEBUG and
how far the work is, now and then, as INFO. Nobody sees them unless logging is configured, as the commands do.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

LOG = logging.getLogger("xmc_stream")
LOG.addHandler(logging.NullHandler())
STEPS = logging.getLogger("xmc_stream.progress")

_FIRST_DRAWN = 0.4  # seconds: what ends before shows no bar
_EVERY = 0.25  # seconds from one drawing of the bar to the next
_WIDTH = 79
_FIRST_LINE, _LONGEST = 10.0, 600.0  # seconds to the first line of a log; then twice as long each time, up to this
_TRUST = 0.15  # a forecast counts as much as so large a share of the work that was timed
_UNSURE = 0.02  # share of the work from which on its pace says something, where there is no forecast
_AT_MOST = 0.9  # of a phase, that may be shown as done before a job says so


class Progress:
    """How far a command is. what: its name; shown: whether a bar is drawn, where stderr is a terminal."""

    def __init__(self, what: str = "", shown: bool = False) -> None:
        self.words = "starting"
        self._what, self.about = what, ""  # of which part of a command the words are
        self._began = self._since = self._moved = time.monotonic()
        self._part = (0.0, 1.0)
        self._phase = (0.0, 0.0)  # where the phase begins and ends, of the whole
        self._open = False  # whether nobody knows how long this phase's kind of work goes on
        self.share = self._drawn = 0.0  # what is done of the whole, from 0 to 1: it never falls
        self._timed = 0.0  # the share that was done since `_since`
        self._foreseen: float | None = None  # seconds of the whole
        self._bar: Any = None
        self._wants_bar = shown and sys.stderr is not None and sys.stderr.isatty()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextmanager
    def beside(self, share: float, about: str) -> Iterator[Progress]:
        """What this thread does within the block is so large a share of the present phase; other threads do the rest."""
        mine = _Beside(self, share, about)
        token = _current.set(mine)
        try:
            with mine.part(0.0, 1.0):
                yield mine
        finally:
            _current.reset(token)

    def add(self, share: float) -> None:
        """So much more of the phase is done. Threads may call at once."""
        begin, end = self._phase
        with self._lock:
            self._move(self.share + (end - begin) * share)

    @contextmanager
    def part(self, begin: float, end: float, about: str = "") -> Iterator[None]:
        """Whatever says how far it is within the block speaks of this part of the present part. about: before its words."""
        low, high = before = self._part
        outer = self.about
        self._part, self.about = (low + (high - low) * begin, low + (high - low) * end), outer + about
        try:
            yield
            self._move(self._part[1])
        finally:
            self._part, self.about = before, outer

    def phase(self, words: str, span: tuple[float, float] | None = (0.0, 1.0)) -> None:
        """A phase begins. span: from where to where it takes the present part; None where its end cannot be foreseen."""
        low, high = self._part
        self.words, self._open = self.about + words, span is None
        begin, end = (low + (high - low) * min(of, 1.0) for of in span) if span else (self.share, self.share)
        self._phase = (begin, end)
        timed = self._timed
        self._move(begin)
        self._timed = timed  # what was left out, or done by an earlier session, says nothing about the pace
        STEPS.debug("%s", self.words)

    def advance(self, done: float) -> None:
        """So much of the phase is done, from 0 to 1."""
        begin, end = self._phase
        self._move(begin + (end - begin) * min(done, 1.0))

    def expect(self, seconds: float) -> None:
        """The rest of the present part is foreseen to take so long."""
        low, high = self._part
        left = max(high - max(self.share, low), 1e-9)
        self._foreseen, self._timed = seconds / left, 0.0
        self._since = self._moved = time.monotonic()

    def seconds_left(self) -> float | None:
        """What is foreseen of the whole, at the pace so far; None where nothing is."""
        now = time.monotonic()
        pace = self._pace()
        if pace is None or self._open:
            return None
        return max(pace * (1.0 - self.share) - (now - self._moved), 0.0)

    def elapsed(self) -> float:
        """Seconds since the command began."""
        return time.monotonic() - self._began

    def said(self) -> str:
        """How far it is, in a line."""
        left = self.seconds_left()
        more = "" if left is None else f", about {duration(left)} left"
        return f"{self._now():.0%} done after {duration(self.elapsed())}{more}: {self.words}"

    def finish(self) -> None:
        """Take the bar away, for what is to be printed."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with self._lock:
            if self._bar is not None:
                self._bar.close()
                self._bar = None

    def begin(self) -> None:
        """Draw, and write lines, from now on."""
        if self._wants_bar or STEPS.isEnabledFor(logging.INFO):
            self._thread = threading.Thread(target=self._watch, name="xmc-stream-progress", daemon=True)
            self._thread.start()

    def _move(self, share: float) -> None:
        if share > self.share:
            self._timed += share - self.share
            self.share = share
            self._moved = time.monotonic()

    def _pace(self) -> float | None:
        """Seconds that the whole takes."""
        spent = self._moved - self._since
        if self._foreseen is not None:
            return (_TRUST * self._foreseen + spent) / (_TRUST + self._timed)
        return spent / self._timed if self._timed > _UNSURE else None

    def _now(self) -> float:
        """The share to show: what is done, and what the present job has done by the pace so far."""
        pace, end = self._pace(), self.share + _AT_MOST * max(self._phase[1] - self.share, 0.0)
        if pace:
            self._drawn = max(self._drawn, min(self.share + (time.monotonic() - self._moved) / pace, end))
        self._drawn = max(self._drawn, self.share)
        return self._drawn

    def _watch(self) -> None:
        line = _FIRST_LINE
        while not self._ended.wait(_EVERY):
            seconds = self.elapsed()
            if self._wants_bar and seconds > _FIRST_DRAWN:
                self._draw()
            if seconds > line:
                line = seconds + min(seconds, _LONGEST)
                STEPS.info("%s: %s", self._what, self.said())

    def _draw(self) -> None:
        with self._lock:
            if self._bar is None:
                from tqdm import tqdm  # who sees no bar starts in less time without

                self._bar = tqdm(
                    total=1.0, leave=False, delay=1e-9, file=sys.stderr, bar_format="{desc}|{bar:20}| {unit}"
                )
            now, left = self._now(), self.seconds_left()
            more = "" if left is None else f", about {duration(left)} left"
            self._bar.n, self._bar.ncols = now, _width()
            self._bar.unit = f"{duration(self.elapsed())}{more}: {self.words}"
            self._bar.set_description_str(f"{self._what} {now:4.0%} ", refresh=False)
            self._bar.refresh()


class _Beside(Progress):
    """What one of several threads does: `outer` has its words, and so large a share of what it does."""

    def __init__(self, outer: Progress, share: float, about: str) -> None:
        super().__init__()
        self._outer, self._of, self.about = outer, share, about

    def phase(self, words: str, span: tuple[float, float] | None = (0.0, 1.0)) -> None:
        super().phase(words, span)
        self._outer.words = self.words

    def _move(self, share: float) -> None:
        more = max(share - self.share, 0.0)
        super()._move(share)
        self._outer.add(self._of * more)


def _width() -> int:
    """Columns of the terminal; a pseudo-terminal may not say how many."""
    try:
        return max(os.get_terminal_size(sys.stderr.fileno()).columns - 1, 0) or _WIDTH
    except OSError:
        return _WIDTH


_current: ContextVar[Progress | None] = ContextVar("xmc_stream_progress", default=None)


def current() -> Progress:
    """That of the command that is under way in this thread; one that nobody sees where there is none."""
    return _current.get() or Progress()


@contextmanager
def working(what: str, shown: bool) -> Iterator[Progress]:
    """A command, or a part of the one that is under way. shown: whether there is a bar, if it is not a part."""
    outer = _current.get()
    if outer is not None:
        yield outer
        return
    progress = Progress(what, shown)
    token = _current.set(progress)
    progress.begin()
    try:
        yield progress
    finally:
        _current.reset(token)
        progress.finish()


def duration(seconds: float) -> str:
    """A time for people."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
