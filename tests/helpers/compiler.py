"""Tests as plain Python (NUMBA_DISABLE_JIT=1), hundreds of times slower: what they leave out, and smaller problems; tests
that nothing is compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
from numba import config

T = TypeVar("T")

COMPILED = not config.DISABLE_JIT
needs_compiler = pytest.mark.skipif(not COMPILED, reason="takes minutes, or calls C, where nothing is compiled")


def unless_plain(compiled: T, plain: T) -> T:
    """A size where kernels are compiled, and a smaller one where they are plain Python."""
    return compiled if COMPILED else plain


def of_every_value(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Of the cases of each test the first that have a value of a parameter that none before had.

    As plain Python an index that is out of range raises: that is looked for in every branch, not in every combination.
    """
    seen: set[Any] = set()
    chosen = []
    for item in items:
        case = getattr(item, "callspec", None)  # a test without parameters has none
        test = item.nodeid.partition("[")[0]
        mine = {(test, name, repr(value)) for name, value in case.params.items()} if case else {test}
        if not mine <= seen:
            chosen.append(item)
            seen |= mine
    return chosen


@contextmanager
def nothing_is_compiled(kernel: Any) -> Iterator[None]:
    """A block in which a kernel, which is loaded, is compiled for no other arguments."""
    loaded = list(kernel.numba.signatures)
    assert loaded
    yield
    assert list(kernel.numba.signatures) == loaded
