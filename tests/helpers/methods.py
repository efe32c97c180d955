"""The methods that a contract of all of them is checked for: presets are further numbers of the same code."""

from __future__ import annotations

from xmc_stream.methods import registry

METHODS = [name for name in registry.names() if registry.declared(name).solver == name]
TRAINED = [*METHODS, "dismec"]  # which is trained without the searches of its method
