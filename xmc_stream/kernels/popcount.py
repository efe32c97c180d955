"""The processor's count of bits in a word, which neither Python nor this version of the compiler has as a function."""

from __future__ import annotations

from typing import Any

from xmc_stream.kernels.jit import instruction


def _plain_popcount(word: Any) -> Any:
    """The same in Python."""
    return int(word).bit_count()


popcount: Any = instruction("popcount", _plain_popcount)
