"""What is kept of a compiled kernel for other processes, and how it is loaded: without what only the compiler needs.

Numba keeps machine code, bitcode, and the environment of every function that was compiled into the kernel: the name of its
module, and constants. When it loads a kernel, numba parses the bitcode, in case that a caller is compiled later; imports
these modules, its implementations of arrays and texts among them; and compiles functions that count references, of which each
kernel holds its own. All that takes three quarters of the time. Here it is done when something is compiled.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from llvmlite import binding
from numba.core import codegen, compiler, environment, runtime

_binding: Any = binding  # none of these has types
_compiler: Any = compiler
_environments: Any = environment
_runtime: Any = runtime
_has_symbols = False


@functools.cache
def usable() -> bool:
    """Whether numba has the private parts that all this needs; 0.60 to 0.68 have. Else numba loads kernels its own way."""
    needs: dict[Any, tuple[str, ...]] = {
        codegen.JITCodeLibrary: ("_set_compiled_object", "_finalize_final_module", "enable_object_caching"),
        codegen.JitEngine: ("_load_defined_symbols",),
        codegen.JITCPUCodegen: ("set_env",),
        environment.Environment: ("_memo",),
        environment: ("lookup_environment",),
        compiler.CompileResult: ("_reduce", "_rebuild"),
        runtime: ("_nrt_python",),
    }
    return all(hasattr(of, name) for of, names in needs.items() for name in names)


def give_memory() -> None:
    """Let machine code find the functions of numba's runtime that make and free arrays. Before it compiles, numba does too."""
    global _has_symbols
    if not _has_symbols:
        for name, address in _runtime._nrt_python.c_helpers.items():
            _binding.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)
        _has_symbols = True


class _Library(codegen.JITCodeLibrary):  # type: ignore[misc, unused-ignore]
    """A kernel's machine code, and its bitcode, which is parsed when a caller is compiled."""

    code = bitcode = b""

    def _get_module_for_linking(self) -> Any:
        if self._shared_module is None:
            self._shared_module = _binding.parse_bitcode(self.bitcode)
        return self._shared_module


_library: Any = _Library


def reduce(result: Any) -> tuple[Any, ...]:
    """What is kept of a compilation: numba's parts, with environments as tuples, which import nothing when they are read."""
    *parts, environments = result._reduce()
    return (*parts, [(one.globals["__name__"], one.consts, one.env_name) for one in environments])


def rebuild(context: Any, parts: tuple[Any, ...]) -> Any:
    """The compilation of which these parts were kept."""
    (name, _, (code, bitcode)), descriptor, own, *others, kept = parts
    signature, objectmode, lifted, annotation, reload_init = others
    for begin in reload_init:
        begin()
    library = _library(context.codegen(), name)
    library.code, library.bitcode = code, bitcode
    library.enable_object_caching()
    library._set_compiled_object(code)
    library._finalize_final_module()
    # numba finds in the bitcode which symbols there are: of these, it asks only for the function that Python calls
    library.codegen._engine._defined_symbols.add(descriptor.llvm_cpython_wrapper_name)
    entry = context.get_executable(library, descriptor, own)
    environments = [_environment(*one) for one in kept]
    for one in environments:
        library.codegen.set_env(one.env_name, one)
    return _compiler.compile_result(
        target_context=context, typing_context=context.typing_context, library=library, environment=own,
        entry_point=entry, fndesc=descriptor, type_annotation=annotation, signature=signature, objectmode=objectmode,
        lifted=lifted, reload_init=reload_init, referenced_envs=environments,
    )  # fmt: skip


def _environment(module: str, constants: list[Any], name: str) -> Any:
    """An environment, as numba makes it, but without importing its module: a kernel looks up nothing there when it runs."""
    known = _environments.lookup_environment(name)
    if known is not None:
        return known
    made = _environments.Environment(vars(sys.modules[module]) if module in sys.modules else {"__name__": module})
    made.consts[:] = constants
    made.env_name = name
    made._memo[name] = made
    return made
