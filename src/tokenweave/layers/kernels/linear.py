"""Rows times a weight matrix, for any number of rows, on one core."""
# mypy: disallow-untyped-defs=False

import numpy as np

from tokenweave.layers.kernels.jit import kernel, part
from tokenweave.layers.kernels.pairs import (
    PANEL,
    ROWS,
    has_pairs,
    pack_tile,
    pair_tile_1,
    pair_tile_2,
    round_tile,
)
from tokenweave.layers.kernels.simd import LANES, narrow, row_at, rows_at, widen
from tokenweave.layers.kernels.tiles import dot_tile_1, dot_tile_4

BLOCK = 64  # outputs kept in float32 before they are rounded
STRIP = 8 * ROWS  # outputs at a time where `pairs` multiply: their weights stay in the second-level cache
FEW = 16  # rows up to which a bfloat16 row has the same bits in every step, alone or not
DEPTH = 2048  # inputs at a time, so that a tile's rows stay in the first-level cache: 16 rows by [4096, 14336] bfloat16
# take 8.7 ms (torch 8.8), in one go 16
KEPT = 131072  # bytes of x at a time, so that they stay in the second-level cache while a matrix streams by


@part
def round_to(totals, bias, first, out):
    """out[i] = totals[i] + bias[first + i], rounded; no bias where it is empty."""
    if bias.size:
        for i in range(out.size):
            out[i] = narrow(out, totals[i] + widen(bias[first + i]))
    else:
        for i in range(out.size):
            out[i] = narrow(out, totals[i])


@part
def project(x, weight, bias, out):
    """out[t] = x[t] @ weight.T + bias, summed in float32 and rounded once; out may not be the memory of x.

    x: [tokens, inputs], out: [tokens, outputs], weight: [outputs, inputs], bias: [outputs] or empty; all of one type.
    """
    tokens, inputs = x.shape
    if has_pairs(weight) and tokens > FEW and inputs % 2 == 0:
        project_pairs(x, weight, bias, out)
        return
    outputs, size = weight.shape[0], weight.itemsize
    pitch = inputs * size
    panel = max(min(KEPT // (min(inputs, DEPTH) * size) // 4 * 4, tokens), 4)
    totals = np.empty((panel + 3, BLOCK), np.float32)  # a tile stores 4 rows and 4 columns, whole or not
    target = totals.ctypes.data
    for first in range(0, tokens, panel):
        count = min(panel, tokens - first)
        for block in range(0, outputs, BLOCK):
            width = min(BLOCK, outputs - block)
            for start in range(0, inputs, DEPTH):
                depth = min(DEPTH, inputs - start)
                source, rows = x.ctypes.data + first * pitch, weight.ctypes.data + block * pitch
                add_block(weight, rows + start * size, width, source + start * size, count, inputs, depth, target,
                          start > 0)  # fmt: skip
            for token in range(count):
                place = out.ctypes.data + ((first + token) * outputs + block) * size
                round_to(row_at(totals, target + token * BLOCK * 4, width), bias, block, row_at(out, place, width))


@part
def add_block(weight, rows, width, source, count, pitch, depth, target, carry):
    """The sums over `depth` inputs for `width` outputs, set in or, where `carry`, added to totals.

    rows, source, target: addresses of the weights, of x and of totals, [count, BLOCK]; pitch: elements of a row.
    """
    step = pitch * weight.itemsize
    for row in range(0, width, 4):
        start, number = rows + row * step, min(4, width - row)
        if count == 1:
            dot_tile_1(weight, start, pitch, number, source, pitch, 1, depth, target + row * 4, BLOCK, carry)
        else:
            for token in range(0, count, 4):
                dot_tile_4(weight, start, pitch, number, source + token * step, pitch, min(4, count - token), depth,
                           target + (token * BLOCK + row) * 4, BLOCK, carry)  # fmt: skip


@part
def project_pairs(x, weight, bias, out):
    """`project` of many bfloat16 rows with an even number of inputs, by `pairs`."""
    tokens, inputs = x.shape
    outputs = weight.shape[0]
    pairs = inputs // 2
    packed = np.empty((tokens + PANEL - 1) // PANEL * pairs * PANEL, np.int32)
    totals = np.empty((STRIP, PANEL), np.float32)
    pack(x, packed)
    for strip in range(0, outputs, STRIP):
        width = min(STRIP, outputs - strip)
        for first in range(0, tokens, PANEL):
            count = min(PANEL, tokens - first)
            source = packed.ctypes.data + first * pairs * 4
            for start in range(0, pairs, DEPTH // 2):
                depth = min(DEPTH // 2, pairs - start)
                for row in range(0, width, ROWS):
                    rows = weight.ctypes.data + ((strip + row) * inputs + 2 * start) * 2
                    target = totals.ctypes.data + row * PANEL * 4
                    if count > LANES:
                        pair_tile_2(weight, rows, inputs, min(ROWS, width - row), source + start * PANEL * 4, depth,
                                    target, start > 0)  # fmt: skip
                    else:
                        pair_tile_1(weight, rows, inputs, min(ROWS, width - row), source + start * PANEL * 4, depth,
                                    target, start > 0)  # fmt: skip
            give_out(totals, width, bias, strip, out, first, count)


@part
def pack(x, packed):
    """The rows of x, PANEL at a time, as pairs of inputs with the tokens side by side: [panels, pairs, PANEL]."""
    tokens, inputs = x.shape
    pairs = inputs // 2
    words = row_at(packed, x.ctypes.data, tokens * pairs)
    for first in range(0, tokens, LANES):
        count = min(LANES, tokens - first)
        place = first // PANEL * PANEL * pairs + first % PANEL
        whole = pairs // LANES * LANES
        for pair in range(0, whole, LANES):
            pack_tile(x, x.ctypes.data + (first * inputs + 2 * pair) * 2, inputs, count,
                      packed.ctypes.data + (place + pair * PANEL) * 4)  # fmt: skip
        for pair in range(whole, pairs):
            for token in range(LANES):
                packed[place + pair * PANEL + token] = words[(first + min(token, count - 1)) * pairs + pair]


@part
def give_out(totals, width, bias, strip, out, first, count):
    """out[first + t, strip + i] = totals[i, t] + bias[strip + i], rounded, for `width` outputs and `count` tokens."""
    outputs = out.shape[1]
    whole = width // LANES * LANES
    for row in range(0, whole, LANES):
        for token in range(0, count, LANES):
            round_tile(out, totals.ctypes.data + (row * PANEL + token) * 4, bias.ctypes.data + (strip + row) * 2,
                       bias.size > 0, out.ctypes.data + ((first + token) * outputs + strip + row) * 2, outputs,
                       min(LANES, count - token))  # fmt: skip
    for token in range(count):
        for row in range(whole, width):
            added = widen(bias[strip + row]) if bias.size else np.float32(0.0)
            out[first + token, strip + row] = narrow(out, totals[row, token] + added)


@kernel
def project_rows(x, out, tokens, weight, bias):
    """`project` between contiguous rows at the addresses x and out."""
    outputs, inputs = weight.shape
    project(rows_at(weight, x, tokens, inputs), weight, bias, rows_at(weight, out, tokens, outputs))
