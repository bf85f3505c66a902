"""Products of many bfloat16 rows by the instruction that adds two products to each of 16 sums (AVX-512 BF16).

The rows of x are packed so that a vector holds one pair of inputs of 16 tokens; a pair of weights is read as it lies
and broadcast. So no sum is ever added up across lanes, and the weights are not rearranged: 64 rows by [640, 576] take
114 µs, torch 120, `dot_tile` 160; 512 rows by [576, 768] 950 and 1044, which is 477 of some 512 GFLOP/s.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from tokenweave.layers.kernels.simd import (
    FLOAT,
    FLOATS,
    INT16,
    INT32,
    INT64,
    LANES,
    WORDS,
    ZEROS,
    Builder,
    Value,
    load,
    load_lanes,
    pointer_at,
    shuffle,
    splat,
    store,
)

ROWS = 12  # weight rows of a tile: with 2 vectors of tokens 24 sums, of 32 registers
PANEL = 2 * LANES  # tokens that are packed side by side


def available() -> bool:
    """Whether this processor has the instruction, as far as Numba may use it."""
    return _has(cpu_target.target_context)


def _has(context: Any) -> bool:
    return "+avx512bf16" in context.codegen().magic_tuple()[2]


def _available(context: Any, dtype: Any) -> bool:
    return dtype == types.uint16 and _has(context)


@intrinsic
def has_pairs(typing: Any, like: Any) -> Any:
    """Whether the functions of this file do anything for `like`'s type on this processor; known when compiling."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        return context.get_constant(types.boolean, _available(context, like.dtype))

    return types.boolean(like), generate


def _transposed(builder: Builder, rows: list[Value]) -> list[Value]:
    """16 vectors of 16 lanes, lane i of vector j to lane j of vector i: four rounds of exchanging blocks."""
    for size in (8, 4, 2, 1):
        low = [lane if not lane & size else LANES + lane - size for lane in range(LANES)]
        high = [lane + size if not lane & size else LANES + lane for lane in range(LANES)]
        swapped = list(rows)
        for i in range(LANES):
            if not i & size:
                swapped[i] = shuffle(builder, rows[i], rows[i + size], low)
                swapped[i + size] = shuffle(builder, rows[i], rows[i + size], high)
        rows = swapped
    return rows


@intrinsic
def pack_tile(typing: Any, like: Any, x: Any, stride: Any, count: Any, packed: Any) -> Any:
    """packed[i, t] = pair i of row t of x, for 16 pairs and 16 rows. Where count < 16 the last row stands in.

    Addresses; stride: elements from row to row of x. packed: pairs in rows of PANEL.
    """

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        _, x, stride, count, packed = arguments
        if _available(context, like.dtype):
            last = builder.sub(count, INT64(1))
            rows = []
            for i in range(LANES):
                row = builder.select(builder.icmp_signed("<", INT64(i), count), INT64(i), last)
                rows.append(load(builder, pointer_at(builder, x, INT16, builder.mul(row, stride)), WORDS, 2))
            for i, pairs in enumerate(_transposed(builder, rows)):
                store(builder, pairs, pointer_at(builder, packed, INT32, INT64(i * PANEL)), 4)
        return context.get_dummy_value()

    return types.void(like, types.intp, types.intp, types.intp, types.intp), generate


@intrinsic
def round_tile(typing: Any, like: Any, totals: Any, bias: Any, has_bias: Any, out: Any, stride: Any, count: Any) -> Any:
    """out[t, i] = totals[i, t] + bias[i], rounded, for 16 outputs and the first `count` of 16 tokens.

    Addresses; totals: float32 in rows of PANEL; stride: elements from row to row of out.
    """

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        _, totals, bias, has_bias, out, stride, count = arguments
        if _available(context, like.dtype):
            rows = [load(builder, pointer_at(builder, totals, FLOAT, INT64(i * PANEL)), FLOATS, 4)
                    for i in range(LANES)]  # fmt: skip
            slot = cgutils.alloca_once_value(builder, ZEROS)
            with builder.if_then(has_bias):
                builder.store(load_lanes(builder, like.dtype, pointer_at(builder, bias, INT16)), slot)
            added = builder.load(slot)
            for token, wide in enumerate(_transposed(builder, rows)):
                with builder.if_then(builder.icmp_signed("<", INT64(token), count)):
                    place = pointer_at(builder, out, INT16, builder.mul(INT64(token), stride))
                    store(builder, _rounded(builder, builder.fadd(wide, added)), place, 2)
        return context.get_dummy_value()

    return types.void(like, *[types.intp] * 2, types.boolean, *[types.intp] * 3), generate


def _rounded(builder: Builder, wide: Value) -> Value:
    """16 float32 to bfloat16, to nearest even; NaN stays NaN."""
    bits = builder.bitcast(wide, WORDS)
    is_odd = builder.and_(builder.lshr(bits, splat(16)), splat(1))
    rounded = builder.add(bits, builder.add(is_odd, splat(0x7FFF)))
    kept = builder.select(builder.fcmp_unordered("uno", wide, wide), builder.or_(bits, splat(0x400000)), rounded)
    return builder.trunc(builder.lshr(kept, splat(16)), ir.VectorType(INT16, LANES))


