"""Causal attention of many bfloat16 queries at once, with the queries side by side in vectors (see `pairs`).

4 query heads and 2 key heads of 64, one core: 512 tokens take 0.79 ms, in `attention.attend` 1.05, in torch 3.3; 2000
tokens 9.9, 14.4 and 29.
"""
# mypy: disallow-untyped-defs=False

import numpy as np

from tokenweave.layers.kernels.exponential import exponential
from tokenweave.layers.kernels.jit import part
from tokenweave.layers.kernels.linear import pack
from tokenweave.layers.kernels.pairs import PANEL, has_pairs, key_tile, value_tile_1, value_tile_4
from tokenweave.layers.kernels.simd import LANES, narrow, row_at, rows_at

FEWEST = 32  # rows of queries that one key head must have
KEYS = 8  # of one tile


@part
def attends_many(keys, new, rows):
    """Whether `attend_many` takes a request of `new` tokens, so many `rows` of queries a key head."""
    return has_pairs(keys) and new > 1 and rows >= FEWEST and keys.shape[3] % LANES == 0


@part
def attend_many(queries, begin, new, heads, context, tables, request, cache, window, out):
    """What `attention.attend` does; the weights are rounded to bfloat16 before they meet the values, as torch does."""
    keys, values = cache
    _, block_size, kv_heads, size = keys.shape
    group, stride = heads // kv_heads, kv_heads * size
    rows, past = new * group, context - new
    scale = np.float32(1.0 / np.sqrt(size))
    lowest = max(past + 1 - window, 0) // 2 * 2  # the first key that anyone sees, or the one before it
    paired = np.empty(((context + 1 - lowest) // 2, size), np.int32)
    picked, packed = np.empty((PANEL, size), keys.dtype), np.empty(size // 2 * PANEL, np.int32)
    scores = np.empty((context + KEYS - lowest, PANEL), np.float32)
    weights = np.empty((paired.shape[0], PANEL), np.int32)
    totals, sums = np.empty(PANEL, np.float32), np.empty((PANEL, size), np.float32)
    for kv_head in range(kv_heads):
        pair_values(values, kv_head, tables, request, lowest, context, paired)
        for first in range(0, rows, PANEL):
            count = min(PANEL, rows - first)
            for i in range(count):
                token, head = begin + (first + i) // group, kv_head * group + (first + i) % group
                query = queries.ctypes.data + (token * queries.shape[1] + head * size) * 2
                copy(row_at(picked, picked.ctypes.data + i * size * 2, size), row_at(queries, query, size))
            pack(rows_at(picked, picked.ctypes.data, count, size), packed)
            shortest, visible = past + first // group + 1, past + (first + count - 1) // group + 1
            low = max(shortest - window, 0) // 2 * 2
            start = low
            while start < visible:
                stop = min((start // block_size + 1) * block_size, visible)
                slot = tables[request, start // block_size] * block_size + start % block_size
                source = keys.ctypes.data + (slot * stride + kv_head * size) * 2
                for key in range(start, stop, KEYS):
                    key_tile(keys, source + (key - start) * stride * 2, stride, min(KEYS, stop - key),
                             packed.ctypes.data, size // 2, scores.ctypes.data + (key - low) * PANEL * 4,
                             False)  # fmt: skip
                start = stop
            hide(scores, low, visible, first, past, group, window)
            whole = (visible - low + 1) // 2
            weigh_many(keys, scores, whole, scale, weights, totals)
            source = paired.ctypes.data + (low - lowest) // 2 * size * 4
            for i in range(0, count, 4):
                column = 0
                while column + 64 <= size:
                    value_tile_4(keys, weights.ctypes.data + i * 4, source + column * 4, size, whole,
                                 sums.ctypes.data + (i * size + column) * 4, size)  # fmt: skip
                    column += 64
                while column < size:
                    value_tile_1(keys, weights.ctypes.data + i * 4, source + column * 4, size, whole,
                                 sums.ctypes.data + (i * size + column) * 4, size)  # fmt: skip
                    column += 16
            for i in range(count):
                token, head = begin + (first + i) // group, kv_head * group + (first + i) % group
                target = out.ctypes.data + (token * out.shape[1] + head * size) * 2
                divide(row_at(sums, sums.ctypes.data + i * size * 4, size), totals[i], row_at(out, target, size))


@part
def pair_values(values, kv_head, tables, request, lowest, context, paired):
    """paired[j] = the values of keys lowest + 2j and lowest + 2j + 1, element by element; zero after the last key."""
    _, block_size, kv_heads, size = values.shape
    for pair in range(paired.shape[0]):
        key = lowest + 2 * pair
        first = value_row(values, kv_head, tables, request, key)
        target = row_at(paired, paired.ctypes.data + pair * size * 4, size)
        if key + 1 < context:
            second = value_row(values, kv_head, tables, request, key + 1)
            for i in range(size):
                target[i] = np.int32(first[i]) | np.int32(second[i]) << np.int32(16)
        else:
            for i in range(size):
                target[i] = np.int32(first[i])


@part
def value_row(values, kv_head, tables, request, key):
    _, block_size, kv_heads, size = values.shape
    slot = tables[request, key // block_size] * block_size + key % block_size
    return row_at(values, values.ctypes.data + (slot * kv_heads + kv_head) * size * 2, size)


@part
def hide(scores, low, visible, first, past, group, window):
    """-infinity where a query of the panel may not look, and after the last key."""
    for i in range(PANEL):
        length = min(past + (first + i) // group + 1, visible)
        for key in range(length, visible + 1):
            scores[key - low, i] = -np.inf
        for key in range(low, max(length - window, low)):
            scores[key - low, i] = -np.inf


@part
def weigh_many(like, scores, pairs, scale, weights, totals):
    """weights[j, q] = exp(scale * (score - highest)) of keys 2j and 2j + 1 in bfloat16; totals[q]: their sum before."""
    top = np.empty(PANEL, np.float32)
    top[:] = -np.inf
    totals[:] = 0.0
    for key in range(2 * pairs):
        row = row_at(scores, scores.ctypes.data + key * PANEL * 4, PANEL)
        for i in range(PANEL):
            top[i] = row[i] if row[i] > top[i] else top[i]
    for pair in range(pairs):
        left = row_at(scores, scores.ctypes.data + pair * 2 * PANEL * 4, PANEL)
        right = row_at(scores, scores.ctypes.data + (pair * 2 + 1) * PANEL * 4, PANEL)
        target = row_at(weights, weights.ctypes.data + pair * PANEL * 4, PANEL)
        for i in range(PANEL):
            a, b = exponential(scale * (left[i] - top[i])), exponential(scale * (right[i] - top[i]))
            a = a if left[i] != -np.inf else np.float32(0.0)
            b = b if right[i] != -np.inf else np.float32(0.0)
            totals[i] += a + b
            target[i] = np.int32(narrow(like, a)) | np.int32(narrow(like, b)) << np.int32(16)


@part
def copy(target, source):
    for i in range(target.size):
        target[i] = source[i]


@part
def divide(sums, weight, out):
    inverse = np.float32(1.0) / weight
    for i in range(out.size):
        out[i] = narrow(out, sums[i] * inverse)
