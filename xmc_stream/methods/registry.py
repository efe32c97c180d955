"""Which methods there are, by the names behind `--solver`.

What a method declares (its parameters, their help) is loaded without the method, and the method when it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from xmc_stream.errors import InputError
from xmc_stream.methods.parameters import Parameters

if TYPE_CHECKING:
    from xmc_stream.methods.contract import Method

# by name: where the parameters and the method are; of a preset those of its method
_PLACES = {
    "ppdsparse": ("xmc_stream.ppdsparse.parameters:PPDSparseParameters", "xmc_stream.ppdsparse.method:PPDSparseMethod"),
    "dismec": ("xmc_stream.ppdsparse.parameters:PPDSparseParameters", "xmc_stream.ppdsparse.method:PPDSparseMethod"),
    "pdsparse": ("xmc_stream.pdsparse.parameters:PDSparseParameters", "xmc_stream.pdsparse.method:PDSparseMethod"),
    "leml": ("xmc_stream.lowrank.parameters:LEMLParameters", "xmc_stream.lowrank.method:LEMLMethod"),
    "cplst": ("xmc_stream.lowrank.parameters:CPLSTParameters", "xmc_stream.lowrank.method:CPLSTMethod"),
    "group-lasso": (
        "xmc_stream.grouplasso.parameters:GroupLassoParameters",
        "xmc_stream.grouplasso.method:GroupLassoMethod",
    ),
    "memoir": ("xmc_stream.memoir.parameters:MEMOIRParameters", "xmc_stream.memoir.method:MEMOIRMethod"),
    **dict.fromkeys(
        ("tree", "parabel", "bonsai", "xr-linear"),
        ("xmc_stream.tree.parameters:TreeParameters", "xmc_stream.tree.method:TreeMethod"),
    ),
}
_registered: dict[str, Method] = {}


def register(method: Method) -> None:
    """Add a method, which commands and planning then know. Raises InputError where a name is taken."""
    mine = (method.name, *method.parameters.presets)
    for name in mine:
        if name in names():
            raise InputError(f"there is a method {name!r} already: give it another name")
    _registered.update(dict.fromkeys(mine, method))


def names() -> list[str]:
    """Of all methods and presets."""
    return [*_PLACES, *_registered]


def declared(name: str) -> type[Parameters]:
    """The parameters of a method, by its name or that of a preset. Raises InputError for a name that no method has."""
    if name in _registered:
        return _registered[name].parameters
    found: type[Parameters] = resolve_name(_place(name)[0])
    return found


def method(name: str) -> Method:
    """A method by its name, or that of a preset. Raises InputError for a name that no method has."""
    if name in _registered:
        return _registered[name]
    made: Method = resolve_name(_place(name)[1])()
    return made


def parameters(name: str, values: Mapping[str, Any]) -> Parameters:
    """Parameters of a method, or a preset, of which some are given. Raises InputError for those that are none."""
    found = declared(name)
    return found.of({**found.presets.get(name, {}), **values})


def method_of(chosen: Parameters) -> Method:
    """The method that some parameters are of."""
    return method(chosen.solver)


def _place(name: str) -> tuple[str, str]:
    if name not in _PLACES:
        raise InputError(f"there is no method {name!r}: there are {', '.join(names())}")
    return _PLACES[name]
