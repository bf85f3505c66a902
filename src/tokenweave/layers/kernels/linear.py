"""Rows times a weight matrix, for any number of rows, on one core."""
# mypy: disallow-untyped-defs=False

import numpy as np

from tokenweave.layers.kernels.jit import kernel, part
from tokenweave.layers.kernels.simd import narrow, row_at, rows_at, widen
from tokenweave.layers.kernels.tiles import dot_tile_1, dot_tile_4

BLOCK = 64  # outputs kept in float32 before they are rounded
DEPTH = 2048  # inputs at a time, so that a tile's rows stay in the first-level cache: 16 rows by [4096, 14336] bfloat16
# take 8.7 ms (torch 8.8), in one go 16
PANEL = 131072  # bytes of x at a time, so that they stay in the second-level cache while a matrix streams by


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
    outputs, size = weight.shape[0], weight.itemsize
    pitch = inputs * size
    panel = max(min(PANEL // (min(inputs, DEPTH) * size) // 4 * 4, tokens), 4)
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


@kernel
def project_rows(x, out, tokens, weight, bias):
    """`project` between contiguous rows at the addresses x and out."""
    outputs, inputs = weight.shape
    project(rows_at(weight, x, tokens, inputs), weight, bias, rows_at(weight, out, tokens, outputs))
