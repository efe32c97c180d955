"""The processor's count of bits in a word, which neither Python nor this version of the compiler has as a function."""

from __future__ import annotations

from typing import Any

from numba.core import config, types
from numba.extending import intrinsic


def _popcount(typingctx: Any, word: Any) -> Any:
    """How many bits of a uint64 are 1."""
    if word != types.uint64:
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(word), generate


def _plain_popcount(word: Any) -> Any:
    """The same in Python."""
    return int(word).bit_count()


_config: Any = config  # its types do not know DISABLE_JIT
popcount: Any = _plain_popcount if _config.DISABLE_JIT else intrinsic(_popcount)
