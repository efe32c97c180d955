"""Cases of a test that every run of all tests takes, and those that `-m soak` takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first(cases: Iterable[Any], n: int = 1) -> list[Any]:
    """All cases; those behind the first n, which add little to these, are marked `soak`, and `slow`."""
    several = list(cases)
    others = (case if isinstance(case, tuple) else (case,) for case in several[n:])
    return [*several[:n], *(pytest.param(*case, marks=[pytest.mark.soak, pytest.mark.slow]) for case in others)]
