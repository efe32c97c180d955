"""Machine code of kernels that is loaded without numba: by LLVM alone, with the few C functions of numba that it calls.

Importing numba, and making its dispatchers, takes a sixth of a second. What a dispatcher does is done here by `kinds_of`:
it tells arguments apart at least as finely as numba's types do. All this knows private parts of numba. Where they have
changed, an exception, or the end of the process that tries it first, says so, and kernels are loaded by numba.
"""

from __future__ import annotations

import builtins
import ctypes
import functools
import pickle
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

_NUMBERS = int, float, bool, np.number, np.bool_
_SAME: dict[type, type] = {np.int64: int, np.float64: float, np.bool_: bool}  # to numba
_C_ORDER, _F_ORDER, _LAYOUT = 0x1, 0x2, 0x503  # of an array's flags: either order, whether aligned, whether writeable
_LARGEST = (1 << 63) - 1


_environments: dict[str, Any] = {}  # those that were made, by symbol


class Environment(NamedTuple):
    """What machine code finds under a symbol: the constants of a function, those of module `of`."""

    symbol: str
    of: str
    constants: list[Any]


class Kept(NamedTuple):
    """A kernel's machine code for arguments of certain kinds. function: its symbol, of what Python calls.

    helpers: names of what it calls, and perhaps of some more.
    """

    module: str
    name: str
    kinds: Any
    code: bytes
    function: str
    environments: list[Environment]  # its own first, then of the functions compiled into it
    helpers: list[str]


def kinds_of(arguments: Iterable[Any]) -> Any:
    """What tells arguments apart by their numba types; of one that is not known here something that no other is equal to."""
    kinds: list[Any] = []
    for value in arguments:
        kind: Any = type(value)
        if kind is np.ndarray:
            flags = value.flags.num & _LAYOUT
            kinds.append((value.dtype, value.ndim, flags & ~_F_ORDER if flags & _C_ORDER else flags))
        elif isinstance(value, tuple):
            kinds.append((kind, kinds_of(value)))
        elif kind is int and not -_LARGEST <= value <= _LARGEST:
            kinds.append(object())
        else:
            kinds.append(_SAME.get(kind, kind) if isinstance(value, _NUMBERS) else object())
    return tuple(kinds)


def kept_of(module: str, name: str, kinds: Any, compiled: Any) -> Kept:
    """What is kept of a compilation that numba loaded by `kept`. Raises ValueError where that is not all that it needs."""
    if compiled.reload_init or compiled.referenced_envs is None:
        raise ValueError(f"{module}.{name} needs more than its code")
    own = compiled.environment
    every = [own, *(one for one in compiled.referenced_envs if one is not own)]
    environments = [Environment(one.env_name, one.globals["__name__"], list(one.consts)) for one in every]
    code, function = compiled.library.code, compiled.fndesc.llvm_cpython_wrapper_name
    helpers = [name for name in _helpers() if name.encode() in code]
    return Kept(module, name, kinds, code, function, environments, helpers)


def load(kept: Iterable[Kept]) -> list[Callable[..., Any]]:
    """The functions of machine code, which must have been made on this type of processor, by this numba and Python."""
    every = list(kept)
    engine, binding, helpers = _linker(), _binding(), _helpers()
    for name in {name for one in every for name in one.helpers}:  # all there are would take 0.003 s
        binding.add_symbol(name, helpers[name])
    for one in every:
        engine.add_object_file(binding.ObjectFileRef.from_data(one.code))
    engine.finalize_object()
    return [_function(engine, one, _environments) for one in every]


@functools.cache
def versions() -> dict[str, str]:
    """Of numba and llvmlite, without importing numba, or importlib.metadata, which takes 0.01 s."""
    import llvmlite

    told: dict[str, Any] = {}
    try:
        exec(Path(_folder_of_numba(), "_version.py").read_text(encoding="utf-8"), told)
        numba = told["get_versions"]()["version"]
    except (OSError, LookupError):  # of a numba that keeps its version elsewhere
        numba = import_module("importlib.metadata").version("numba")
    return {"numba": numba, "llvmlite": llvmlite.__version__}


