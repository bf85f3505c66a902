"""Attention of one rank over the paged cache: rotation and cache write, attention itself, and the whole stage.

Shapes: T tokens, Q query heads, K key/value heads, D head_dim, W = (Q + 2K) * D. Tuples that belong together:
    weights: qkv [W, hidden], its bias or empty, output [hidden, Q * D], its bias or empty, query norm [D] or empty,
        key norm [D] or empty, epsilon of the norms
    rotation: cos and sin, float32 [positions, D / 2]
    cache: keys and values of this layer, [blocks, block_size, K, D]
    step: positions [T], query_offsets [R + 1], context_lengths [R], slot_mapping [T], block_tables [R, blocks]
window: how many tokens up to itself a token attends to; WHOLE_CONTEXT for all
"""
# mypy: disallow-untyped-defs=False

import numpy as np

from tokenweave.layers.kernels.exponential import exponential
from tokenweave.layers.kernels.jit import kernel, part, summing_part
from tokenweave.layers.kernels.linear import project
from tokenweave.layers.kernels.prefill import attend_many, attends_many, copy, divide
from tokenweave.layers.kernels.simd import (
    LANES,
    highest,
    narrow,
    row_at,
    rows_at,
    total,
    widen,
)
from tokenweave.layers.kernels.tiles import dot_tile_1, dot_tile_4, outer_tile_1, outer_tile_4

WHOLE_CONTEXT = 1 << 62  # a window over everything
ROWS = 16  # queries that share one pass over the keys: a block of keys read once serves four tiles


@summing_part
def sum_of_squares(x):
    squares = np.float32(0.0)
    for i in range(x.size):
        value = widen(x[i])
        squares += value * value
    return squares


@part
def normalise(x, weight, epsilon):
    """RMSNorm of one head in place, rounded before and after the weight."""
    scale = np.float32(1.0) / np.sqrt(sum_of_squares(x) / np.float32(x.size) + np.float32(epsilon))
    for i in range(x.size):
        x[i] = narrow(x, widen(weight[i]) * widen(narrow(x, widen(x[i]) * scale)))


@part
def rotate(left, right, cos, sin):
    """The two halves of one head turned to its position in place, rounded once."""
    for i in range(cos.size):
        x, y = widen(left[i]), widen(right[i])
        left[i] = narrow(left, x * cos[i] - y * sin[i])
        right[i] = narrow(right, y * cos[i] + x * sin[i])


@part
def prepare(qkv, heads, norms, rotation, cache, positions, slots):
    """Normalise and rotate queries and keys in place, and write keys and values to their slots."""
    query_norm, key_norm, epsilon = norms
    cos, sin = rotation
    keys, values = cache
    kv_heads, size = keys.shape[2:]
    half, width = size // 2, keys.itemsize
    for token in range(qkv.shape[0]):
        row = qkv.ctypes.data + token * qkv.shape[1] * width
        angle = positions[token] * half * 4
        cosines, sines = row_at(cos, cos.ctypes.data + angle, half), row_at(sin, sin.ctypes.data + angle, half)
        for head in range(heads + kv_heads):
            start = row + head * size * width
            if query_norm.size:
                normalise(row_at(qkv, start, size), query_norm if head < heads else key_norm, epsilon)
            rotate(row_at(qkv, start, half), row_at(qkv, start + half * width, half), cosines, sines)
        place, length = slots[token] * kv_heads * size * width, kv_heads * size
        copy(row_at(keys, keys.ctypes.data + place, length), row_at(qkv, row + heads * size * width, length))
        start = row + (heads + kv_heads) * size * width
        copy(row_at(values, values.ctypes.data + place, length), row_at(qkv, start, length))


@part
def whole_vectors(length):
    return (length + LANES - 1) // LANES * LANES


@part
def weigh(scores, begin, length, scale):
    """Scores [begin, length) to exp(scale * (score - highest)), the rest to zero; returns their sum.

    scores: a whole number of vectors. Up to 15 left over, each on its own, would take as long as 240.
    """
    padded = whole_vectors(length)
    for i in range(begin):
        scores[i] = -np.inf
    for i in range(length, padded):
        scores[i] = -np.inf
    top = highest(scores.ctypes.data, padded)
    for i in range(padded):
        scores[i] = exponential(scale * (scores[i] - top))
    for i in range(length, scores.size):
        scores[i] = 0.0
    return total(scores.ctypes.data, scores.size)


@part
def score_keys(keys, source, stride, length, picked, count, target, pitch):
    """target[i, key] = picked[i] . row `key` of the `length` keys at `source`, for `count` queries.

    source, target: addresses; stride, pitch: elements from one row to the next.
    """
    size, width = picked.shape[1], keys.itemsize
    queries = picked.ctypes.data
    for key in range(0, length, 4):
        number = min(4, length - key)
        if count == 1:
            dot_tile_1(keys, source + key * stride * width, stride, number, queries, size, 1, size,
                       target + key * 4, pitch, False)  # fmt: skip
        else:
            for i in range(0, count, 4):
                dot_tile_4(keys, source + key * stride * width, stride, number, queries + i * size * width, size,
                           min(4, count - i), size, target + (i * pitch + key) * 4, pitch,
                           False)  # fmt: skip


