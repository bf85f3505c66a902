"""The gated MLP of one rank: one call for the whole stage."""
# mypy: disallow-untyped-defs=False

import numpy as np

from tokenweave.layers.kernels.exponential import silu
from tokenweave.layers.kernels.jit import kernel, part
from tokenweave.layers.kernels.linear import project
from tokenweave.layers.kernels.simd import narrow, row_at, rows_at, widen


@part
def gate(wide, gated):
    """gated = silu(left half of wide) * right half, rounded after silu and after the product, as torch does."""
    tokens, columns = gated.shape
    pitch = columns * gated.itemsize
    for token in range(tokens):
        start = wide.ctypes.data + 2 * token * pitch
        gate_row(row_at(wide, start, columns), row_at(wide, start + pitch, columns),
                 row_at(gated, gated.ctypes.data + token * pitch, columns))  # fmt: skip


@part
def gate_row(left, right, out):
    for i in range(out.size):
        out[i] = narrow(out, widen(narrow(out, silu(widen(left[i])))) * widen(right[i]))


@kernel
def gate_rows(wide, gated, tokens, columns, like):
    """`gate` between contiguous rows at the addresses wide, [tokens, 2 * columns], and gated, [tokens, columns]."""
    gate(rows_at(like, wide, tokens, 2 * columns), rows_at(like, gated, tokens, columns))


@kernel
def mlp_rows(x, out, tokens, weights):
    """The whole stage between contiguous rows at the addresses x and out, which may be the same.

    weights: gate_up [2 * columns, hidden], its bias or empty, down [hidden, columns], its bias or empty.
    """
    gate_up, gate_up_bias, down, down_bias = weights
    hidden, columns = down.shape
    wide = np.empty((tokens, 2 * columns), down.dtype)
    gated = np.empty((tokens, columns), down.dtype)
    project(rows_at(down, x, tokens, hidden), gate_up, gate_up_bias, wide)
    gate(wide, gated)
    project(gated, down, down_bias, rows_at(down, out, tokens, hidden))