@functools.cache
def stamp() -> str:
    """What machine code is made by: versions of numba, LLVM, NumPy and Python, and the processor."""
    binding = _binding()
    features = binding.get_host_cpu_features().flatten()
    made_by = binding.get_process_triple(), binding.get_host_cpu_name(), features
    return f"{versions()} {np.__version__} {sys.implementation.cache_tag} {made_by}"


def processor_type() -> str:
    """The name that LLVM has for this processor, and a number for all its features: what code is compiled for."""
    binding = _binding()
    features = str(binding.get_host_cpu_features().flatten()).encode()
    return f"{binding.get_host_cpu_name()} {crc32(features):08x}"


def _function(engine: Any, kept: Kept, environments: dict[str, Any]) -> Callable[..., Any]:
    """environments: those of the kernels before, by symbol, and of this one then; machine code has their addresses."""
    dynfunc = _part("_dynfunc")
    for symbol, of, constants in kept.environments:
        if symbol not in environments:
            known = vars(sys.modules[of]) if of in sys.modules else {"__name__": of}
            made = environments[symbol] = dynfunc.Environment(known)
            made.consts[:] = constants
            ctypes.c_void_p.from_address(engine.get_global_value_address(symbol)).value = id(made)
    start, own = engine.get_function_address(kept.function), environments[kept.environments[0].symbol]
    module = sys.modules[kept.module]
    function: Callable[..., Any] = dynfunc.make_function(
        module, kept.name, kept.name, start, own, (engine, environments)
    )
    return function


@functools.cache
def _linker() -> Any:
    """LLVM's."""
    binding = _binding()
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    triple = binding.get_process_triple()
    empty = binding.parse_assembly(f'target triple = "{triple}"')
    target = binding.Target.from_triple(triple).create_target_machine(codemodel="jitdefault", jit=True)
    return binding.create_mcjit_compiler(empty, target)


@functools.cache
def _helpers() -> dict[str, int]:
    """All that machine code may call, by name: where it is."""
    helpers = {f"numba_{name}": at for part in ("_helperlib", "_dynfunc") for name, at in _part(part).c_helpers.items()}
    # functions of the C library: those of the version that numba was linked with
    helpers.update(_part("_helperlib").c_helpers)
    for name, at in _part("core.runtime._nrt_python").c_helpers.items():
        helpers[name if name.startswith("_") else f"NRT_{name}"] = at
    errors = [kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, BaseException)]
    helpers.update({f"PyExc_{kind.__name__}": id(kind) for kind in errors})
    helpers["_Py_NoneStruct"] = id(None)
    helpers["numba_unpickle"] = ctypes.cast(_unpickle, ctypes.c_void_p).value
    return helpers


@ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
def _unpickle(data: int, size: int, digest: int) -> Any:
    """The class of an array that is returned, the error that is raised: numba's function imports numba for it."""
    return _unpickled(ctypes.string_at(data, size))


@functools.cache
def _unpickled(data: bytes) -> Any:
    return pickle.loads(data)


def _binding() -> Any:
    from llvmlite import binding

    return binding


@functools.cache
def _folder_of_numba() -> str:
    """Raises ImportError where there is no numba."""
    found = find_spec("numba")
    if found is None or not found.submodule_search_locations:
        raise ImportError("no numba")
    return found.submodule_search_locations[0]


@functools.cache
def _part(name: str) -> ModuleType:
    """An extension module of numba: the one that is imported or, where none is, without importing numba."""
    full = f"numba.{name}"
    if "numba" in sys.modules:
        return import_module(full)
    *parents, _ = name.split(".")
    spec = PathFinder.find_spec(full, [str(Path(_folder_of_numba(), *parents))])
    if spec is None or spec.loader is None:
        raise ImportError(f"no {full}")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules.pop(full, None)  # so that numba, when it is imported, finds its own modules as usual
    return module
