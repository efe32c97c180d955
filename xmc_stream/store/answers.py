"""Answers about a dataset that a run asks for again and again: each opens several arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from xmc_stream.store.dataset import Dataset

P = ParamSpec("P")
T = TypeVar("T")


def last_answer_kept(function: Callable[Concatenate[Dataset, P], T]) -> Callable[Concatenate[Dataset, P], T]:
    """A function of an opened dataset whose last answer is kept for as long as the dataset is in memory.

    Who gets it must not change it.
    """
    kept: WeakKeyDictionary[Dataset, tuple[Any, T]] = WeakKeyDictionary()

    @wraps(function)
    def ask(dataset: Dataset, /, *arguments: P.args, **named: P.kwargs) -> T:
        asked, before = (arguments, named), kept.get(dataset)
        if before is None or before[0] != asked:
            before = kept[dataset] = asked, function(dataset, *arguments, **named)
        return before[1]

    return ask
