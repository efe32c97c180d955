"""Instructions of the processor, and functions of the C library, that compiled kernels call for those of `instructions`.

Imported when a kernel is compiled. Each intrinsic is asked for its code by types, and returns None for those that it does
not take.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic, overload

from xmc_stream.kernels import instructions
from xmc_stream.kernels.instructions import HALF_WORD, LANES, WORD

_cgutils: Any = cgutils  # it has no types
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_BYTES = {ir.IntType(8): 1, ir.FloatType(): 4, ir.DoubleType(): 8}


@intrinsic
def _prefetch(typingctx: Any, array: Any, index: Any) -> Any:
    if not (isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C" and index == types.int64):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(array)(context, builder, arguments[0]).data
        pointer = builder.bitcast(builder.gep(data, [arguments[1]]), ir.PointerType(ir.IntType(8)))
        number = ir.IntType(32)
        of = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], of)
        read, second_level, of_data = number(0), number(2), number(1)
        builder.call(function, [pointer, read, second_level, of_data])
        return context.get_dummy_value()

    return types.void(array, index), generate


@intrinsic
def _popcount(typingctx: Any, word: Any) -> Any:
    if word != types.uint64:
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(word), generate


@intrinsic
def _widen(typingctx: Any, weight: Any) -> Any:
    if weight not in (types.float32, types.uint16):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if weight == types.float32:
            return arguments[0]
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(arguments[0], word), word(16)), ir.FloatType())

    return types.float32(weight), generate


def _are(dtype: Any, *arrays: Any) -> bool:
    return all(
        isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C" and array.dtype == dtype
        for array in arrays
    )


@intrinsic
def _total(typingctx: Any, array: Any) -> Any:
    if not _are(types.float32, array):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        made = context.make_array(array)(context, builder, arguments[0])
        return _sum(builder, made.nitems, ir.FloatType(), lambda at: _load(builder, made.data, at, _FLOATS))

    return types.float32(array), generate


@intrinsic
def _product(typingctx: Any, a: Any, at_a: Any, b: Any, at_b: Any, n: Any) -> Any:
    if not (_are(types.float32, a, b) and at_a == types.int64 and at_b == types.int64 and n == types.int64):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        of_a, of_b = (
            builder.gep(context.make_array(kind)(context, builder, array).data, [at])
            for kind, array, at in ((a, arguments[0], arguments[1]), (b, arguments[2], arguments[3]))
        )

        def term(at: Any) -> Any:
            return builder.fmul(_load(builder, of_a, at, _FLOATS), _load(builder, of_b, at, _FLOATS))

        return _sum(builder, arguments[4], ir.FloatType(), term)

    return types.float32(a, at_a, b, at_b, n), generate


@intrinsic
def _soft_product(typingctx: Any, row: Any, at: Any, v: Any, n: Any, lam: Any) -> Any:
    numbers = at == types.int64 and n == types.int64 and lam == types.float64
    if not (numbers and _are(types.float32, row) and _are(types.float64, v)):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        of_row = builder.gep(context.make_array(row)(context, builder, arguments[0]).data, [arguments[1]])
        of_v = context.make_array(v)(context, builder, arguments[2]).data
        doubles = ir.VectorType(ir.DoubleType(), LANES)
        high = _in_all_lanes(builder, arguments[4])
        low = builder.fneg(high)

        def term(at: Any) -> Any:
            x, y = _load(builder, of_row, at, _FLOATS), _load(builder, of_v, at, doubles)
            return builder.fmul(builder.fpext(x, doubles), _soft(builder, y, low, high))

        return _sum(builder, arguments[3], ir.DoubleType(), term)

    return types.float64(row, at, v, n, lam), generate


@intrinsic
def _at_most(typingctx: Any, array: Any, at: Any, limit: Any) -> Any:
    if not (_are(types.uint8, array) and at == types.int64 and limit == types.uint8):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(array)(context, builder, arguments[0]).data
        values = _load(builder, data, arguments[1], ir.VectorType(ir.IntType(8), WORD))
        limits = _in_all_lanes(builder, arguments[2], WORD)
        return builder.bitcast(builder.icmp_unsigned("<=", values, limits), ir.IntType(64))

    return types.uint64(array, at, limit), generate


@intrinsic
def _above(typingctx: Any, array: Any, at: Any, bounds: Any) -> Any:
    if not (at == types.int64 and _are(types.float32, array, bounds)):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(ir.FloatType(), HALF_WORD)
        values, limits = (
            _load(builder, context.make_array(kind)(context, builder, value).data, arguments[1], vector)
            for kind, value in ((array, arguments[0]), (bounds, arguments[2]))
        )
        bits = builder.bitcast(builder.fcmp_ordered(">", values, limits), ir.IntType(HALF_WORD))
        return builder.zext(bits, ir.IntType(WORD))

    return types.uint64(array, at, bounds), generate


@intrinsic
def _soft_lines(typingctx: Any, indices: Any, values: Any, begin: Any, end: Any, v: Any, lam: Any, sums: Any) -> Any:
    if not (_are(types.float32, values, v, sums) and _are_entries(indices, begin, end) and lam == types.float32):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        of_indices, of_values, of_v, of_sums = (
            context.make_array(kind)(context, builder, arguments[at]).data
            for at, kind in ((0, indices), (1, values), (4, v), (6, sums))
        )
        first, last = arguments[2], arguments[3]
        high = _in_all_lanes(builder, arguments[5])
        low, one, two = builder.fneg(high), ir.Constant(ir.IntType(64), 1), ir.Constant(ir.IntType(64), 2)
        zero = ir.Constant(_FLOATS, [0.0] * LANES)
        even, odd = (_cgutils.alloca_once_value(builder, zero) for _ in range(2))

        def add(p: Any, sum_: Any) -> None:
            x = builder.load(_line(builder, of_indices, p, of_v, indices.dtype), align=4)
            value = _in_all_lanes(builder, builder.load(builder.gep(of_values, [p])))
            product = builder.fmul(value, _soft(builder, x, low, high))
            builder.store(builder.fadd(builder.load(sum_), product), sum_)

        n = builder.sub(last, first)
        with _cgutils.for_range(builder, builder.sdiv(n, two)) as loop:
            p = builder.add(first, builder.mul(loop.index, two))
            add(p, even)
            add(builder.add(p, one), odd)
        with builder.if_then(builder.icmp_signed("==", builder.srem(n, two), one)):
            add(builder.sub(last, one), even)
        total = builder.fadd(builder.load(even), builder.load(odd))
        builder.store(total, builder.bitcast(of_sums, ir.PointerType(_FLOATS)), align=4)
        return context.get_dummy_value()

    return types.void(indices, values, begin, end, v, lam, sums), generate


@intrinsic
def _add_to_lines(typingctx: Any, indices: Any, values: Any, begin: Any, end: Any, steps: Any, v: Any) -> Any:
    if not (_are(types.float32, values, steps, v) and _are_entries(indices, begin, end)):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        of_indices, of_values, of_steps, of_v = (
            context.make_array(kind)(context, builder, arguments[at]).data
            for at, kind in ((0, indices), (1, values), (4, steps), (5, v))
        )
        step = builder.load(builder.bitcast(of_steps, ir.PointerType(_FLOATS)), align=4)
        with _cgutils.for_range(builder, builder.sub(arguments[3], arguments[2])) as loop:
            p = builder.add(arguments[2], loop.index)
            line = _line(builder, of_indices, p, of_v, indices.dtype)
            value = _in_all_lanes(builder, builder.load(builder.gep(of_values, [p])))
            builder.store(builder.fadd(builder.load(line, align=4), builder.fmul(value, step)), line, align=4)
        return context.get_dummy_value()

    return types.void(indices, values, begin, end, steps, v), generate


@intrinsic
def _lane_step(
    typingctx: Any, i: Any, awake: Any, least: Any, square: Any, weight: Any, tau: Any, positive: Any, h2: Any, upper: Any,
    alpha: Any, sums: Any, met: Any,
) -> Any:  # fmt: skip
    floats = least == square == weight == tau == types.float32
    numbers = i == types.int64 and floats and awake == positive == types.uint16
    if not (numbers and _are(types.float32, h2, upper, alpha, sums, met)):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:

        def place(at: int, kind: Any, line: Any) -> Any:
            start = context.make_array(kind)(context, builder, arguments[at]).data
            first = builder.gep(start, [builder.mul(line, ir.Constant(ir.IntType(64), LANES))])
            return builder.bitcast(first, ir.PointerType(_FLOATS))

        def load(at: int, kind: Any, line: int) -> Any:
            return builder.load(place(at, kind, ir.Constant(ir.IntType(64), line)), align=4)

        zero, half, one = (ir.Constant(_FLOATS, [value] * LANES) for value in (0.0, 0.5, 1.0))
        least_of, square, weight, tau = (_in_all_lanes(builder, arguments[at]) for at in (2, 3, 4, 5))
        may_move, is_positive = (builder.bitcast(arguments[at], ir.VectorType(ir.IntType(1), LANES)) for at in (1, 6))
        sign = builder.select(is_positive, one, builder.fneg(one))
        own_h2 = builder.fdiv(builder.select(is_positive, load(7, h2, 1), load(7, h2, 0)), weight)
        most = builder.fmul(builder.select(is_positive, load(8, upper, 1), load(8, upper, 0)), weight)
        before = builder.load(place(9, alpha, arguments[0]), align=4)
        g = builder.fsub(builder.fmul(sign, builder.fdiv(load(10, sums, 0), tau)), one)
        g = builder.fadd(g, builder.fmul(before, own_h2))
        curvature = builder.fadd(builder.fdiv(square, tau), own_h2)
        after = builder.fsub(before, builder.fdiv(g, curvature))
        after = builder.select(builder.fcmp_ordered(">", after, zero), after, zero)
        after = builder.select(builder.fcmp_ordered("<", after, most), after, most)
        size = builder.select(builder.fcmp_ordered("<", g, zero), builder.fneg(g), g)
        may_move = builder.and_(may_move, builder.fcmp_ordered(">", size, least_of))
        after = builder.select(may_move, after, before)
        moved = builder.fcmp_ordered("!=", after, before)
        size = builder.select(moved, size, zero)
        largest = load(11, met, 0)
        largest = builder.select(builder.fcmp_ordered(">", size, largest), size, largest)
        step = builder.fsub(after, before)
        lost = builder.fmul(step, builder.fadd(g, builder.fmul(half, builder.fmul(curvature, step))))
        first, second = (ir.Constant(ir.IntType(64), line) for line in (0, 1))
        builder.store(largest, place(11, met, first), align=4)
        builder.store(builder.fsub(load(11, met, 1), lost), place(11, met, second), align=4)
        builder.store(after, place(9, alpha, arguments[0]), align=4)
        builder.store(builder.fmul(step, sign), place(10, sums, first), align=4)
        return builder.bitcast(moved, ir.IntType(LANES))

    return types.uint16(i, awake, least, square, weight, tau, positive, h2, upper, alpha, sums, met), generate


def _are_entries(indices: Any, begin: Any, end: Any) -> bool:
    return (_are(types.int32, indices) or _are(types.int64, indices)) and begin == types.int64 and end == types.int64


def _line(builder: Any, indices: Any, p: Any, v: Any, index: Any) -> Any:
    """Where the LANES values of the feature of entry p begin."""
    feature = builder.load(builder.gep(indices, [p]))
    if index != types.int64:
        feature = builder.sext(feature, ir.IntType(64))
    place = builder.gep(v, [builder.mul(feature, ir.Constant(ir.IntType(64), LANES))])
    return builder.bitcast(place, ir.PointerType(_FLOATS))


def _load(builder: Any, data: Any, at: Any, vector: Any) -> Any:
    """The values from data[at] on, as a vector that need not lie where one of its size does."""
    place = builder.bitcast(builder.gep(data, [at]), ir.PointerType(vector))
    return builder.load(place, align=_BYTES[vector.element])


def _sum(builder: Any, n: Any, number: Any, term: Callable[[Any], Any]) -> Any:
    """The sum of term(0), term(LANES), ... below n, LANES values each, of a type; then as `_halved`."""
    zeros, step = ir.Constant(ir.VectorType(number, LANES), [0.0] * LANES), ir.Constant(ir.IntType(64), LANES)
    sums = _cgutils.alloca_once_value(builder, zeros)
    with _cgutils.for_range(builder, builder.sdiv(n, step)) as loop:
        builder.store(builder.fadd(builder.load(sums), term(builder.mul(loop.index, step))), sums)
    return _halved(builder, builder.load(sums))


def _soft(builder: Any, x: Any, low: Any, high: Any) -> Any:
    """x less what of it lies in [low, high]."""
    clipped = builder.select(builder.fcmp_ordered(">", x, low), x, low)
    clipped = builder.select(builder.fcmp_ordered("<", clipped, high), clipped, high)
    return builder.fsub(x, clipped)


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


def _in_all_lanes(builder: Any, value: Any, lanes: int = LANES) -> Any:
    """A value in each of so many places."""
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes))


def _uncounted() -> dict[str, bool]:
    """The option by which no references to arrays are counted. It is a private one of numba."""
    if hasattr(getattr(cpu_target, "options", None), "_nrt"):
        return {"_nrt": False}
    warnings.warn(
        f"numba {numba.__version__} has no option _nrt any more, which keeps inner loops from counting references. Training "
        "takes longer and gives the same model. Install numba 0.68, which has the option",
        RuntimeWarning,
        stacklevel=1,
    )
    return {}


UNCOUNTED: Any = _uncounted()  # numba's types do not know it


def _compiled_as(plain: Callable[..., Any], made: Any) -> None:
    """Have compiled kernels call `made` where they call `plain`."""

    def typed(*arguments):  # type: ignore[no-untyped-def]
        def call(*arguments):  # type: ignore[no-untyped-def]
            return made(*arguments)

        return call

    overload(plain, jit_options=UNCOUNTED)(typed)


def _c(name: str, returns: Any, *takes: Any) -> Any:
    """A function of the C library, found by its name when the code is loaded: compiled code that calls it can be kept."""
    return types.ExternalFunction(name, returns(*takes))


_advise = "posix_fadvise" if hasattr(os, "posix_fadvise") else "getpid"
for _plain, _made in (
    (instructions.prefetch, _prefetch), (instructions.popcount, _popcount), (instructions.widen, _widen),
    (instructions.total, _total), (instructions.product, _product), (instructions.soft_product, _soft_product),
    (instructions.at_most, _at_most), (instructions.above, _above),
    (instructions.soft_lines, _soft_lines), (instructions.add_to_lines, _add_to_lines), (instructions.lane_step, _lane_step),
    (instructions.pread, _c("pread", types.intp, types.int32, types.uintp, types.uintp, types.intp)),
    (instructions.pwrite, _c("pwrite", types.intp, types.int32, types.uintp, types.uintp, types.intp)),
    (instructions.memcpy, _c("memcpy", types.uintp, types.uintp, types.uintp, types.uintp)),
    (instructions.fadvise, _c(_advise, types.int32, types.int32, types.intp, types.intp, types.int32)),
):  # fmt: skip
    _compiled_as(_plain, _made)
