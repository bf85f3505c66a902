"""The two inner loops of matrix products, written out as LLVM vectors so that a tile of sums stays in registers."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tokenweave.layers.kernels.simd import (
    FLOAT,
    FLOATS,
    INT32,
    INT64,
    LANES,
    STORED,
    WORDS,
    ZEROS,
    Builder,
    Value,
    load,
    load_lanes,
    multiply_add,
    pointer_at,
    shuffle,
    splat,
    store,
    sum_lanes,
    widened,
)

STEP = 2 * LANES  # elements of each operand that one step of dot_tile takes: 64 bytes of bfloat16
AHEAD = 8  # rows that dot_tile prefetches ahead; [1536, 576] bfloat16 from memory, µs without | 2 | 8 | 32:
# by 1 row 66 | 74 | 55 | 57, by 16 rows 198 | 212 | 106 | 92


def load_step(builder: Builder, dtype: Value, pointer: Value) -> tuple[Value, Value]:
    """STEP consecutive elements as two vectors of float32, in an order that is the same for both operands of a product.

    bfloat16 comes as even and odd elements: one load and two operations for 32 elements.
    """
    if dtype == types.uint16:
        words = load(builder, pointer, WORDS, 2)
        even, odd = builder.shl(words, splat(16)), builder.and_(words, splat(0xFFFF0000))
        return builder.bitcast(even, FLOATS), builder.bitcast(odd, FLOATS)
    return (
        load_lanes(builder, dtype, pointer),
        load_lanes(builder, dtype, builder.gep(pointer, [INT64(LANES)])),
    )


def _dot_products(context: Any, builder: Builder, dtype: Value) -> tuple[Callable, Callable]:
    """How an operand's STEP elements are loaded, and how two such are multiplied and added to 16 lanes."""
    if dtype == types.uint16 and "+avx512bf16" in context.codegen().magic_tuple()[2]:
        # one instruction for 32 products: 16 rows by [1536, 576] from memory take 106 µs, with two multiply-adds 146
        signature = ir.FunctionType(FLOATS, [FLOATS, WORDS, WORDS])
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        function = cgutils.get_or_insert_function(builder.module, signature, name)
        return (
            lambda pointer: load(builder, pointer, WORDS, 2),
            lambda a, b, total: builder.call(function, [total, a, b]),
        )
    return (
        lambda pointer: load_step(builder, dtype, pointer),
        lambda a, b, total: multiply_add(builder, a[1], b[1], multiply_add(builder, a[0], b[0], total)),
    )


def _prefetch(builder: Builder, pointer: Value) -> None:
    byte = ir.IntType(8).as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    builder.call(function, [builder.bitcast(pointer, byte), INT32(0), INT32(3), INT32(1)])


