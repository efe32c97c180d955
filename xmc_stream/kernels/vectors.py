"""What compiled loops do not do in vector registers: sums, whose order would not be the one that is written down; masks."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, config, types
from numba.extending import intrinsic

_cgutils: Any = cgutils  # it has no types
_config: Any = config

LANES = 16
WORD, HALF_WORD = 64, 32


def _are_float32(*arrays: Any) -> bool:
    return all(
        isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C" and array.dtype == types.float32
        for array in arrays
    )


def _total(typingctx: Any, array: Any) -> Any:
    """The sum of a float32 array of LANES, 2 LANES, ... values: LANES sums beside each other, then halves added to halves."""
    if not _are_float32(array):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        made = context.make_array(array)(context, builder, arguments[0])
        vector = ir.VectorType(ir.FloatType(), LANES)
        sums = _cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * LANES))
        step = ir.Constant(ir.IntType(64), LANES)
        with _cgutils.for_range(builder, builder.sdiv(made.nitems, step)) as loop:
            place = builder.gep(made.data, [builder.mul(loop.index, step)])
            values = builder.load(builder.bitcast(place, ir.PointerType(vector)), align=4)
            builder.store(builder.fadd(builder.load(sums), values), sums)
        return _halved(builder, builder.load(sums))

    return types.float32(array), generate


def _halved(builder: Any, sums: Any) -> Any:
    """LANES sums as one: halves added to halves."""
    total, width = sums, LANES
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


def _product(typingctx: Any, a: Any, at_a: Any, b: Any, at_b: Any, n: Any) -> Any:
    """The sum of a[at_a + j] b[at_b + j], j = 0 .. n - 1, for float32 arrays, n a multiple of LANES: summed as `total` does."""
    if not (_are_float32(a, b) and at_a == types.int64 and at_b == types.int64 and n == types.int64):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(ir.FloatType(), LANES)
        starts = [
            builder.gep(context.make_array(kind)(context, builder, array).data, [at])
            for kind, array, at in ((a, arguments[0], arguments[1]), (b, arguments[2], arguments[3]))
        ]
        sums = _cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * LANES))
        step = ir.Constant(ir.IntType(64), LANES)
        with _cgutils.for_range(builder, builder.sdiv(arguments[4], step)) as loop:
            offset = builder.mul(loop.index, step)
            x, y = (
                builder.load(builder.bitcast(builder.gep(start, [offset]), ir.PointerType(vector)), align=4)
                for start in starts
            )
            builder.store(builder.fadd(builder.load(sums), builder.fmul(x, y)), sums)
        return _halved(builder, builder.load(sums))

    return types.float32(a, at_a, b, at_b, n), generate


def _soft_product(typingctx: Any, row: Any, at: Any, v: Any, n: Any, lam: Any) -> Any:
    """The sum of row[at + j] soft(v[j], lam), j = 0 .. n - 1, for float32 and float64 arrays, n a multiple of LANES.

    LANES sums in float64 beside each other, then halves added to halves.
    """
    arrays = all(isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C" for array in (row, v))
    numbers = at == types.int64 and n == types.int64 and lam == types.float64
    if not (arrays and numbers and row.dtype == types.float32 and v.dtype == types.float64):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        narrow, vector = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.DoubleType(), LANES)
        of_row = builder.gep(context.make_array(row)(context, builder, arguments[0]).data, [arguments[1]])
        of_v = context.make_array(v)(context, builder, arguments[2]).data
        high = builder.insert_element(ir.Constant(vector, ir.Undefined), arguments[4], ir.Constant(ir.IntType(32), 0))
        high = builder.shuffle_vector(
            high, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        )
        low = builder.fneg(high)
        sums = _cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * LANES))
        step = ir.Constant(ir.IntType(64), LANES)
        with _cgutils.for_range(builder, builder.sdiv(arguments[3], step)) as loop:
            offset = builder.mul(loop.index, step)
            x, y = (
                builder.load(builder.bitcast(builder.gep(start, [offset]), ir.PointerType(kind)), align=align)
                for start, kind, align in ((of_row, narrow, 4), (of_v, vector, 8))
            )
            clipped = builder.select(builder.fcmp_ordered(">", y, low), y, low)
            clipped = builder.select(builder.fcmp_ordered("<", clipped, high), clipped, high)
            product = builder.fmul(builder.fpext(x, vector), builder.fsub(y, clipped))
            builder.store(builder.fadd(builder.load(sums), product), sums)
        return _halved(builder, builder.load(sums))

    return types.float64(row, at, v, n, lam), generate


def _plain_soft_product(row: Any, at: Any, v: Any, n: Any, lam: Any) -> Any:
    """The same in NumPy."""
    terms = row[at : at + n].astype(np.float64) * (v[:n] - np.minimum(np.maximum(v[:n], -lam), lam))
    return _plain_total(terms)


def _at_most(typingctx: Any, array: Any, at: Any, limit: Any) -> Any:
    """A word whose bit b is 1 where array[at + b] <= limit, b = 0 .. 63, for a uint8 array."""
    whole = isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C" and array.dtype == types.uint8
    if not (whole and at == types.int64 and limit == types.uint8):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(ir.IntType(8), WORD)
        place = builder.gep(context.make_array(array)(context, builder, arguments[0]).data, [arguments[1]])
        values = builder.load(builder.bitcast(place, ir.PointerType(vector)), align=1)
        limits = builder.insert_element(ir.Constant(vector, ir.Undefined), arguments[2], ir.Constant(ir.IntType(32), 0))
        limits = builder.shuffle_vector(
            limits, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), WORD), [0] * WORD)
        )
        return builder.bitcast(builder.icmp_unsigned("<=", values, limits), ir.IntType(64))

    return types.uint64(array, at, limit), generate


def _above(typingctx: Any, array: Any, at: Any, bounds: Any) -> Any:
    """A word whose bit b is 1 where array[at + b] > bounds[at + b], b = 0 .. 31, for float32 arrays."""
    if not (at == types.int64 and _are_float32(array, bounds)):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(ir.FloatType(), HALF_WORD)
        values, limits = (
            builder.load(
                builder.bitcast(
                    builder.gep(context.make_array(kind)(context, builder, value).data, [arguments[1]]),
                    ir.PointerType(vector),
                ),
                align=4,
            )
            for kind, value in ((array, arguments[0]), (bounds, arguments[2]))
        )
        bits = builder.bitcast(builder.fcmp_ordered(">", values, limits), ir.IntType(HALF_WORD))
        return builder.zext(bits, ir.IntType(WORD))

    return types.uint64(array, at, bounds), generate


def _plain_above(array: Any, at: Any, bounds: Any) -> Any:
    """The same in NumPy."""
    return np.uint64(sum(1 << b for b in range(HALF_WORD) if array[at + b] > bounds[at + b]))


def _plain_at_most(array: Any, at: Any, limit: Any) -> Any:
    """The same in NumPy."""
    return np.uint64(sum(1 << b for b in range(WORD) if array[at + b] <= limit))


def _plain_product(a: Any, at_a: Any, b: Any, at_b: Any, n: Any) -> Any:
    """The same sums in NumPy."""
    return _plain_total(a[at_a : at_a + n] * b[at_b : at_b + n])


def _plain_total(array: Any) -> Any:
    """The same sums in NumPy."""
    sums = np.zeros(LANES, array.dtype)
    for values in array.reshape(-1, LANES):
        sums += values
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    return sums[0]


total: Any = _plain_total if _config.DISABLE_JIT else intrinsic(_total)
product: Any = _plain_product if _config.DISABLE_JIT else intrinsic(_product)
soft_product: Any = _plain_soft_product if _config.DISABLE_JIT else intrinsic(_soft_product)
above: Any = _plain_above if _config.DISABLE_JIT else intrinsic(_above)
at_most: Any = _plain_at_most if _config.DISABLE_JIT else intrinsic(_at_most)
