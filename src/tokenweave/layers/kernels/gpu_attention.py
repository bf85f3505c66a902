"""Attention over a paged cache on a GPU: device code only; `layers.cuda_attention` checks and launches it.

Query heads that share a key/value head are rows of one tile, so keys are read once for all of them: a decode of eight
heads is a tile of eight rows. Keys may be shared out among programs, whose results `join_attended` puts together.
"""

import triton
import triton.language as tl


@triton.jit
def request_of(turn, offsets, requests, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """The last request whose tiles begin at `turn` or before: request i's begin at offsets[i] * GROUP // ROWS + i, so
    that each has room for as many as it needs."""
    low, high = 0, requests
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(offsets + middle) * GROUP // ROWS + middle <= turn
        low, high = tl.where(begins, middle, low), tl.where(begins, high, middle)
    return low


@triton.jit
def _scores(queries, key_cache, table, n, kv_head, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
            SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Scores [rows, KEYS] of the keys from n on, all of one page, and where these keys are in the cache."""
    page = tl.load(table + n // BLOCK_SIZE).to(tl.int64)
    key, column = tl.arange(0, KEYS), tl.arange(0, SIZE_BLOCK)
    first = (page * BLOCK_SIZE + n % BLOCK_SIZE) * (KV_HEADS * SIZE) + kv_head * SIZE
    where = first + key[:, None] * (KV_HEADS * SIZE) + column[None, :]
    if SIZE == SIZE_BLOCK:
        keys = tl.load(key_cache + where)
    else:
        keys = tl.load(key_cache + where, mask=column[None, :] < SIZE, other=0.0)
    return tl.dot(queries, tl.trans(keys)), where


@triton.jit
def _added(scores, values, peak, total, sums, scale):
    """Running maximum, sum of exponentials and weighted sum of values with the scores of one more tile; in base 2."""
    higher = tl.maximum(peak, tl.max(scores, 1) * scale)
    known = tl.where(higher == float("-inf"), 0.0, higher)  # of rows that have seen no key yet
    weights = tl.exp2(scores * scale - known[:, None])
    fade = tl.exp2(peak - known)
    sums = tl.dot(weights.to(values.dtype), values, sums * fade[:, None])
    return higher, total * fade + tl.sum(weights, 1), sums


@triton.jit(
    do_not_specialize=["requests", "table_stride", "tokens", "share"],
    do_not_specialize_on_alignment=["offsets", "contexts", "block_tables"],
)
def attend(
    queries, key_cache, value_cache, attended, part_sums, part_peaks, offsets, contexts, block_tables, table_stride,
    query_stride, requests, tokens, share, scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, SHARED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """attended[t, h] = softmax(q k' * scale / log2(e)) v over the keys that token t of its request sees.

    Row r of a request's tiles is query head r % GROUP (of a key/value head) of its token r // GROUP. Grid: (tokens *
    GROUP // ROWS + requests, KV_HEADS, shares). SHARED: program (.., .., s) takes keys [s * share, (s + 1) * share) and
    leaves its sum, divided, in part_sums[s, t, h], float32, and the logarithm of what it was divided by in
    part_peaks[s, t, h]. WINDOW: keys that a token sees, 0 for all.
    """
    turn = tl.num_programs(0) - 1 - tl.program_id(0)  # a prompt's last tiles have the most keys: they go first
    kv_head = tl.program_id(1)
    request = request_of(turn, offsets, requests, ROWS, GROUP)
    begin = tl.load(offsets + request)
    count = tl.load(offsets + request + 1) - begin
    past = tl.load(contexts + request) - count
    first_row = (turn - (begin * GROUP // ROWS + request)) * ROWS
    if first_row >= count * GROUP:
        return
    first = past + first_row // GROUP  # positions of the tile's first and last token
    last = past + tl.minimum((first_row + ROWS - 1) // GROUP, count - 1)
    start, stop = 0, last + 1
    if WINDOW:
        start = tl.maximum(first - WINDOW + 1, 0) // KEYS * KEYS
    if SHARED:
        start = tl.maximum(start, tl.program_id(2) * share)
        stop = tl.minimum(stop, (tl.program_id(2) + 1) * share)
        if start >= stop:
            return

    row, column = first_row + tl.arange(0, ROWS), tl.arange(0, SIZE_BLOCK)
    token, position = begin + row // GROUP, past + row // GROUP
    head = kv_head * GROUP + row % GROUP
    inside = (row < count * GROUP)[:, None] & (column < SIZE)[None, :]
    where = token.to(tl.int64) * query_stride + head * SIZE
    q = tl.load(queries + where[:, None] + column[None, :], mask=inside, other=0.0)
    table = block_tables + request.to(tl.int64) * table_stride
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, SIZE_BLOCK], tl.float32)

    whole = start  # up to here every row sees every key
    if not WINDOW:
        whole = start + tl.maximum(tl.minimum(stop, first + 1) - start, 0) // KEYS * KEYS
    for n in tl.range(start, whole, KEYS, num_stages=STAGES):
        scores, place = _scores(q, key_cache, table, n, kv_head, BLOCK_SIZE, KV_HEADS, SIZE, SIZE_BLOCK, KEYS)
        if SIZE == SIZE_BLOCK:
            values = tl.load(value_cache + place)
        else:
            values = tl.load(value_cache + place, mask=column[None, :] < SIZE, other=0.0)
        peak, total, sums = _added(scores, values, peak, total, sums, scale)
    for n in tl.range(whole, stop, KEYS, num_stages=1):
        scores, place = _scores(q, key_cache, table, n, kv_head, BLOCK_SIZE, KV_HEADS, SIZE, SIZE_BLOCK, KEYS)
        key = n + tl.arange(0, KEYS)
        # behind the last key there may be anything, which zero does not make zero
        there = (key < stop)[:, None] & (column < SIZE)[None, :]
        values = tl.load(value_cache + place, mask=there, other=0.0)
        seen = key[None, :] <= position[:, None]
        if WINDOW:
            seen &= key[None, :] > position[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
        peak, total, sums = _added(scores, values, peak, total, sums, scale)

    nonzero = tl.where(total == 0.0, 1.0, total)  # a row that sees none of these keys
    result = sums / nonzero[:, None]
    if SHARED:
        place = (tl.program_id(2) * tokens + token).to(tl.int64) * (KV_HEADS * GROUP) + head
        tl.store(part_sums + place[:, None] * SIZE + column[None, :], result, mask=inside)
        tl.store(part_peaks + place, peak + tl.log2(total), mask=row < count * GROUP)
    else:
        where = token.to(tl.int64) * (KV_HEADS * GROUP * SIZE) + head * SIZE
        tl.store(attended + where[:, None] + column[None, :], result.to(attended.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "share"], do_not_specialize_on_alignment=["positions"])
def join_attended(
    part_sums, part_peaks, attended, positions, tokens, share,
    HEADS: tl.constexpr, HEADS_BLOCK: tl.constexpr, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """attended[t] from the parts that `attend` has left of token t. positions: int64 [tokens], each in its request.
    Grid: (tokens, HEADS / HEADS_BLOCK)."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    column = tl.arange(0, SIZE_BLOCK)
    inside = (head < HEADS)[:, None] & (column < SIZE)[None, :]
    peak = tl.full([HEADS_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([HEADS_BLOCK], tl.float32)
    sums = tl.zeros([HEADS_BLOCK, SIZE_BLOCK], tl.float32)
    first = 0
    if WINDOW:
        first = (tl.maximum(position - WINDOW + 1, 0) // share).to(tl.int32)
    for s in tl.range(first, (position // share + 1).to(tl.int32), num_stages=2):
        place = (s * tokens + token) * HEADS + head
        one = tl.load(part_peaks + place, mask=head < HEADS, other=0.0)
        part = tl.load(part_sums + place[:, None] * SIZE + column[None, :], mask=inside, other=0.0)
        higher = tl.maximum(peak, one)
        known = tl.where(higher == float("-inf"), 0.0, higher)
        fade, weight = tl.exp2(peak - known), tl.exp2(one - known)
        sums = sums * fade[:, None] + part * weight[:, None]
        total = total * fade + weight
        peak = higher
    result = sums / total[:, None]
    where = token * (HEADS * SIZE) + head[:, None] * SIZE + column[None, :]
    tl.store(attended + where, result.to(attended.dtype.element_ty), mask=inside)
