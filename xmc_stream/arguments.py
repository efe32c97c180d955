"""Arguments of functions: NumPy's numbers are taken as Python's; checks that several functions share."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, TypeVar, cast

from xmc_stream.errors import InputError

MOST = 2**31 - 1  # of counts: ids and features are int32
MOST_INT = 2**63 - 1  # that kernels take; seeds too

_Function = TypeVar("_Function", bound=Callable[..., Any])


def native(value: Any) -> Any:
    """A number, flag or text of NumPy, or an array without dimensions, as Python's; all else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def native_arguments(function: _Function) -> _Function:
    """A function that is called with the `native` values of its arguments: they may go to JSON, and to kernels."""

    @functools.wraps(function)
    def called(*values: Any, **named: Any) -> Any:
        return function(*map(native, values), **{name: native(value) for name, value in named.items()})

    return cast(_Function, called)


def whole(name: str, value: Any, of: str, least: int = 1, most: int = MOST) -> int:
    """An integer of Python or NumPy from `least` to `most`; raises InputError for all else, True and 2.0 included."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if not least <= number <= most:
        raise InputError(f"The '{name}' of {of} must be an int from {least} to {most}. Got {value!r} instead.")
    return number


def seed_of(value: Any, of: str) -> int:
    """A seed; raises InputError for what is none."""
    return whole("seed", value, of, 0, MOST_INT)


def share(name: str, value: Any, of: str) -> float:
    """A finite number that is 0 or more; raises InputError for all else."""
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0.0 <= number < math.inf:
        raise InputError(f"The '{name}' of {of} must be a finite number, 0 or more. Got {value!r} instead.")
    return number
