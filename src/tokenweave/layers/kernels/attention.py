"""Attention of one rank over the paged cache: rotation and cache write, attention itself, and the whole stage.

Shapes: T tokens, Q query heads, K key/value heads, D head_dim, W = (Q + 2K) * D. Tuples that belong together:
    weights: qkv [W, hidden], its bias or empty, output [hidden, Q * D], its bias or empty, query norm [D] or empty,
        key norm [D] or empty, epsilon of the norms
    rotation: cos and sin, float32 [positions, D / 2]
    cache: keys and values of this layer, [blocks, block_size, K, D]
    step: positions [T], query_offsets [R + 1], context_lengths [R], slot_mapping [T], block_tables [R, blocks]
"""
# mypy: disallow-untyped-defs=False

import numpy as np

from tokenweave.layers.kernels.exponential import exponential
from tokenweave.layers.kernels.jit import kernel, part, summing_part
from tokenweave.layers.kernels.linear import project
from tokenweave.layers.kernels.simd import (
    dot_tile_1,
    dot_tile_4,
    highest,
    narrow,
    outer_tile_1,
    outer_tile_4,
    rows_at,
    widen,
)

ROWS = 16  # queries that share one pass over the keys: a block of keys read once serves four tiles


@summing_part
def sum_of_squares(x):
    total = np.float32(0.0)
    for i in range(x.size):
        value = widen(x[i])
        total += value * value
    return total


@summing_part
def total_of(x):
    total = np.float32(0.0)
    for i in range(x.size):
        total += x[i]
    return total


@part
def normalise(x, weight, epsilon):
    """RMSNorm of one head in place, rounded before and after the weight."""
    scale = np.float32(1.0) / np.sqrt(sum_of_squares(x) / np.float32(x.size) + epsilon)
    for i in range(x.size):
        x[i] = narrow(x, widen(weight[i]) * widen(narrow(x, widen(x[i]) * scale)))


@part
def rotate(x, out, cos, sin):
    """One head turned by its position's cos and sin, rounded once; out may be x."""
    half = cos.size
    for i in range(half):
        left, right = widen(x[i]), widen(x[half + i])
        out[i] = narrow(out, left * cos[i] - right * sin[i])
        out[half + i] = narrow(out, right * cos[i] + left * sin[i])


@part
def prepare(qkv, heads, norms, rotation, cache, positions, slots):
    """Normalise and rotate queries (in place) and keys, and write keys and values to their slots."""
    query_norm, key_norm, epsilon = norms
    cos, sin = rotation
    keys, values = cache
    _, block_size, kv_heads, size = keys.shape
    for token in range(qkv.shape[0]):
        row, position = qkv[token], positions[token]
        block, place = slots[token] // block_size, slots[token] % block_size
        for head in range(heads + kv_heads):
            x = row[head * size : (head + 1) * size]
            norm = query_norm if head < heads else key_norm
            if norm.size:
                normalise(x, norm, epsilon)
            rotate(x, x if head < heads else keys[block, place, head - heads], cos[position], sin[position])
        for head in range(kv_heads):
            start = (heads + kv_heads + head) * size
            values[block, place, head] = row[start : start + size]


@part
def weigh(scores, length, total, scale):
    """The first `length` scores to exp(scale * (score - highest)) and those up to `total` to zero; returns the sum."""
    top = highest(scores.ctypes.data, length)
    for i in range(length):
        scores[i] = exponential(scale * (scores[i] - top))
    scores[length:total] = np.float32(0.0)
    return total_of(scores[:length])


@part
def add_values(weights, count, address, stride, length, values, sums):
    """sums[i] += weights[i, :length] @ rows of values at `address`, `stride` elements apart, for `count` rows."""
    size = values.shape[3]
    source, target = weights.ctypes.data, sums.ctypes.data
    pitch, wide = weights.strides[0] // 4, sums.shape[1]
    column = 0
    while column + 64 <= size:
        outer_tile_4(values, source, pitch, count, address + column * values.itemsize, stride, length,
                     target + column * 4, wide)  # fmt: skip
        column += 64
    while column + 16 <= size:
        outer_tile_1(values, source, pitch, count, address + column * values.itemsize, stride, length,
                     target + column * 4, wide)  # fmt: skip
        column += 16
    if column < size:
        rows = rows_at(values, address, length, stride)
        for i in range(count):
            for key in range(length):
                for j in range(column, size):
                    sums[i, j] += weights[i, key] * widen(rows[key, j])


