"""The shared-memory collective's kernels: what ranks do with each other's rows.

Every function takes the address of a lane's private words (`LaneWord`), which say where the ranks' buffers are.
T: tokens; H: hidden size; N: ranks.
"""

import numpy as np
from numba import njit

from tokenweave.comm.kernels.sync import LaneWord, barrier, declare, lane_word, set_word
from tokenweave.comm.kernels.vector import (
    LANES,
    add,
    address,
    elements_at,
    float32_at,
    load,
    load_part,
    multiply,
    rounded,
    splat,
    store,
    store_part,
    total,
)  # fmt: skip

FUSED, ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = 1, 2, 3, 4


@njit
def source(lane, like, rank):  # type: ignore[no-untyped-def]
    """Rows of `rank` to read."""
    return elements_at(like, lane_word(lane, LaneWord.SOURCES + rank))


@njit
def target(lane, like, rank):  # type: ignore[no-untyped-def]
    """The buffer of `rank`."""
    return elements_at(like, lane_word(lane, LaneWord.TARGETS + rank))


@njit
def sum_at(lane, like, at):  # type: ignore[no-untyped-def]
    """Sum over the ranks, in their order, of sixteen elements."""
    y = load(source(lane, like, 0), at)
    for rank in range(1, lane_word(lane, LaneWord.SIZE)):
        y = add(y, load(source(lane, like, rank), at))
    return y


@njit
def sum_part_at(lane, like, at, count):  # type: ignore[no-untyped-def]
    y = load_part(source(lane, like, 0), at, count)
    for rank in range(1, lane_word(lane, LaneWord.SIZE)):
        y = add(y, load_part(source(lane, like, rank), at, count))
    return y


@njit
def store_all(lane, like, at, x):  # type: ignore[no-untyped-def]
    for rank in range(lane_word(lane, LaneWord.SIZE)):
        store(target(lane, like, rank), at, x)


@njit
def store_part_all(lane, like, at, x, count):  # type: ignore[no-untyped-def]
    for rank in range(lane_word(lane, LaneWord.SIZE)):
        store_part(target(lane, like, rank), at, x, count)


@njit
def add_row(lane, row, residual, own):  # type: ignore[no-untyped-def]
    """residual[own] = y = sum over ranks of row + residual[own], rounded; returns the sum of y * y over the row.

    Four sums side by side, as one would wait for the adder at every step."""
    hidden = lane_word(lane, LaneWord.HIDDEN)
    start, base = row * hidden, own * hidden
    s0, s1, s2, s3 = splat(np.float32(0)), splat(np.float32(0)), splat(np.float32(0)), splat(np.float32(0))
    i = 0
    while i + 4 * LANES <= hidden:
        y0 = rounded(residual, add(sum_at(lane, residual, start + i), load(residual, base + i)))
        store(residual, base + i, y0)
        s0 = add(s0, multiply(y0, y0))
        y1 = rounded(residual, add(sum_at(lane, residual, start + i + 16), load(residual, base + i + 16)))
        store(residual, base + i + 16, y1)
        s1 = add(s1, multiply(y1, y1))
        y2 = rounded(residual, add(sum_at(lane, residual, start + i + 32), load(residual, base + i + 32)))
        store(residual, base + i + 32, y2)
        s2 = add(s2, multiply(y2, y2))
        y3 = rounded(residual, add(sum_at(lane, residual, start + i + 48), load(residual, base + i + 48)))
        store(residual, base + i + 48, y3)
        s3 = add(s3, multiply(y3, y3))
        i += 4 * LANES
    while i + LANES <= hidden:
        y = rounded(residual, add(sum_at(lane, residual, start + i), load(residual, base + i)))
        store(residual, base + i, y)
        s0 = add(s0, multiply(y, y))
        i += LANES
    if i < hidden:
        count = hidden - i
        y = rounded(residual, add(sum_part_at(lane, residual, start + i, count), load_part(residual, base + i, count)))
        store_part(residual, base + i, y, count)
        s0 = add(s0, multiply(y, y))
    return total(add(add(s0, s1), add(s2, s3)))


