"""SIGINT and SIGTERM end a command within seconds, whatever it is doing, with one line and 128 + the signal's number.

The main thread is told by an exception, so that it can put away what it holds. Where it does not come to that, as in a
compiled kernel, a thread ends the process: whatever is durable is so already.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any, NoReturn

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SECONDS = 2.5  # that the main thread has


class Interrupted(BaseException):
    """Raised in the main thread."""


class Signals:
    """A context manager around a command, in the main thread. line: what is said in the end, {} being the signal's name."""

    def __init__(self, line: str) -> None:
        self._line = line
        self._number = self._again = 0
        self._leaving = threading.Lock()

    def __enter__(self) -> Signals:
        self._before: dict[int, Any] = {}
        self._installed = threading.current_thread() is threading.main_thread()
        if not self._installed:
            return self
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as of a command behind nohup or &
                self._before[number] = signal.signal(number, self._arrived)
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(
            self._write
        )  # written to at once, where the handler waits for the main thread
        threading.Thread(target=self._watch, name="xmc-stream-signals", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._number and kind is not None:  # whatever it has become on its way
            self._leave(self._number)
        if self._installed:
            signal.set_wakeup_fd(self._wakeup)
            sys.unraisablehook = self._hook
            for number, handler in self._before.items():
                signal.signal(number, handler)
            os.close(self._write)  # which ends the thread

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if not self._number:
            self._number = number
            raise Interrupted

    def _unraisable(self, found: Any) -> None:
        """Have the main thread told again where it was told in a place that nothing can be raised from (gc.callbacks)."""
        if not issubclass(found.exc_type, Interrupted):
            self._hook(found)
            return
        self._again, self._number = self._number, 0

    def _watch(self) -> None:
        got = os.read(self._read, 1)
        if got:
            end = time.monotonic() + _SECONDS
            while time.monotonic() < end:
                time.sleep(0.05)
                if self._again:
                    number, self._again = self._again, 0
                    signal.pthread_kill(threading.main_thread().ident or 0, number)
            self._leave(got[0])
        os.close(self._read)

    def _leave(self, number: int) -> NoReturn:
        """End the process, and with it the threads that are in kernels."""
        with self._leaving:  # never let go of
            sys.stdout.flush()
            sys.stderr.write(self._line.replace("{}", signal.Signals(number).name) + "\n")
            sys.stderr.flush()
            os._exit(128 + number)