@part
def add_values(values, source, stride, length, weights, pitch, sums, count):
    """sums[i] += weights[i, :length] @ the `length` values at `source`, for `count` queries.

    source, weights: addresses; stride, pitch: elements from one row to the next.
    """
    size, target = sums.shape[1], sums.ctypes.data
    column = 0
    while column + 64 <= size:
        for i in range(0, count, 4):
            outer_tile_4(values, weights + i * pitch * 4, pitch, min(4, count - i), source + column * values.itemsize,
                         stride, length, target + (i * size + column) * 4, size)  # fmt: skip
        column += 64
    while column + 16 <= size:
        for i in range(0, count, 4):
            outer_tile_1(values, weights + i * pitch * 4, pitch, min(4, count - i), source + column * values.itemsize,
                         stride, length, target + (i * size + column) * 4, size)  # fmt: skip
        column += 16
    if column < size:
        value_rows, weight_rows = rows_at(values, source, length, stride), rows_at(sums, weights, count, pitch)
        for i in range(count):
            for key in range(length):
                for j in range(column, size):
                    sums[i, j] += weight_rows[i, key] * widen(value_rows[key, j])


@part
def attend(queries, begin, new, heads, context, tables, request, cache, window, out):
    """Causal attention of one request: its `new` tokens, rows queries[begin:], the last of its `context` tokens.

    A token attends to the last `window` tokens up to itself. Written to the same rows of out, [T, Q * D]. The request's
    blocks: tables[request].
    """
    keys, values = cache
    _, block_size, kv_heads, size = keys.shape
    group, stride, width = heads // kv_heads, kv_heads * size, keys.itemsize
    rows, past = new * group, context - new
    pitch = whole_vectors(context + 3)  # a tile stores 4 scores, whole or not
    scale = np.float32(1.0 / np.sqrt(size))
    picked, sums = np.empty((ROWS, size), keys.dtype), np.empty((ROWS, size), np.float32)
    scores, totals = np.empty((ROWS, pitch), np.float32), np.empty(ROWS, np.float32)
    score, summed = scores.ctypes.data, sums.ctypes.data
    for kv_head in range(kv_heads):
        for first in range(0, rows, ROWS):
            count = min(ROWS, rows - first)
            for i in range(count):
                token, head = begin + (first + i) // group, kv_head * group + (first + i) % group
                query = queries.ctypes.data + (token * queries.shape[1] + head * size) * width
                copy(row_at(picked, picked.ctypes.data + i * size * width, size), row_at(queries, query, size))
            visible = past + (first + count - 1) // group + 1
            # scores are held from the block on in which the first row's window begins
            origin = max(past + first // group + 1 - window, 0) // block_size * block_size
            for start in range(origin, visible, block_size):
                offset = (tables[request, start // block_size] * block_size * stride + kv_head * size) * width
                score_keys(keys, keys.ctypes.data + offset, stride, min(block_size, visible - start), picked, count,
                           score + (start - origin) * 4, pitch)  # fmt: skip
            for i in range(count):
                length = past + (first + i) // group + 1
                row = row_at(scores, score + i * pitch * 4, whole_vectors(visible - origin))
                totals[i] = weigh(row, max(length - window, origin) - origin, length - origin, scale)
            sums[:count] = 0.0
            for start in range(origin, visible, block_size):
                offset = (tables[request, start // block_size] * block_size * stride + kv_head * size) * width
                add_values(values, values.ctypes.data + offset, stride, min(block_size, visible - start),
                           score + (start - origin) * 4, pitch, sums, count)  # fmt: skip
            for i in range(count):
                token, head = begin + (first + i) // group, kv_head * group + (first + i) % group
                target = out.ctypes.data + (token * out.shape[1] + head * size) * width
                divide(row_at(sums, summed + i * size * 4, size), totals[i], row_at(out, target, size))


@part
def attend_all(qkv, attended, norms, rotation, cache, step, window):
    positions, offsets, contexts, slots, tables = step
    heads = attended.shape[1] // cache[0].shape[3]
    prepare(qkv, heads, norms, rotation, cache, positions, slots)
    for request in range(contexts.size):
        begin, end = offsets[request], offsets[request + 1]
        new = end - begin
        if attends_many(cache[0], new, new * heads // cache[0].shape[2]):
            attend_many(qkv, begin, new, heads, contexts[request], tables, request, cache, window, attended)
        else:
            attend(qkv, begin, new, heads, contexts[request], tables, request, cache, window, attended)


@kernel
def attend_rows(qkv, attended, tokens, heads, norms, rotation, cache, step, window):
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
        window,
    )


@kernel
def attention_rows(x, out, tokens, weights, rotation, cache, step, window):
    """The whole stage between contiguous rows at the addresses x and out, which may be the same."""
    qkv_weight, qkv_bias, output, output_bias, query_norm, key_norm, epsilon = weights
    qkv = np.empty((tokens, qkv_weight.shape[0]), output.dtype)
    attended = np.empty((tokens, output.shape[1]), output.dtype)
    project(rows_at(output, x, tokens, output.shape[0]), qkv_weight, qkv_bias, qkv)
    attend_all(qkv, attended, (query_norm, key_norm, epsilon), rotation, cache, step, window)
    project(attended, output, output_bias, rows_at(output, out, tokens, output.shape[0]))