@njit
def scale_row(lane, row, residual, own, weight, inverse):  # type: ignore[no-untyped-def]
    """Row of every rank's buffer = weight * (residual[own] * inverse, rounded)."""
    hidden = lane_word(lane, LaneWord.HIDDEN)
    start, base, factor = row * hidden, own * hidden, splat(inverse)
    i = 0
    while i + LANES <= hidden:
        x = multiply(load(weight, i), rounded(residual, multiply(load(residual, base + i), factor)))
        store_all(lane, residual, start + i, x)
        i += LANES
    if i < hidden:
        count = hidden - i
        scaled = rounded(residual, multiply(load_part(residual, base + i, count), factor))
        store_part_all(lane, residual, start + i, multiply(load_part(weight, i, count), scaled), count)


@njit
def sum_row(lane, row, rows, own, everywhere):  # type: ignore[no-untyped-def]
    """Sum over ranks of row, into every rank's buffer or into rows[own]."""
    hidden = lane_word(lane, LaneWord.HIDDEN)
    start, base = row * hidden, own * hidden
    i = 0
    while i + LANES <= hidden:
        y = sum_at(lane, rows, start + i)
        if everywhere:
            store_all(lane, rows, start + i, y)
        else:
            store(rows, base + i, y)
        i += LANES
    if i < hidden:
        count = hidden - i
        y = sum_part_at(lane, rows, start + i, count)
        if everywhere:
            store_part_all(lane, rows, start + i, y, count)
        else:
            store_part(rows, base + i, y, count)


@njit
def copy(destination, to, origin, at, count):  # type: ignore[no-untyped-def]
    """destination[to : to + count] = origin[at : at + count]"""
    i = 0
    while i + LANES <= count:
        store(destination, to + i, load(origin, at + i))
        i += LANES
    if i < count:
        store_part(destination, to + i, load_part(origin, at + i, count - i), count - i)


@njit(nogil=True, cache=True)
def exchange(lane, code, partial, rows, weight, wide, tokens, eps):  # type: ignore[no-untyped-def]
    """The operation of `code` on T = `tokens` rows; False if the group has ended. With [a, b) this rank's rows:

    FUSED            rows[:] = sum(partials)[a:b] + rows;  every buffer[a:b] = rms_norm(rows) * weight
    ALL_REDUCE       every buffer[a:b] = sum(partials)[a:b]
    REDUCE_SCATTER   rows[:] = sum(partials)[a:b]
    ALL_GATHER       every buffer[a:b] = rows

    wide: the weight is float32, not of the type of the rows. A partial that is not in this rank's buffer is copied there,
    but for its own rows, which only this rank reads. First barrier: all partials are written and no rank reads its
    buffer any more. Second: all results are written and all partials read.
    """
    size, rank, hidden = (
        lane_word(lane, LaneWord.SIZE),
        lane_word(lane, LaneWord.RANK),
        lane_word(lane, LaneWord.HIDDEN),
    )
    operation = code & 0xFF
    declare(lane, code, tokens, hidden)
    first, last = rank * tokens // size, (rank + 1) * tokens // size
    if operation != ALL_GATHER:
        own_buffer = target(lane, partial, rank)
        if address(own_buffer) != address(partial):
            copy(own_buffer, 0, partial, 0, first * hidden)
            copy(own_buffer, last * hidden, partial, last * hidden, (tokens - last) * hidden)
        set_word(lane + (LaneWord.SOURCES + rank) * 8, address(partial))
    if not barrier(lane):
        return False
    for row in range(first, last):
        if operation == FUSED:
            squares = add_row(lane, row, rows, row - first)
            inverse = np.float32(1) / np.sqrt(squares / np.float32(hidden) + np.float32(eps))
            if wide:
                scale_row(lane, row, rows, row - first, float32_at(weight), inverse)
            else:
                scale_row(lane, row, rows, row - first, elements_at(rows, weight), inverse)
        elif operation == ALL_GATHER:
            for peer in range(size):
                copy(target(lane, rows, peer), row * hidden, rows, (row - first) * hidden, hidden)
        else:
            sum_row(lane, row, rows, row - first, operation == ALL_REDUCE)
    return barrier(lane)


@njit(nogil=True, cache=True)
def meet(lane, code, rows, columns):  # type: ignore[no-untyped-def]
    """One barrier: all that was written before it is seen by all after it. False if the group has ended."""
    declare(lane, code, rows, columns)
    return barrier(lane)
