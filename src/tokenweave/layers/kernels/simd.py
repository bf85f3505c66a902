"""Elements of the three types as float32 and back, and sums and maxima in LLVM vectors.

Element types: float32; uint16 stands for bfloat16 and int16 for float16, neither of which Numba computes with.
Sums are kept in 16 float32 lanes and added up in one fixed order, so a row's result does not depend on what is computed
beside it. Nothing here assumes NaN or infinity away. Functions that take a builder write code;
those marked intrinsic are what kernels call.
"""

from typing import Any

from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from tokenweave.layers.kernels.jit import part

LANES = 16

FLOAT, HALF = ir.FloatType(), ir.HalfType()
INT16, INT32, INT64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOATS, WORDS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT32, LANES)
ZEROS = ir.Constant(FLOATS, [0.0] * LANES)
STORED = {types.float32: FLOAT, types.uint16: INT16, types.int16: HALF}

Value = Any  # an llvmlite value; llvmlite has no type hints
Builder = Any


def pointer_at(builder: Builder, address: Value, element: Value, offset: Value | None = None) -> Value:
    pointer = builder.inttoptr(address, element.as_pointer())
    return pointer if offset is None else builder.gep(pointer, [offset])


def load(builder: Builder, pointer: Value, kind: Value, alignment: int) -> Value:
    return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=alignment)


def store(builder: Builder, value: Value, pointer: Value, alignment: int) -> None:
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=alignment)


def splat(bits: int) -> Value:
    return ir.Constant(WORDS, [bits] * LANES)


def shuffle(builder: Builder, left: Value, right: Value, lanes: list[int]) -> Value:
    return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(INT32, len(lanes)), lanes))


def multiply_add(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    name = "llvm.fmuladd.v16f32" if a.type == FLOATS else "llvm.fmuladd.f32"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(a.type, [a.type] * 3), name)
    return builder.call(function, [a, b, c])


def widened(builder: Builder, dtype: Value, value: Value) -> Value:
    """One stored element as float32."""
    if dtype == types.float32:
        return value
    if dtype == types.int16:
        return builder.fpext(value, FLOAT)
    return builder.bitcast(builder.shl(builder.zext(value, INT32), INT32(16)), FLOAT)


def load_lanes(builder: Builder, dtype: Value, pointer: Value) -> Value:
    """16 consecutive elements as float32."""
    if dtype == types.float32:
        return load(builder, pointer, FLOATS, 4)
    stored = load(builder, pointer, ir.VectorType(STORED[dtype], LANES), 2)
    if dtype == types.int16:
        return builder.fpext(stored, FLOATS)
    return builder.bitcast(builder.shl(builder.zext(stored, WORDS), splat(16)), FLOATS)


