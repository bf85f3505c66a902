"""The shared-memory collective's kernels: what ranks do with each other's rows.

Every function takes the address of a lane's private words (`LaneWord`), which say where the ranks' buffers are.
`row` counts in the lane, `own` in this rank's rows. A block is four vectors: that many sums run side by side, as one
alone would wait for the adder at every step.

`ranks` and `targets` say how many partials are summed and to how many buffers results go; they are literals for two
ranks, so that loops over them are unrolled. What a row runs through is inlined by force: left to itself, LLVM calls
`add_block`, with the running sums written to the stack and back. Together 28 % of the time of [16, 4096].
"""

import numpy as np
from numba import njit

from tokenweave.comm.kernels.kept import keep
from tokenweave.comm.kernels.sync import LaneWord, barrier, declare, fence, lane_word, set_word
from tokenweave.comm.kernels.vector import (
    LANES,
    add,
    address,
    elements_at,
    float32_at,
    load,
    load_part,
    multiply,
    prefetch,
    prefetch_to_write,
    rounded,
    splat,
    store,
    store_part,
    store_past_cache,
    total,
)

FUSED, ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = 1, 2, 3, 4
BLOCK = 4 * LANES
# From so many bytes of own rows on, data comes from memory rather than from a cache. Then fetching a page ahead, which
# the processor does not do by itself, gains 10 % at [1024, 4096] (below it costs as much), and storing rows that were
# not read past the cache gains 20 %. Below, peers' rows lie in the peers' caches and are stored to after they are read:
# taking the lines for writing a page ahead, one journey instead of two, gains 25 % at [16, 4096] from private tensors.
LARGE_BYTES = 4 << 20
PAGE_BYTES = 4096


@njit(forceinline=True, error_model="numpy")
def source(lane, like, rank):  # type: ignore[no-untyped-def]
    """The partial of `rank`."""
    return elements_at(like, lane_word(lane, LaneWord.SOURCES + rank))


@njit(forceinline=True, error_model="numpy")
def target(lane, like, rank):  # type: ignore[no-untyped-def]
    """The buffer of `rank`. The distributed collective has one only, its own."""
    return elements_at(like, lane_word(lane, LaneWord.TARGETS + rank))


@njit(forceinline=True, error_model="numpy")
def sum_block(lane, like, at, ranks):  # type: ignore[no-untyped-def]
    """Sum over the ranks, in their order, of partial[at : at + BLOCK]."""
    rows = source(lane, like, 0)
    y0, y1 = load(rows, at), load(rows, at + LANES)
    y2, y3 = load(rows, at + 2 * LANES), load(rows, at + 3 * LANES)
    for rank in range(1, ranks):
        rows = source(lane, like, rank)
        y0, y1 = add(y0, load(rows, at)), add(y1, load(rows, at + LANES))
        y2, y3 = add(y2, load(rows, at + 2 * LANES)), add(y3, load(rows, at + 3 * LANES))
    return y0, y1, y2, y3


@njit(forceinline=True, error_model="numpy")
def sum_part(lane, like, at, count, ranks):  # type: ignore[no-untyped-def]
    """Sum over the ranks, in their order, of partial[at : at + count]; count < LANES."""
    y = load_part(source(lane, like, 0), at, count)
    for rank in range(1, ranks):
        y = add(y, load_part(source(lane, like, rank), at, count))
    return y


@njit(forceinline=True, error_model="numpy")
def load_block(rows, at):  # type: ignore[no-untyped-def]
    return load(rows, at), load(rows, at + LANES), load(rows, at + 2 * LANES), load(rows, at + 3 * LANES)


@njit(forceinline=True, error_model="numpy")
def store_block(rows, at, block):  # type: ignore[no-untyped-def]
    store(rows, at, block[0])
    store(rows, at + LANES, block[1])
    store(rows, at + 2 * LANES, block[2])
    store(rows, at + 3 * LANES, block[3])


@njit(forceinline=True, error_model="numpy")
def store_block_past_cache(rows, at, block):  # type: ignore[no-untyped-def]
    store_past_cache(rows, at, block[0])
    store_past_cache(rows, at + LANES, block[1])
    store_past_cache(rows, at + 2 * LANES, block[2])
    store_past_cache(rows, at + 3 * LANES, block[3])


@njit(forceinline=True, error_model="numpy")
def prefetch_block(lane, residual, at, base, ranks):  # type: ignore[no-untyped-def]
    for i in range(0, BLOCK, LANES):
        prefetch(residual, base + i)
        for rank in range(ranks):
            prefetch(source(lane, residual, rank), at + i)


@njit(forceinline=True, error_model="numpy")
def claim_block(lane, like, at, end, targets):  # type: ignore[no-untyped-def]
    """Fetch the peers' [at : at + BLOCK] to be read and then stored to, unless from `end` on they are others' rows."""
    if at >= end:
        return
    this_rank = lane_word(lane, LaneWord.RANK)
    for rank in range(targets):
        if rank != this_rank:
            for i in range(0, BLOCK, LANES):
                prefetch_to_write(target(lane, like, rank), at + i)


