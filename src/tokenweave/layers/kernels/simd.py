"""Vector building blocks that the loop vectoriser does not find, written out as LLVM vectors.

Element types: float32; uint16 stands for bfloat16 and int16 for float16, neither of which Numba computes with.
Sums are kept in 16 float32 lanes and added up in one fixed order, so a result depends neither on the machine's vector
width nor on how many rows are computed together. Nothing here assumes NaN or infinity away.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from tokenweave.layers.kernels.jit import part

LANES = 16
STEP = 2 * LANES  # elements of each operand that one step of dot_tile takes: 64 bytes of bfloat16
AHEAD = 8  # rows that dot_tile prefetches ahead: 53 GB/s from one core against 33 without (4: 49, 16: 52)

FLOAT, HALF = ir.FloatType(), ir.HalfType()
INT16, INT32, INT64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOATS, WORDS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT32, LANES)
ZEROS = ir.Constant(FLOATS, [0.0] * LANES)
STORED = {types.float32: FLOAT, types.uint16: INT16, types.int16: HALF}

Value = Any  # an llvmlite value; llvmlite has no type hints
Builder = Any


def _pointer(builder: Builder, address: Value, element: Value, offset: Value | None = None) -> Value:
    pointer = builder.inttoptr(address, element.as_pointer())
    return pointer if offset is None else builder.gep(pointer, [offset])


def _load(builder: Builder, pointer: Value, kind: Value, alignment: int) -> Value:
    return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=alignment)


def _store(builder: Builder, value: Value, pointer: Value, alignment: int) -> None:
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=alignment)


def _splat(bits: int) -> Value:
    return ir.Constant(WORDS, [bits] * LANES)


def _shuffle(builder: Builder, left: Value, right: Value, lanes: list[int]) -> Value:
    return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(INT32, len(lanes)), lanes))


def _multiply_add(builder: Builder, a: Value, b: Value, total: Value) -> Value:
    name = "llvm.fmuladd.v16f32" if a.type == FLOATS else "llvm.fmuladd.f32"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(a.type, [a.type] * 3), name)
    return builder.call(function, [a, b, total])


def _widen(builder: Builder, dtype: Value, value: Value) -> Value:
    """One stored element as float32."""
    if dtype == types.float32:
        return value
    if dtype == types.int16:
        return builder.fpext(value, FLOAT)
    return builder.bitcast(builder.shl(builder.zext(value, INT32), INT32(16)), FLOAT)


def _load_lanes(builder: Builder, dtype: Value, pointer: Value) -> Value:
    """16 consecutive elements as float32."""
    if dtype == types.float32:
        return _load(builder, pointer, FLOATS, 4)
    stored = _load(builder, pointer, ir.VectorType(STORED[dtype], LANES), 2)
    if dtype == types.int16:
        return builder.fpext(stored, FLOATS)
    return builder.bitcast(builder.shl(builder.zext(stored, WORDS), _splat(16)), FLOATS)


def _load_step(builder: Builder, dtype: Value, pointer: Value) -> tuple[Value, Value]:
    """STEP consecutive elements as two vectors of float32, in an order that is the same for both operands of a product.

    bfloat16 comes as even and odd elements: one load and two operations for 32 elements.
    """
    if dtype == types.uint16:
        words = _load(builder, pointer, WORDS, 2)
        even, odd = builder.shl(words, _splat(16)), builder.and_(words, _splat(0xFFFF0000))
        return builder.bitcast(even, FLOATS), builder.bitcast(odd, FLOATS)
    return (
        _load_lanes(builder, dtype, pointer),
        _load_lanes(builder, dtype, builder.gep(pointer, [INT64(LANES)])),
    )


def _dot_products(context: Any, builder: Builder, dtype: Value) -> tuple[Callable, Callable]:
    """How an operand's STEP elements are loaded, and how two such are multiplied and added to 16 lanes."""
    if dtype == types.uint16 and "+avx512bf16" in context.codegen().magic_tuple()[2]:
        # one instruction for 32 products: 16 rows by a 2 MB matrix in 60 % of the time of two multiply-adds
        signature = ir.FunctionType(FLOATS, [FLOATS, WORDS, WORDS])
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        function = cgutils.get_or_insert_function(builder.module, signature, name)
        return (
            lambda pointer: _load(builder, pointer, WORDS, 2),
            lambda a, b, total: builder.call(function, [total, a, b]),
        )
    return (
        lambda pointer: _load_step(builder, dtype, pointer),
        lambda a, b, total: _multiply_add(
            builder, a[1], b[1], _multiply_add(builder, a[0], b[0], total)
        ),
    )