@part
def attend(queries, heads, context, table, cache, out):
    """Causal attention of one request.

    queries: its new tokens' rows, [n, W], the last n of its `context` tokens; out: [n, Q * D]; table: its blocks.
    """
    keys, values = cache
    _, block_size, kv_heads, size = keys.shape
    group, stride = heads // kv_heads, kv_heads * size
    rows, past = queries.shape[0] * group, context - queries.shape[0]
    scale = np.float32(1.0 / np.sqrt(size))
    picked = np.empty((ROWS, size), keys.dtype)
    scores = np.empty((ROWS, context + 4), np.float32)
    sums = np.empty((ROWS, size), np.float32)
    totals = np.empty(ROWS, np.float32)
    for kv_head in range(kv_heads):
        for first in range(0, rows, ROWS):
            count = min(ROWS, rows - first)
            for i in range(count):
                start = (kv_head * group + (first + i) % group) * size
                picked[i] = queries[(first + i) // group, start : start + size]
            visible = past + (first + count - 1) // group + 1
            for block in range((visible + block_size - 1) // block_size):
                start = block * block_size
                address = keys.ctypes.data + (table[block] * block_size * stride + kv_head * size) * keys.itemsize
                for key in range(0, min(block_size, visible - start), 4):
                    source, number = address + key * stride * keys.itemsize, min(4, visible - start - key)
                    number = min(number, block_size - key)
                    target = scores.ctypes.data + (start + key) * 4
                    if count == 1:
                        dot_tile_1(keys, source, stride, number, picked.ctypes.data, size, 1, size, target, 0)
                    else:
                        for i in range(0, count, 4):
                            dot_tile_4(keys, source, stride, number, picked.ctypes.data + i * size * keys.itemsize,
                                       size, min(4, count - i), size, target + i * scores.shape[1] * 4,
                                       scores.shape[1])  # fmt: skip
            for i in range(count):
                totals[i] = weigh(scores[i], past + (first + i) // group + 1, visible, scale)
            sums[:count] = np.float32(0.0)
            for block in range((visible + block_size - 1) // block_size):
                start = block * block_size
                address = values.ctypes.data + (table[block] * block_size * stride + kv_head * size) * values.itemsize
                length = min(block_size, visible - start)
                for i in range(0, count, 4):
                    add_values(scores[i:, start:], min(4, count - i), address, stride, length, values, sums[i:])
            for i in range(count):
                start = (kv_head * group + (first + i) % group) * size
                target_row = out[(first + i) // group, start : start + size]
                inverse = np.float32(1.0) / totals[i]
                for j in range(size):
                    target_row[j] = narrow(keys, sums[i, j] * inverse)


@part
def attend_all(qkv, attended, norms, rotation, cache, step):
    positions, offsets, contexts, slots, tables = step
    heads = attended.shape[1] // cache[0].shape[3]
    prepare(qkv, heads, norms, rotation, cache, positions, slots)
    for request in range(contexts.size):
        new = slice(offsets[request], offsets[request + 1])
        attend(qkv[new], heads, contexts[request], tables[request], cache, attended[new])


@kernel
def attend_rows(qkv, attended, tokens, heads, norms, rotation, cache, step):
    """From contiguous rows of projected heads, [T, W] at address qkv, to attended values, [T, Q * D] at `attended`.

    norms: the query and key norms and epsilon of `weights`.
    """
    keys = cache[0]
    kv_heads, size = keys.shape[2:]
    attend_all(
        rows_at(keys, qkv, tokens, (heads + 2 * kv_heads) * size),
        rows_at(keys, attended, tokens, heads * size),
        norms,
        rotation,
        cache,
        step,
    )


@kernel
def attention_rows(x, out, tokens, weights, rotation, cache, step):
    """The whole stage between contiguous rows at the addresses x and out, which may be the same."""
    qkv_weight, qkv_bias, output, output_bias, query_norm, key_norm, epsilon = weights
    qkv = np.empty((tokens, qkv_weight.shape[0]), output.dtype)
    attended = np.empty((tokens, output.shape[1]), output.dtype)
    project(rows_at(output, x, tokens, output.shape[0]), qkv_weight, qkv_bias, qkv)
    attend_all(qkv, attended, (query_norm, key_norm, epsilon), rotation, cache, step)
    project(attended, output, output_bias, rows_at(output, out, tokens, output.shape[0]))
