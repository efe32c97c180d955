"""The processor's prefetch instruction, which neither Python nor NumPy has: begin to bring memory close, wait for nothing."""

from __future__ import annotations

from typing import Any

from xmc_stream.kernels.jit import instruction


def _look(array: Any, index: Any) -> None:
    """In plain Python nothing can be fetched: an index that is out of range raises, as in other kernels."""
    array.item(index)


prefetch: Any = instruction("prefetch", _look)
prefetch_near: Any = instruction("prefetch_near", _look)  # where a few are asked for at a time