@njit(forceinline=True, error_model="numpy")
def add_block(lane, residual, at, base, ranks):  # type: ignore[no-untyped-def]
    """residual[base : base + BLOCK] += sum of the partials; returns it, rounded as stored."""
    y0, y1, y2, y3 = sum_block(lane, residual, at, ranks)
    r0, r1, r2, r3 = load_block(residual, base)
    block = (
        rounded(residual, add(y0, r0)), rounded(residual, add(y1, r1)),
        rounded(residual, add(y2, r2)), rounded(residual, add(y3, r3)),
    )  # fmt: skip
    store_block(residual, base, block)
    return block


@njit(forceinline=True, error_model="numpy")
def add_row(lane, row, last, residual, own, ahead, large, ranks, targets):  # type: ignore[no-untyped-def]
    """residual[own] += sum over the ranks of their row, rounded; returns the sum of squares of residual[own].

    last: where this rank's rows end. ahead: elements to prefetch ahead. large: see LARGE_BYTES.
    """
    hidden = lane_word(lane, LaneWord.HIDDEN)
    start, base = row * hidden, own * hidden
    zero = splat(np.float32(0))
    s0, s1, s2, s3 = zero, zero, zero, zero
    i = 0
    while i + BLOCK <= hidden:
        if large:
            prefetch_block(lane, residual, start + i + ahead, base + i + ahead, ranks)
        else:
            claim_block(lane, residual, start + i + ahead, last * hidden, targets)
        y0, y1, y2, y3 = add_block(lane, residual, start + i, base + i, ranks)
        s0, s1 = add(s0, multiply(y0, y0)), add(s1, multiply(y1, y1))
        s2, s3 = add(s2, multiply(y2, y2)), add(s3, multiply(y3, y3))
        i += BLOCK
    while i < hidden:
        count = min(LANES, hidden - i)
        y = sum_part(lane, residual, start + i, count, ranks)
        y = rounded(residual, add(y, load_part(residual, base + i, count)))
        store_part(residual, base + i, y, count)
        s0 = add(s0, multiply(y, y))
        i += LANES
    return total(add(add(s0, s1), add(s2, s3)))


@njit(forceinline=True, error_model="numpy")
def scale(residual, at, factor, weight, i):  # type: ignore[no-untyped-def]
    return multiply(load(weight, i), rounded(residual, multiply(load(residual, at), factor)))


@njit(forceinline=True, error_model="numpy")
def scale_row(lane, row, residual, own, weight, inverse, past_cache, targets):  # type: ignore[no-untyped-def]
    """row of every rank's buffer = weight * (residual[own] * inverse, rounded).

    past_cache: this rank's buffer is stored to past the cache.
    """
    hidden, this_rank = lane_word(lane, LaneWord.HIDDEN), lane_word(lane, LaneWord.RANK)
    start, base, factor = row * hidden, own * hidden, splat(inverse)
    i = 0
    while i + BLOCK <= hidden:
        block = (
            scale(residual, base + i, factor, weight, i),
            scale(residual, base + i + LANES, factor, weight, i + LANES),
            scale(residual, base + i + 2 * LANES, factor, weight, i + 2 * LANES),
            scale(residual, base + i + 3 * LANES, factor, weight, i + 3 * LANES),
        )
        for rank in range(targets):
            if past_cache and rank == this_rank:
                store_block_past_cache(target(lane, residual, rank), start + i, block)
            else:
                store_block(target(lane, residual, rank), start + i, block)
        i += BLOCK
    while i < hidden:
        count = min(LANES, hidden - i)
        scaled = rounded(residual, multiply(load_part(residual, base + i, count), factor))
        x = multiply(load_part(weight, i, count), scaled)
        for rank in range(targets):
            store_part(target(lane, residual, rank), start + i, x, count)
        i += LANES


@njit(forceinline=True, error_model="numpy")
def sum_row(lane, row, rows, own, everywhere, ranks, targets):  # type: ignore[no-untyped-def]
    """Sum over the ranks of their row, into every rank's buffer or into rows[own]."""
    hidden = lane_word(lane, LaneWord.HIDDEN)
    start, base = row * hidden, own * hidden
    size = targets if everywhere else 1
    i = 0
    while i + BLOCK <= hidden:
        block = sum_block(lane, rows, start + i, ranks)
        for rank in range(size):
            if everywhere:
                store_block(target(lane, rows, rank), start + i, block)
            else:
                store_block(rows, base + i, block)
        i += BLOCK
    while i < hidden:
        count = min(LANES, hidden - i)
        y = sum_part(lane, rows, start + i, count, ranks)
        for rank in range(size):
            if everywhere:
                store_part(target(lane, rows, rank), start + i, y, count)
            else:
                store_part(rows, base + i, y, count)
        i += LANES