def _pair_tile(number: int, vectors: int) -> Any:
    @intrinsic
    def pair_tile(
        typing: Any, like: Any, weights: Any, stride: Any, count: Any, packed: Any, pairs: Any, totals: Any, carry: Any
    ) -> Any:
        """totals[n, t] = sum over the pairs of weights[n] . packed[:, t], added to totals where `carry`, for `number`
        rows of weights and 16 * `vectors` tokens. Where count < number the last row stands in, in totals too.

        Addresses; stride: elements from row to row of weights. packed, totals: rows of PANEL.
        """

        def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
            _, weights, stride, count, packed, pairs, totals, carry = arguments
            if not _available(context, like.dtype):
                return context.get_dummy_value()
            multiply = _multiply(builder)
            last = builder.sub(count, INT64(1))
            indices = [builder.select(builder.icmp_signed("<", INT64(i), count), INT64(i), last) for i in range(number)]
            rows = [
                builder.bitcast(pointer_at(builder, weights, INT16, builder.mul(i, stride)), INT32.as_pointer())
                for i in indices
            ]
            places = [
                [pointer_at(builder, totals, FLOAT, builder.add(builder.mul(i, INT64(PANEL)), INT64(v * LANES)))
                 for v in range(vectors)]
                for i in indices
            ]  # fmt: skip
            sums = [
                [cgutils.alloca_once_value(builder, builder.select(carry, load(builder, place, FLOATS, 4), ZEROS))
                 for place in row]
                for row in places
            ]  # fmt: skip
            start = pointer_at(builder, packed, INT32)
            with cgutils.for_range_slice(builder, INT64(0), pairs, INT64(1), inc=True) as (k, _):
                first = builder.gep(start, [builder.mul(k, INT64(PANEL))])
                tokens = [load(builder, builder.gep(first, [INT64(v * LANES)]), WORDS, 4) for v in range(vectors)]
                for row, row_sums in zip(rows, sums, strict=True):
                    pair = _broadcast(builder, builder.load(builder.gep(row, [k]), align=2))
                    for values, total in zip(tokens, row_sums, strict=True):
                        builder.store(builder.call(multiply, [builder.load(total), pair, values]), total)
            for row, row_sums in zip(places, sums, strict=True):
                for place, total in zip(row, row_sums, strict=True):
                    store(builder, builder.load(total), place, 4)
            return context.get_dummy_value()

        return types.void(like, *[types.intp] * 6, types.boolean), generate

    return pair_tile


pair_tile_1, pair_tile_2, key_tile = _pair_tile(ROWS, 1), _pair_tile(ROWS, 2), _pair_tile(8, 2)


def _value_tile(vectors: int) -> Any:
    @intrinsic
    def value_tile(
        typing: Any, like: Any, weights: Any, values: Any, pitch: Any, pairs: Any, sums: Any, sums_pitch: Any
    ) -> Any:
        """sums[q] = sum over the pairs of weights[pair, q] . values[pair], for 4 queries and 16 * `vectors` columns.

        Addresses, and pitches in words. weights: rows of PANEL pairs; values: rows of `pitch` pairs; sums: float32.
        """

        def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
            _, weights, values, pitch, pairs, sums, sums_pitch = arguments
            if not _available(context, like.dtype):
                return context.get_dummy_value()
            totals = [[cgutils.alloca_once_value(builder, ZEROS) for _ in range(vectors)] for _ in range(4)]
            multiply = _multiply(builder)
            weight_start, value_start = (pointer_at(builder, address, INT32) for address in (weights, values))
            with cgutils.for_range_slice(builder, INT64(0), pairs, INT64(1), inc=True) as (k, _):
                row = builder.gep(value_start, [builder.mul(k, pitch)])
                columns = [load(builder, builder.gep(row, [INT64(v * LANES)]), WORDS, 4) for v in range(vectors)]
                first = builder.gep(weight_start, [builder.mul(k, INT64(PANEL))])
                for query, query_totals in enumerate(totals):
                    pair = _broadcast(builder, builder.load(builder.gep(first, [INT64(query)])))
                    for column, total in zip(columns, query_totals, strict=True):
                        builder.store(builder.call(multiply, [builder.load(total), pair, column]), total)
            for query, query_totals in enumerate(totals):
                place = pointer_at(builder, sums, FLOAT, builder.mul(INT64(query), sums_pitch))
                for v, total in enumerate(query_totals):
                    store(builder, builder.load(total), builder.gep(place, [INT64(v * LANES)]), 4)
            return context.get_dummy_value()

        return types.void(like, *[types.intp] * 6), generate

    return value_tile


value_tile_1, value_tile_4 = _value_tile(1), _value_tile(4)


def _multiply(builder: Builder) -> Value:
    """(sums, a, b) -> sums + a[even] * b[even] + a[odd] * b[odd], 16 lanes."""
    kind = ir.FunctionType(FLOATS, [FLOATS, WORDS, WORDS])
    return cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")


def _broadcast(builder: Builder, pair: Value) -> Value:
    one = builder.insert_element(splat(0), pair, INT32(0))
    return shuffle(builder, one, one, [0] * LANES)
