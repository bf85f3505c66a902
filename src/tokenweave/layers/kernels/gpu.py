"""The layers' small GPU kernels: device code only; `layers.cuda` checks and launches them.

Each does in one pass over memory what torch's operators do in several. Arithmetic is float32, rounded where the CPU
path and the published models round. Row offsets are int64: 32768 rows of 2 * 29568 columns are 1.9e9 elements.
"""

import triton
import triton.language as tl


@triton.jit
def silu_multiply(wide, gated, columns, BLOCK: tl.constexpr):
    """gated[r] = silu(wide[r, :columns]) * wide[r, columns:]. Grid: (rows * columns / BLOCK,): other axes are short."""
    blocks = tl.cdiv(columns, BLOCK)
    row, column = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    start = wide + row * 2 * columns
    gate = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + columns + column, mask=inside, other=0.0)
    # silu(x) is rounded before the product, as two operators would
    silu = (gate / (1.0 + tl.exp(-gate))).to(up.dtype).to(tl.float32)
    tl.store(gated + row * columns + column, (silu * up.to(tl.float32)).to(up.dtype), mask=inside)


@triton.jit
def add_rms_norm(rows, residual, weight, eps, hidden, BLOCK: tl.constexpr):
    """y = rows + residual, rounded and kept as the residual; rows = y * rsqrt(mean(y * y) + eps), rounded, * weight.

    One row to a program, whole in registers. Grid: (rows,).
    """
    start, column = tl.program_id(0).to(tl.int64) * hidden, tl.arange(0, BLOCK)
    inside = column < hidden
    x = tl.load(rows + start + column, mask=inside, other=0.0)
    y = x.to(tl.float32) + tl.load(residual + start + column, mask=inside, other=0.0).to(tl.float32)
    rounded = y.to(x.dtype)
    tl.store(residual + start + column, rounded, mask=inside)
    y = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(y * y, axis=0) / hidden + eps)
    scaled = (y * scale).to(x.dtype).to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(rows + start + column, (w * scaled).to(x.dtype), mask=inside)


@triton.jit(do_not_specialize=["first", "count"])
def look_up(token_ids, table, out, first, count, hidden, BLOCK: tl.constexpr):
    """out[t] = table[token_ids[t] - first], or zeros where that is another rank's. Grid: (tokens * hidden / BLOCK,)."""
    blocks = tl.cdiv(hidden, BLOCK)
    token, column = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    local = tl.load(token_ids + token) - first
    owned = tl.where((local >= 0) & (local < count), hidden, 0)
    found = tl.load(table + local * hidden + column, mask=column < owned, other=0.0)
    tl.store(out + token * hidden + column, found, mask=column < hidden)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def rotate_and_cache(
    qkv, positions, slots, cos, sin, query_weight, key_weight, eps, key_cache, value_cache,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HEADS_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """A new token's query and key heads are normed (if NORM) and turned, in place; its key and value go into the cache
    at its slot, if that is not negative. Grid: (tokens,)."""
    size: tl.constexpr = 2 * HALF
    kv_size: tl.constexpr = KV_HEADS * size
    token = tl.program_id(0).to(tl.int64)
    row = qkv + token * (QUERY_HEADS * size + 2 * kv_size)
    position = tl.load(positions + token)
    half = tl.arange(0, HALF_BLOCK)
    c = tl.load(cos + position * HALF + half, mask=half < HALF, other=0.0)[None, :]
    s = tl.load(sin + position * HALF + half, mask=half < HALF, other=0.0)[None, :]

    head = tl.arange(0, HEADS_BLOCK)
    inside = (head < QUERY_HEADS)[:, None] & (half < HALF)[None, :]
    where = row + head[:, None] * size + half[None, :]
    left, right = _turned(where, inside, query_weight, eps, c, s, half, HALF, NORM)
    tl.store(where, left, mask=inside)
    tl.store(where + HALF, right, mask=inside)

    head = tl.arange(0, KV_BLOCK)
    inside = (head < KV_HEADS)[:, None] & (half < HALF)[None, :]
    column = head[:, None] * size + half[None, :]
    where = row + QUERY_HEADS * size + column
    left, right = _turned(where, inside, key_weight, eps, c, s, half, HALF, NORM)
    value_left = tl.load(where + kv_size, mask=inside, other=0.0)
    value_right = tl.load(where + kv_size + HALF, mask=inside, other=0.0)
    tl.store(where, left, mask=inside)
    tl.store(where + HALF, right, mask=inside)
    slot = tl.load(slots + token)
    kept = inside & (head < tl.where(slot >= 0, KV_HEADS, 0))[:, None]
    target = slot * kv_size + column
    tl.store(key_cache + target, left, mask=kept)
    tl.store(key_cache + target + HALF, right, mask=kept)
    tl.store(value_cache + target, value_left, mask=kept)
    tl.store(value_cache + target + HALF, value_right, mask=kept)


@triton.jit
def _turned(where, inside, weight, eps, c, s, half, HALF: tl.constexpr, NORM: tl.constexpr):
    """Heads at `where`, [heads, HALF] and as many to the right, normed and turned; in the type of the memory."""
    left, right = tl.load(where, mask=inside, other=0.0), tl.load(where + HALF, mask=inside, other=0.0)
    dtype = left.dtype
    left, right = left.to(tl.float32), right.to(tl.float32)
    if NORM:
        mean = (tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)) / (2 * HALF)
        scale = (1.0 / tl.sqrt_rn(mean + eps))[:, None]
        left_weight = tl.load(weight + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
        right_weight = tl.load(weight + HALF + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
        left = (left_weight * (left * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        right = (right_weight * (right * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    return (left * c - right * s).to(dtype), (right * c + left * s).to(dtype)
