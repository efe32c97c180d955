"""What others wrote (files, libraries), to be quoted in a message of one line."""

from __future__ import annotations

_SHOWN = 40  # characters of a token in a message


def shown(token: bytes) -> str:
    """A token in quotes, in one line and not too long."""
    text = token.rstrip(b"\r\n").decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")


def one_line(said: object) -> str:
    """What a library or a file says, in one line and not too long."""
    text = " ".join(str(said).split())[:200]
    return text if text.isprintable() else ascii(text)
