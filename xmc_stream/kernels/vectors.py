"""A sum in vector registers, which a compiled loop is not: its order would not be the one that is written down."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, config, types
from numba.extending import intrinsic

_cgutils: Any = cgutils  # it has no types
_config: Any = config

_LANES = 16


def _total(typingctx: Any, array: Any) -> Any:
    """The sum of a float32 array of LANES, 2 LANES, ... values: LANES sums beside each other, then halves added to halves."""
    if not (
        isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C" and array.dtype == types.float32
    ):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        made = context.make_array(array)(context, builder, arguments[0])
        vector = ir.VectorType(ir.FloatType(), _LANES)
        sums = _cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * _LANES))
        step = ir.Constant(ir.IntType(64), _LANES)
        with _cgutils.for_range(builder, builder.sdiv(made.nitems, step)) as loop:
            place = builder.gep(made.data, [builder.mul(loop.index, step)])
            values = builder.load(builder.bitcast(place, ir.PointerType(vector)), align=4)
            builder.store(builder.fadd(builder.load(sums), values), sums)
        total, width = builder.load(sums), _LANES
        while width > 1:
            width //= 2
            halves = [
                builder.shuffle_vector(
                    total, ir.Constant(total.type, ir.Undefined),
                    ir.Constant(ir.VectorType(ir.IntType(32), width), list(range(first, first + width))),
                )
                for first in (0, width)
            ]  # fmt: skip
            total = builder.fadd(*halves)
        return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))

    return types.float32(array), generate


def _plain_total(array: Any) -> Any:
    """The same sums in NumPy."""
    sums = np.zeros(_LANES, np.float32)
    for values in array.reshape(-1, _LANES):
        sums += values
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    return sums[0]


total: Any = _plain_total if _config.DISABLE_JIT else intrinsic(_total)