def sum_lanes(builder: Builder, totals: list[Value]) -> Value:
    """Four vectors of 16 lanes to one of their four sums."""

    def halve(left: Value, right: Value, group: int) -> Value:
        """Lanes in groups; the two halves of each group added, left's groups and right's in turn."""
        low = [
            start + side + lane for start in range(0, LANES, group) for side in (0, LANES) for lane in range(group // 2)
        ]
        high = [lane + group // 2 for lane in low]
        return builder.fadd(shuffle(builder, left, right, low), shuffle(builder, left, right, high))

    total = halve(halve(totals[0], totals[1], 16), halve(totals[2], totals[3], 16), 8)  # groups of 4: rows 0, 2, 1, 3
    for distance in (2, 1):
        swapped = [lane ^ distance for lane in range(LANES)]
        total = builder.fadd(total, shuffle(builder, total, total, swapped))
    return shuffle(builder, total, total, [0, 8, 4, 12])


@intrinsic
def widen(typing: Any, value: Any) -> Any:
    """A stored element as float32."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        stored = builder.bitcast(arguments[0], HALF) if value == types.int16 else arguments[0]
        return widened(builder, value, stored)

    return types.float32(value), generate


@intrinsic
def narrow(typing: Any, like: Any, value: Any) -> Any:
    """A float32 as an element of `like`'s type, rounded to nearest even; NaN stays NaN."""
    dtype = like.dtype

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        wide = arguments[1]
        if dtype == types.float32:
            return wide
        if dtype == types.int16:
            return builder.bitcast(builder.fptrunc(wide, HALF), INT16)
        bits = builder.bitcast(wide, INT32)
        is_odd = builder.and_(builder.lshr(bits, INT32(16)), INT32(1))
        rounded = builder.add(bits, builder.add(is_odd, INT32(0x7FFF)))
        quiet = builder.or_(bits, INT32(0x400000))
        kept = builder.select(builder.fcmp_unordered("uno", wide, wide), quiet, rounded)
        return builder.trunc(builder.lshr(kept, INT32(16)), INT16)

    return dtype(like, types.float32), generate


@intrinsic
def highest(typing: Any, address: Any, length: Any) -> Any:
    """The largest of `length` float32 at `address`; -infinity of none; NaNs are passed over."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        address, length = arguments
        lowest = ir.Constant(FLOATS, [float("-inf")] * LANES)
        lanes = cgutils.alloca_once_value(builder, lowest)
        start = pointer_at(builder, address, FLOAT)
        whole = builder.and_(length, INT64(-LANES))

        def keep(value: Value, slot: Value) -> None:
            best = builder.load(slot)
            builder.store(builder.select(builder.fcmp_ordered(">", value, best), value, best), slot)

        with cgutils.for_range_slice(builder, INT64(0), whole, INT64(LANES), inc=True) as (k, _):
            keep(load(builder, builder.gep(start, [k]), FLOATS, 4), lanes)
        total = builder.load(lanes)
        for distance in (8, 4, 2, 1):
            other = shuffle(builder, total, total, [lane ^ distance for lane in range(LANES)])
            total = builder.select(builder.fcmp_ordered(">", total, other), total, other)
        best = cgutils.alloca_once_value(builder, builder.extract_element(total, INT32(0)))
        with cgutils.for_range_slice(builder, whole, length, INT64(1), inc=True) as (k, _):
            keep(builder.load(builder.gep(start, [k])), best)
        return builder.load(best)

    return types.float32(types.intp, types.intp), generate


@intrinsic
def total(typing: Any, address: Any, length: Any) -> Any:
    """The sum of `length` float32 at `address`, a multiple of 16, in 16 lanes: zeros at the end do not change a bit."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        address, length = arguments
        lanes = cgutils.alloca_once_value(builder, ZEROS)
        start = pointer_at(builder, address, FLOAT)
        with cgutils.for_range_slice(builder, INT64(0), length, INT64(LANES), inc=True) as (k, _):
            value = load(builder, builder.gep(start, [k]), FLOATS, 4)
            builder.store(builder.fadd(builder.load(lanes), value), lanes)
        sums = sum_lanes(builder, [builder.load(lanes), ZEROS, ZEROS, ZEROS])
        return builder.extract_element(sums, INT32(0))

    return types.float32(types.intp, types.intp), generate


@intrinsic
def _pointer_to(typing: Any, like: Any, address: Any) -> Any:
    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        return builder.inttoptr(arguments[1], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(like, types.intp), generate


# Arrays without an owner: to slice an owned one counts a reference up and down, 10 ns, and a loop over x[row, i] is not
# vectorised where one over a row is.


@part
def row_at(like, address, length):  # type: ignore[no-untyped-def]
    """The [length] array of `like`'s type at `address`."""
    return carray(_pointer_to(like, address), (length,))


@part
def rows_at(like, address, rows, columns):  # type: ignore[no-untyped-def]
    """The [rows, columns] array of `like`'s type at `address`."""
    return carray(_pointer_to(like, address), (rows, columns))


@intrinsic
def round_to_integer(typing: Any, value: Any) -> Any:
    """A float32 below 2²² in size rounded to an integer, as a float32 and as an int32; of NaN the int32 is any."""
    result = types.Tuple([types.float32, types.int32])

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        shift = FLOAT(1.5 * 2**23)  # puts the units at the last bit of the sum; no fptosi, undefined for NaN
        shifted = builder.fadd(arguments[0], shift)
        bits = builder.sub(builder.bitcast(shifted, INT32), builder.bitcast(shift, INT32))
        return context.make_tuple(builder, result, [builder.fsub(shifted, shift), bits])

    return result(types.float32), generate


@intrinsic
def float_of_bits(typing: Any, bits: Any) -> Any:
    """The float32 with these 32 bits."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        return builder.bitcast(builder.trunc(arguments[0], INT32) if bits.bitwidth > 32 else arguments[0], FLOAT)

    return types.float32(bits), generate