def _prefetch(builder: Builder, pointer: Value) -> None:
    byte = ir.IntType(8).as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    builder.call(function, [builder.bitcast(pointer, byte), INT32(0), INT32(3), INT32(1)])


def _sum_lanes(builder: Builder, totals: list[Value]) -> Value:
    """Four vectors of 16 lanes to one of their four sums."""

    def halve(left: Value, right: Value, group: int) -> Value:
        """Lanes in groups; the two halves of each group added, left's groups and right's in turn."""
        low = [
            start + side + lane
            for start in range(0, LANES, group)
            for side in (0, LANES)
            for lane in range(group // 2)
        ]
        high = [lane + group // 2 for lane in low]
        return builder.fadd(_shuffle(builder, left, right, low), _shuffle(builder, left, right, high))

    total = halve(halve(totals[0], totals[1], 16), halve(totals[2], totals[3], 16), 8)  # groups of 4: rows 0, 2, 1, 3
    for distance in (2, 1):
        swapped = [lane ^ distance for lane in range(LANES)]
        total = builder.fadd(total, _shuffle(builder, total, total, swapped))
    return _shuffle(builder, total, total, [0, 8, 4, 12])


def _dot_tile(columns: int) -> Any:
    @intrinsic
    def dot_tile(
        typing: Any, like: Any, a: Any, a_stride: Any, a_count: Any, b: Any, b_stride: Any, b_count: Any,
        length: Any, out: Any, out_stride: Any,
    ) -> Any:  # fmt: skip
        """out[j, i] = sum over k of a[i, k] * b[j, k], for 4 rows of a and `columns` rows of b.

        Addresses, and strides in elements. Where a_count < 4 or b_count < columns the last row stands in for the rest.
        out: float32, room for all of [columns, 4].
        """
        dtype = like.dtype

        def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
            _, a, a_stride, a_count, b, b_stride, b_count, length, out, out_stride = arguments
            element = STORED[dtype]
            load, multiply = _dot_products(context, builder, dtype)

            def rows(base: Value, stride: Value, count: Value, number: int) -> list[Value]:
                last = builder.sub(count, INT64(1))
                indices = [
                    builder.select(builder.icmp_signed("<", INT64(i), count), INT64(i), last) for i in range(number)
                ]
                return [_pointer(builder, base, element, builder.mul(i, stride)) for i in indices]

            a_rows, b_rows = rows(a, a_stride, a_count, 4), rows(b, b_stride, b_count, columns)
            ahead = builder.mul(a_stride, INT64(AHEAD))
            whole = builder.and_(length, INT64(-STEP))
            totals = [[cgutils.alloca_once_value(builder, ZEROS) for _ in b_rows] for _ in a_rows]
            with cgutils.for_range_slice(builder, INT64(0), whole, INT64(STEP), inc=True) as (k, _):
                b_values = [load(builder.gep(row, [k])) for row in b_rows]
                for row, row_totals in zip(a_rows, totals, strict=True):
                    pointer = builder.gep(row, [k])
                    for line in range(2 if dtype == types.float32 else 1):
                        _prefetch(builder, builder.gep(pointer, [builder.add(ahead, INT64(LANES * line))]))
                    a_value = load(pointer)
                    for b_value, total in zip(b_values, row_totals, strict=True):
                        builder.store(multiply(a_value, b_value, builder.load(total)), total)
            sums = [
                _sum_lanes(builder, [builder.load(row[j]) for row in totals]) for j in range(columns)
            ]
            slots = [cgutils.alloca_once_value(builder, s) for s in sums]
            with cgutils.for_range_slice(builder, whole, length, INT64(1), inc=True) as (k, _):
                for b_row, slot in zip(b_rows, slots, strict=True):
                    b_value = _widen(builder, dtype, builder.load(builder.gep(b_row, [k])))
                    total = builder.load(slot)
                    for i, a_row in enumerate(a_rows):
                        a_value = _widen(builder, dtype, builder.load(builder.gep(a_row, [k])))
                        new = _multiply_add(builder, a_value, b_value, builder.extract_element(total, INT32(i)))
                        total = builder.insert_element(total, new, INT32(i))
                    builder.store(total, slot)
            for j, slot in enumerate(slots):
                pointer = _pointer(builder, out, FLOAT, builder.mul(out_stride, INT64(j)))
                _store(builder, builder.load(slot), pointer, 4)
            return context.get_dummy_value()

        return types.void(like, *[types.intp] * 9), generate

    return dot_tile


dot_tile_1, dot_tile_4 = _dot_tile(1), _dot_tile(4)


def _outer_tile(vectors: int) -> Any:
    @intrinsic
    def outer_tile(
        typing: Any, like: Any, a: Any, a_stride: Any, a_count: Any, b: Any, b_stride: Any, length: Any,
        out: Any, out_stride: Any,
    ) -> Any:  # fmt: skip
        """out[i, :] += sum over k of a[i, k] * b[k, :], for 4 rows of a and 16 * `vectors` columns of b.

        Addresses, and strides in elements; a and out are float32. Where a_count < 4 the last row stands in for the
        rest, in a and in out.
        """
        dtype = like.dtype

        def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
            _, a, a_stride, a_count, b, b_stride, length, out, out_stride = arguments
            last = builder.sub(a_count, INT64(1))
            indices = [builder.select(builder.icmp_signed("<", INT64(i), a_count), INT64(i), last) for i in range(4)]
            a_rows = [_pointer(builder, a, FLOAT, builder.mul(i, a_stride)) for i in indices]
            out_rows = [_pointer(builder, out, FLOAT, builder.mul(i, out_stride)) for i in indices]
            offsets = [INT64(LANES * v) for v in range(vectors)]

            def lanes_of(kind: Value, row: Value) -> list[Value]:
                return [_load_lanes(builder, kind, builder.gep(row, [offset])) for offset in offsets]

            starts = [lanes_of(types.float32, row) for row in out_rows]
            totals = [[cgutils.alloca_once_value(builder, value) for value in row] for row in starts]
            b_start = _pointer(builder, b, STORED[dtype])
            with cgutils.for_range_slice(builder, INT64(0), length, INT64(1), inc=True) as (k, _):
                b_row = builder.gep(b_start, [builder.mul(k, b_stride)])
                b_values = lanes_of(dtype, b_row)
                for a_row, row_totals in zip(a_rows, totals, strict=True):
                    one = builder.insert_element(ZEROS, builder.load(builder.gep(a_row, [k])), INT32(0))
                    a_value = _shuffle(builder, one, one, [0] * LANES)
                    for b_value, total in zip(b_values, row_totals, strict=True):
                        builder.store(_multiply_add(builder, a_value, b_value, builder.load(total)), total)
            for out_row, row_totals in zip(out_rows, totals, strict=True):
                for offset, total in zip(offsets, row_totals, strict=True):
                    _store(builder, builder.load(total), builder.gep(out_row, [offset]), 4)
            return context.get_dummy_value()

        return types.void(like, *[types.intp] * 8), generate

    return outer_tile


outer_tile_1, outer_tile_4 = _outer_tile(1), _outer_tile(4)


@intrinsic
def widen(typing: Any, value: Any) -> Any:
    """A stored element as float32."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        stored = builder.bitcast(arguments[0], HALF) if value == types.int16 else arguments[0]
        return _widen(builder, value, stored)

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
        start = _pointer(builder, address, FLOAT)
        whole = builder.and_(length, INT64(-LANES))

        def keep(value: Value, slot: Value) -> None:
            best = builder.load(slot)
            builder.store(builder.select(builder.fcmp_ordered(">", value, best), value, best), slot)

        with cgutils.for_range_slice(builder, INT64(0), whole, INT64(LANES), inc=True) as (k, _):
            keep(_load(builder, builder.gep(start, [k]), FLOATS, 4), lanes)
        total = builder.load(lanes)
        for distance in (8, 4, 2, 1):
            other = _shuffle(builder, total, total, [lane ^ distance for lane in range(LANES)])
            total = builder.select(builder.fcmp_ordered(">", total, other), total, other)
        best = cgutils.alloca_once_value(builder, builder.extract_element(total, INT32(0)))
        with cgutils.for_range_slice(builder, whole, length, INT64(1), inc=True) as (k, _):
            keep(builder.load(builder.gep(start, [k])), best)
        return builder.load(best)

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
