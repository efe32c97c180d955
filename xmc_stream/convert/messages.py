"""What others wrote (files, libraries), to be quoted in a message of one line."""

from __future__ import annotations

from collections.abc import Iterable

_SHOWN = 40  # characters of a token in a message


def shown(token: bytes) -> str:
    """A token in quotes, in one line and not too long."""
    text = token.rstrip(b"\r\n").decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")


def shown_text(text: str) -> str:
    """A name in quotes, in one line and not too long."""
    return shown(text.encode("utf-8", "backslashreplace"))


def meant(name: str, known: Iterable[str]) -> str:
    """Which of the known names is nearest to one that is not among them, to be put behind it; "" where none is near."""
    from difflib import get_close_matches

    alike = {one.lower(): one for one in known}
    nearest = get_close_matches(name.lower(), alike, 1)
    return f" (is {shown_text(alike[nearest[0]])} meant?)" if nearest else ""


def one_line(said: object) -> str:
    """What a library or a file says, in one line and not too long."""
    text = " ".join(str(said).split())[:200]
    return text if text.isprintable() else ascii(text)
