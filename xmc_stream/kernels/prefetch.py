"""The processor's prefetch instruction, which neither Python nor NumPy has: begin to bring memory close, wait for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import config, types
from numba.extending import intrinsic


def _into(level: int) -> Callable[..., Any]:
    """An instruction that brings memory into a cache; level: 3 for the first one, 2 for the second."""

    def _prefetch(typingctx: Any, array: Any, index: Any) -> Any:
        """Begin to bring array[index] into the processor's cache, for reading; array: one-dimensional and contiguous."""
        if not (isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C" and index == types.int64):
            return None

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = context.make_array(array)(context, builder, arguments[0]).data
            pointer = builder.bitcast(builder.gep(data, [arguments[1]]), ir.PointerType(ir.IntType(8)))
            number = ir.IntType(32)
            of = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
            function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], of)
            read, keep, of_data = number(0), number(level), number(1)
            builder.call(function, [pointer, read, keep, of_data])
            return context.get_dummy_value()

        return types.void(array, index), generate

    return _prefetch


def _look(array: Any, index: Any) -> None:
    """In plain Python nothing can be fetched: an index that is out of range raises, as in other kernels."""
    array.item(index)


_config: Any = config  # its types do not know DISABLE_JIT
prefetch: Any = _look if _config.DISABLE_JIT else intrinsic(_into(2))
prefetch_near: Any = _look if _config.DISABLE_JIT else intrinsic(_into(3))  # where a few are asked for at a time
