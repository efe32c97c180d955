"""Which methods there are, by the names behind `--solver`. A method's folder is loaded when it is asked for."""

from __future__ import annotations

import importlib
from typing import Any

from xmc_stream.errors import InputError
from xmc_stream.methods.contract import Method
from xmc_stream.methods.parameters import Parameters

# the module that has it, the name of the class, presets
_PLACES = {
    "ppdsparse": "xmc_stream.methods.ppdsparse.method:PPDSparseMethod",
    "dismec": "xmc_stream.methods.ppdsparse.method:PPDSparseMethod",
    "pdsparse": "xmc_stream.methods.pdsparse.method:PDSparseMethod",
    "leml": "xmc_stream.methods.lowrank.method:LEMLMethod",
    "cplst": "xmc_stream.methods.lowrank.method:CPLSTMethod",
}
_methods: dict[str, Method] = {}  # loaded, or registered


def register(method: Method) -> None:
    """Add a method, which commands, estimators and planning then know. Raises InputError where a name is taken."""
    for name in (method.name, *method.presets):
        if name in _PLACES or name in _methods:
            raise InputError(f"there is a method {name!r} already: give it another name")
    _methods.update(dict.fromkeys((method.name, *method.presets), method))


def names() -> list[str]:
    """Of all methods and presets."""
    return [*_PLACES, *(name for name in _methods if name not in _PLACES)]


def method(name: str) -> Method:
    """A method by its name, or that of a preset. Raises InputError for a name that is none."""
    if name not in _methods:
        if name not in _PLACES:
            raise InputError(f"there is no method {name!r}: there are {', '.join(names())}")
        module, kind = _PLACES[name].split(":")
        _methods[name] = getattr(importlib.import_module(module), kind)()
    return _methods[name]


def parameters(name: str, values: dict[str, Any]) -> Parameters:
    """Parameters of a method, or a preset, where some are given by name. Raises InputError for those that are none."""
    found = method(name)
    return found.parameters.of({**found.presets.get(name, {}), **values})


def method_of(chosen: Parameters) -> Method:
    """The method that some parameters are of."""
    return method(chosen.solver)