def _dot_tile(columns: int) -> Any:
    @intrinsic
    def dot_tile(
        typing: Any, like: Any, a: Any, a_stride: Any, a_count: Any, b: Any, b_stride: Any, b_count: Any,
        length: Any, out: Any, out_stride: Any, carry: Any,
    ) -> Any:  # fmt: skip
        """out[j, i] = sum over k of a[i, k] * b[j, k], added to out where `carry`, for 4 rows of a, `columns` of b.

        Addresses, and strides in elements. Where a_count < 4 or b_count < columns the last row stands in for the rest.
        out: float32, room for all of [columns, 4].
        """
        dtype = like.dtype

        def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
            _, a, a_stride, a_count, b, b_stride, b_count, length, out, out_stride, carry = arguments
            element = STORED[dtype]
            load_operand, multiply = _dot_products(context, builder, dtype)

            def rows(base: Value, stride: Value, count: Value, number: int) -> list[Value]:
                last = builder.sub(count, INT64(1))
                indices = [
                    builder.select(builder.icmp_signed("<", INT64(i), count), INT64(i), last) for i in range(number)
                ]
                return [pointer_at(builder, base, element, builder.mul(i, stride)) for i in indices]

            a_rows, b_rows = rows(a, a_stride, a_count, 4), rows(b, b_stride, b_count, columns)
            ahead = builder.mul(a_stride, INT64(AHEAD))
            whole = builder.and_(length, INT64(-STEP))
            totals = [[cgutils.alloca_once_value(builder, ZEROS) for _ in b_rows] for _ in a_rows]
            with cgutils.for_range_slice(builder, INT64(0), whole, INT64(STEP), inc=True) as (k, _):
                b_values = [load_operand(builder.gep(row, [k])) for row in b_rows]
                for row, row_totals in zip(a_rows, totals, strict=True):
                    pointer = builder.gep(row, [k])
                    for line in range(2 if dtype == types.float32 else 1):
                        _prefetch(builder, builder.gep(pointer, [builder.add(ahead, INT64(LANES * line))]))
                    a_value = load_operand(pointer)
                    for b_value, total in zip(b_values, row_totals, strict=True):
                        builder.store(multiply(a_value, b_value, builder.load(total)), total)
            sums = [sum_lanes(builder, [builder.load(row[j]) for row in totals]) for j in range(columns)]
            slots = [cgutils.alloca_once_value(builder, s) for s in sums]
            with cgutils.for_range_slice(builder, whole, length, INT64(1), inc=True) as (k, _):
                for b_row, slot in zip(b_rows, slots, strict=True):
                    b_value = widened(builder, dtype, builder.load(builder.gep(b_row, [k])))
                    total = builder.load(slot)
                    for i, a_row in enumerate(a_rows):
                        a_value = widened(builder, dtype, builder.load(builder.gep(a_row, [k])))
                        new = multiply_add(builder, a_value, b_value, builder.extract_element(total, INT32(i)))
                        total = builder.insert_element(total, new, INT32(i))
                    builder.store(total, slot)
            for j, slot in enumerate(slots):
                pointer = pointer_at(builder, out, FLOAT, builder.mul(out_stride, INT64(j)))
                four = ir.VectorType(FLOAT, 4)
                before = builder.select(carry, load(builder, pointer, four, 4), ir.Constant(four, [0.0] * 4))
                store(builder, builder.fadd(before, builder.load(slot)), pointer, 4)
            return context.get_dummy_value()

        return types.void(like, *[types.intp] * 9, types.boolean), generate

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
            a_rows = [pointer_at(builder, a, FLOAT, builder.mul(i, a_stride)) for i in indices]
            out_rows = [pointer_at(builder, out, FLOAT, builder.mul(i, out_stride)) for i in indices]
            offsets = [INT64(LANES * v) for v in range(vectors)]

            def lanes_of(kind: Value, row: Value) -> list[Value]:
                return [load_lanes(builder, kind, builder.gep(row, [offset])) for offset in offsets]

            starts = [lanes_of(types.float32, row) for row in out_rows]
            totals = [[cgutils.alloca_once_value(builder, value) for value in row] for row in starts]
            b_start = pointer_at(builder, b, STORED[dtype])
            with cgutils.for_range_slice(builder, INT64(0), length, INT64(1), inc=True) as (k, _):
                b_row = builder.gep(b_start, [builder.mul(k, b_stride)])
                b_values = lanes_of(dtype, b_row)
                for a_row, row_totals in zip(a_rows, totals, strict=True):
                    one = builder.insert_element(ZEROS, builder.load(builder.gep(a_row, [k])), INT32(0))
                    a_value = shuffle(builder, one, one, [0] * LANES)
                    for b_value, total in zip(b_values, row_totals, strict=True):
                        builder.store(multiply_add(builder, a_value, b_value, builder.load(total)), total)
            for out_row, row_totals in zip(out_rows, totals, strict=True):
                for offset, total in zip(offsets, row_totals, strict=True):
                    store(builder, builder.load(total), builder.gep(out_row, [offset]), 4)
            return context.get_dummy_value()

        return types.void(like, *[types.intp] * 8), generate

    return outer_tile


outer_tile_1, outer_tile_4 = _outer_tile(1), _outer_tile(4)
