"""Parameters of a method, each declared once.

A field says its name, type, range, default and what it does. From that come checks, `--set`, `--help`, `get_params`, the
docstring of the estimator and the JSON that is stored with a model.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, ClassVar, Self

from xmc_stream.arguments import MOST_INT
from xmc_stream.errors import InputError

_RULE = "rule"
GIVEN = "given"  # the word of a parameter that stands for weights of labels, or a tree, which come by themselves


@dataclass(frozen=True)
class Rule(ABC):
    """What a parameter may be, and what it does.

    unsaid: it is left out of the JSON while it is the default. none: None is allowed too.
    """

    help: str
    unsaid: bool = dataclasses.field(default=False, kw_only=True)
    none: bool = dataclasses.field(default=False, kw_only=True)

    @abstractmethod
    def what(self) -> str:
        """Type and range, as one reads them behind `--set`."""

    def typed(self) -> str:
        """Type and range, as Python spells them."""
        return self.what().replace(" or none", " or None")

    def taken(self, value: Any) -> Any:
        """The value as it is kept. Raises ValueError where it may not be."""
        return None if self.none and value is None else self._one(value)

    @abstractmethod
    def _one(self, value: Any) -> Any:
        """A value that is not None."""


@dataclass(frozen=True)
class Number(Rule):
    """A float from `least` to `most`, or a tuple of `several`; open_least, open_most: these themselves are out."""

    least: float = 0.0
    most: float = math.inf
    open_least: bool = False
    open_most: bool = True
    several: bool = False

    def what(self) -> str:
        """As "float in [0, inf)"."""
        low, high = "[("[self.open_least], "])"[self.open_most]
        words = f"float in {low}{self.least:g}, {self.most:g}{high}"
        return words + (", or several" if self.several else "") + (", or none" if self.none else "")

    def taken(self, value: Any) -> Any:
        """A float, so that 2 and 2.0 are one parameter; a tuple of several."""
        if self.several and isinstance(value, (tuple, list)):
            if not value:
                raise ValueError
            return tuple(self._one(item) for item in value)
        return super().taken(value)

    def _one(self, value: Any) -> float:
        if not isinstance(value, Real) or isinstance(value, bool):  # also NumPy's, as a grid has them
            raise ValueError
        try:
            number = float(value)
        except OverflowError:  # of an int
            raise ValueError from None
        low = number > self.least if self.open_least else number >= self.least
        high = number < self.most if self.open_most else number <= self.most
        if not (low and high):
            raise ValueError
        return number


@dataclass(frozen=True)
class Whole(Rule):
    """An int from `least` on, also of NumPy's."""

    least: int = 1

    def what(self) -> str:
        """As "int in [1, 2**63)"."""
        return f"int in [{self.least}, 2**63)" + (", or none" if self.none else "")

    def _one(self, value: Any) -> int:
        if not isinstance(value, Integral) or isinstance(value, bool) or not self.least <= int(value) <= MOST_INT:
            raise ValueError
        return int(value)


@dataclass(frozen=True)
class Choice(Rule):
    """One of some words."""

    options: Sequence[str] = ()

    def what(self) -> str:
        """As "one of full, given"."""
        return f"one of {', '.join(self.options)}" + (", or none" if self.none else "")

    def typed(self) -> str:
        """As "{'full', 'given'}"."""
        return f"{{{', '.join(map(repr, self.options))}}}" + (" or None" if self.none else "")

    def _one(self, value: Any) -> Any:
        if value not in self.options:
            raise ValueError
        return value


@dataclass(frozen=True)
class Flag(Rule):
    """True or false."""

    def what(self) -> str:
        """The words."""
        return "true, false or none" if self.none else "true or false"

    def typed(self) -> str:
        """Its type."""
        return "bool or None" if self.none else "bool"

    def _one(self, value: Any) -> Any:
        if not isinstance(value, bool):
            raise ValueError
        return value


@dataclass(frozen=True)
class ClassWeight(Choice):
    """The rule of a parameter that weighs labels: a word; weights themselves are GIVEN."""

    def typed(self) -> str:
        """As Python takes it."""
        words = ", ".join(repr(word) for word in self.options if word != GIVEN)
        return (f"{{{words}}}, " if words else "") + "dict, array (K,) or None"

    def taken(self, value: Any) -> Any:
        """The word."""
        return super().taken(value if value is None or isinstance(value, str) else GIVEN)


@dataclass(frozen=True)
class GivenTree(Choice):
    """The rule of a parameter that says whether a tree is given."""

    def typed(self) -> str:
        """As Python takes it."""
        return "str, Path, list of (child, parent) or None"

    def _one(self, value: Any) -> str:
        return GIVEN


def parameter(default: Any, rule: Rule) -> Any:
    """A field of `Parameters`."""
    return field(default=default, metadata={_RULE: rule})


@dataclass(frozen=True)
class Parameters:
    """Parameters of a method, checked once, stored beside a model; nothing here depends on the machine.

    solver: the method's name, behind `--solver` and in models. label: its estimator's, for messages. title: one line of
    help. presets: names under which the method is offered with other defaults. grids: by the name of the method or preset,
    values of some parameters that are worth trying where nobody says which (`training.tune`).
    """

    solver: ClassVar[str]
    label: ClassVar[str]
    title: ClassVar[str]
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    grids: ClassVar[Mapping[str, Mapping[str, Sequence[Any]]]] = {}

    def __post_init__(self) -> None:
        for name, rule in self.rules().items():
            value = getattr(self, name)
            try:
                object.__setattr__(
                    self, name, rule.taken(value.tolist() if hasattr(value, "tolist") else value)
                )  # NumPy's
            except ValueError:
                article = "an " if rule.what().startswith("int") else "a " if rule.what().startswith("float") else ""
                raise InputError(
                    f"The '{name}' parameter of {self.label} must be {article}{rule.what()}. Got {value!r} instead."
                ) from None
        self._check_together()

    def _check_together(self) -> None:
        """Raise InputError for values that do not go together."""

    @classmethod
    def rules(cls) -> dict[str, Rule]:
        """What each may be, in the order of their declaration."""
        return {declared.name: declared.metadata[_RULE] for declared in fields(cls)}

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The default of each."""
        return {declared.name: declared.default for declared in fields(cls)}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Parameters by name. Raises InputError for a name that is none."""
        for name in values:
            if name not in cls.rules():
                raise InputError(f"{cls.label} has no parameter {name!r}: it has {', '.join(cls.rules())}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; without options that are not used, so that a model without them keeps its digest."""
        values, rules, defaults = {name: getattr(self, name) for name in self.rules()}, self.rules(), self.defaults()
        return {name: value for name, value in values.items() if not rules[name].unsaid or value != defaults[name]}

    @classmethod
    def described(cls) -> str:
        """All of them for a docstring, in NumPy's style."""
        parts = []
        for name, rule in cls.rules().items():
            text = textwrap.indent(textwrap.fill(rule.help, 108), "    ")
            parts.append(f"{name} : {rule.typed()}, default {cls.defaults()[name]!r}\n{text}")
        return "\n".join(parts)


def spelled(value: Any) -> str:
    """A value as it is written behind `--set NAME=`."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
