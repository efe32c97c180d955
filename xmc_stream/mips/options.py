"""Checks of arguments and options."""

from __future__ import annotations

import math
import operator
from typing import Any

from xmc_stream.errors import InputError

MOST = 2**31 - 1  # of counts: ids and features are int32
MOST_SEED = 2**63 - 1


def whole(name: str, value: Any, of: str, least: int = 1, most: int = MOST) -> int:
    """An integer of Python or NumPy from `least` to `most`; raises InputError for all else, True and 2.0 included."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if not least <= number <= most:
        raise InputError(f"The '{name}' of {of} must be an int from {least} to {most}. Got {value!r} instead.")
    return number


def share(name: str, value: Any, of: str) -> float:
    """A finite number that is 0 or more; raises InputError for all else."""
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0.0 <= number < math.inf:
        raise InputError(f"The '{name}' of {of} must be a finite number, 0 or more. Got {value!r} instead.")
    return number