@njit(error_model="numpy")
def copy(destination, to, origin, at, count):  # type: ignore[no-untyped-def]
    """destination[to : to + count] = origin[at : at + count]"""
    i = 0
    while i + LANES <= count:
        store(destination, to + i, load(origin, at + i))
        i += LANES
    if i < count:
        store_part(destination, to + i, load_part(origin, at + i, count - i), count - i)


@njit(error_model="numpy")
def offer(lane, partial, tokens, first, last):  # type: ignore[no-untyped-def]
    """Let the peers read this rank's partial. True if it had to be copied to the buffer: all rows but this rank's."""
    rank, hidden = lane_word(lane, LaneWord.RANK), lane_word(lane, LaneWord.HIDDEN)
    set_word(lane + (LaneWord.SOURCES + rank) * 8, address(partial))
    buffer = target(lane, partial, rank)
    if address(buffer) == address(partial):
        return False
    copy(buffer, 0, partial, 0, first * hidden)
    copy(buffer, last * hidden, partial, last * hidden, (tokens - last) * hidden)
    return True


@njit(forceinline=True, error_model="numpy")
def own_rows(lane, operation, rows, weight, wide, eps, first, last, copied, ranks, targets):  # type: ignore[no-untyped-def]
    """This rank's part of an operation, rows [first, last) of the lane; see `exchange`."""
    hidden, row_bytes = lane_word(lane, LaneWord.HIDDEN), lane_word(lane, LaneWord.ROW_BYTES)
    large = (last - first) * row_bytes >= LARGE_BYTES
    ahead = PAGE_BYTES * hidden // row_bytes
    past_cache = copied and large and row_bytes % 64 == 0
    for row in range(first, last):
        if operation == FUSED:
            squares = add_row(lane, row, last, rows, row - first, ahead, large, ranks, targets)
            inverse = np.float32(1) / np.sqrt(squares / np.float32(hidden) + np.float32(eps))
            if wide:
                scale_row(lane, row, rows, row - first, float32_at(weight), inverse, past_cache, targets)
            else:
                scale_row(lane, row, rows, row - first, elements_at(rows, weight), inverse, past_cache, targets)
        elif operation == ALL_GATHER:
            for rank in range(targets):
                copy(target(lane, rows, rank), row * hidden, rows, (row - first) * hidden, hidden)
        else:
            sum_row(lane, row, rows, row - first, operation == ALL_REDUCE, ranks, targets)
    if past_cache:
        fence()


@keep
@njit(nogil=True, cache=True, error_model="numpy")
def exchange(lane, code, partial, rows, weight, wide, tokens, eps):  # type: ignore[no-untyped-def]
    """The operation of `code` on `tokens` rows; False if the group has ended. With [a, b) this rank's rows:

    FUSED            rows[:] = sum(partials)[a:b] + rows;  every buffer[a:b] = rms_norm(rows) * weight
    ALL_REDUCE       every buffer[a:b] = sum(partials)[a:b]
    REDUCE_SCATTER   rows[:] = sum(partials)[a:b]
    ALL_GATHER       every buffer[a:b] = rows

    wide: the weight is float32, not of the type of the rows. After the first barrier all partials are written and no
    rank reads its buffer any more; after the second all results are written and all partials read.
    """
    size, rank = lane_word(lane, LaneWord.SIZE), lane_word(lane, LaneWord.RANK)
    operation = code & 0xFF
    first, last = rank * tokens // size, (rank + 1) * tokens // size
    copied = operation != ALL_GATHER and offer(lane, partial, tokens, first, last)
    declare(lane, code, tokens, lane_word(lane, LaneWord.HIDDEN))
    if not barrier(lane):
        return False
    if size == 2:
        own_rows(lane, operation, rows, weight, wide, eps, first, last, copied, 2, 2)
    else:
        own_rows(lane, operation, rows, weight, wide, eps, first, last, copied, size, size)
    return barrier(lane)


@keep
@njit(nogil=True, cache=True, error_model="numpy")
def combine(lane, operation, rows, weight, wide, tokens, eps):  # type: ignore[no-untyped-def]
    """`exchange` between its barriers, for ranks that have been sent their rows of all partials."""
    size, rank = lane_word(lane, LaneWord.SIZE), lane_word(lane, LaneWord.RANK)
    first, last = rank * tokens // size, (rank + 1) * tokens // size
    own_rows(lane, operation, rows, weight, wide, eps, first, last, False, size, 1)


@keep
@njit(nogil=True, cache=True, error_model="numpy")
def meet(lane, code, rows, columns):  # type: ignore[no-untyped-def]
    """One barrier: all that was written before it is seen by all after it. False if the group has ended."""
    declare(lane, code, rows, columns)
    return barrier(lane)
