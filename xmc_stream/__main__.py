"""The command `xmc-stream`, also as `python -m xmc_stream`: from its first instant on, a signal ends it in one line."""

import os
import signal
from types import FrameType


def program() -> None:
    """Load the command line, which takes a tenth of a second, and run it. It has handlers of its own."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _leave)
    from xmc_stream.cli import program as command

    command()


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, f"xmc-stream: interrupted by {signal.Signals(number).name} before it began\n".encode())
    os._exit(128 + number)


if __name__ == "__main__":
    program()
