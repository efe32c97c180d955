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
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SECONDS = 2.5  # that the main thread has


class Interrupted(BaseException):
    """Raised in the main thread."""


@contextmanager
def ended_by_signals(line: str) -> Iterator[None]:
    """A block around a command. line: what is said in the end, {} being the signal's name."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    leaving = threading.Lock()

    def leave(number: int) -> NoReturn:
        """End the process, and with it the threads that are in kernels."""
        with leaving:  # never let go of
            sys.stdout.flush()
            sys.stderr.write(line.replace("{}", signal.Signals(number).name) + "\n")
            sys.stderr.flush()
            os._exit(128 + number)

    def tell(number: int, frame: FrameType | None) -> None:
        if not arrived:
            arrived.append(number)
            raise Interrupted

    def watch() -> None:
        got = os.read(read, 1)
        if got:
            time.sleep(_SECONDS)
            leave(got[0])
        os.close(read)

    # not those that are ignored, as of a command behind nohup or &
    taken = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, tell) for number in taken}
    read, write = os.pipe()
    os.set_blocking(write, False)
    wakeup = signal.set_wakeup_fd(write)  # written to at once, where the handler waits for the main thread
    threading.Thread(target=watch, name="xmc-stream-signals", daemon=True).start()
    try:
        yield
    except BaseException:
        if arrived:  # whatever it has become on its way
            leave(arrived[0])
        raise
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(write)  # which ends the thread
