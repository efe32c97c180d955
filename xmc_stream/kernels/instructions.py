"""Instructions that kernels use beside Python's: how LLVM is told of them. Imported when a kernel is compiled.

`jit.instruction` gives them to kernels, with the same in Python. Each function is asked for its code by types, and returns
None for those that it does not take.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from xmc_stream.kernels.vectors import HALF_WORD, LANES, WORD

_cgutils: Any = cgutils  # it has no types

# functions of the C library, found by name when the code is loaded: compiled code that calls them can be cached
pread: Any = types.ExternalFunction("pread", types.intp(types.int32, types.uintp, types.uintp, types.intp))
pwrite: Any = types.ExternalFunction("pwrite", types.intp(types.int32, types.uintp, types.uintp, types.intp))
memcpy: Any = types.ExternalFunction("memcpy", types.uintp(types.uintp, types.uintp, types.uintp))
fadvise: Any = types.ExternalFunction(
    "posix_fadvise" if hasattr(os, "posix_fadvise") else "getpid",
    types.int32(types.int32, types.intp, types.intp, types.int32),
)


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


prefetch, prefetch_near = intrinsic(_into(2)), intrinsic(_into(3))


@intrinsic
def popcount(typingctx: Any, word: Any) -> Any:
    """How many bits of a uint64 are 1."""
    if word != types.uint64:
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(word), generate


@intrinsic
def widen(typingctx: Any, weight: Any) -> Any:
    """A weight of a tile as float32: of 32 bits as it is, of 16 bits (uint16) widened."""
    if weight not in (types.float32, types.uint16):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if weight == types.float32:
            return arguments[0]
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(arguments[0], word), word(16)), ir.FloatType())

    return types.float32(weight), generate


def _are_float32(*arrays: Any) -> bool:
    return all(
        isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C" and array.dtype == types.float32
        for array in arrays
    )


@intrinsic
def total(typingctx: Any, array: Any) -> Any:
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


@intrinsic
def product(typingctx: Any, a: Any, at_a: Any, b: Any, at_b: Any, n: Any) -> Any:
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


@intrinsic
def soft_product(typingctx: Any, row: Any, at: Any, v: Any, n: Any, lam: Any) -> Any:
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


@intrinsic
def at_most(typingctx: Any, array: Any, at: Any, limit: Any) -> Any:
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


@intrinsic
def above(typingctx: Any, array: Any, at: Any, bounds: Any) -> Any:
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
