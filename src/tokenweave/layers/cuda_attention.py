"""Attention on a GPU, over the paged cache: chooses tiles and launches the kernels."""

from dataclasses import dataclass, replace
from functools import cache

import torch

from tokenweave.layers.batch import Batch
from tokenweave.layers.cuda import HeadNorm, Pages, rotate_and_cache
from tokenweave.layers.kernels import gpu_attention
from tokenweave.layers.padding import power_of_two
from tokenweave.layers.rotary import Rotation

# Shapes: T tokens of the step, Q query heads, K key/value heads, D head_dim.
LEAST_SHARE = 256  # keys: fewer cost more in putting the parts together than they save
LONG = 8192  # keys, from which on larger tiles are faster
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Tiles:
    """How attention is cut up. rows: query heads of a program, those of a key/value head side by side. keys: of a turn
    of its loop. share: keys of a program, where those of a request are shared out; 0: all are one program's."""

    rows: int
    keys: int
    share: int = 0
    warps: int = 4
    stages: int = 2

    def shares(self, context: int) -> int:
        return -(-context // self.share) if self.share else 1


def attend(
    qkv: torch.Tensor,
    batch: Batch,
    layer: int,
    *,
    query_size: int,
    rotation: Rotation,
    norm: HeadNorm | None,
    window: int | None = None,
) -> torch.Tensor:
    """Attended values [T, Q * D] of projected heads [T, (Q + 2K) * D], which it turns in place; new keys and values go
    into the cache, and all are read there. query_size: Q * D. window: keys that a token attends to, its own the last;
    None: all up to its own.
    """
    kv_cache = batch.cache
    assert kv_cache is not None and batch.slot_mapping is not None and batch.block_tables is not None
    pages = Pages(
        kv_cache.keys[layer], kv_cache.values[layer], batch.slot_mapping, batch.block_tables, batch.query_offsets,
        batch.context_lengths,
    )  # fmt: skip
    rotate_and_cache(qkv, rotation.rows, (rotation.cos, rotation.sin), pages, norm=norm)
    block_size, kv_heads, size = pages.keys.shape[1:]
    tiles = choose_tiles(
        len(qkv), batch.num_requests, batch.limits.context, single=batch.limits.single,
        heads=(query_size // size, kv_heads), size=size, block_size=block_size, processors=_processors(qkv.device),
    )  # fmt: skip
    return attend_pages(qkv[:, :query_size], pages, batch.positions, batch.limits.context, tiles, window=window)


def choose_tiles(
    tokens: int, requests: int, context: int, *, single: bool, heads: tuple[int, int], size: int, block_size: int,
    processors: int,
) -> Tiles:  # fmt: skip
    """Tiles for a step of so many tokens of so many requests, none with more than `context` keys. heads: of queries and
    of keys. single: all requests have one token.

    Of those tried on an H200 (8 heads on one of keys, 128 wide) the fastest or within 5 % of it; 1024 tokens after 1024
    take 29 µs, by torch 2.11's attention 66, 8192 take 318 and 600, 228 decodes over 1100 keys 38 and 433.
    """
    group, page = heads[0] // heads[1], _largest_power(block_size)
    if single:
        tiles = Tiles(max(power_of_two(group), 16), min(page, 128))
        programs = requests * heads[1]
    else:
        tiles = Tiles(64, min(page, 64), stages=3)
        programs = (tokens * group // 64 + requests) * heads[1]
        if context > LONG and tokens * heads[0] >= 2 * 128 * processors:
            tiles = Tiles(128, min(page, 128), warps=8)
    if size > 128:
        tiles = replace(tiles, keys=min(tiles.keys, 64), stages=2)
    parts = 2 * processors // max(programs, 1)
    if parts < 2 or context <= 2 * LEAST_SHARE:
        return tiles
    share = max(-(-context // parts), LEAST_SHARE)
    return replace(tiles, share=-(-share // tiles.keys) * tiles.keys)


def attend_pages(
    queries: torch.Tensor,
    pages: Pages,
    positions: torch.Tensor,
    context: int,
    tiles: Tiles,
    *,
    window: int | None = None,
) -> torch.Tensor:
    """softmax(q k' / sqrt(D)) v of each token over its request's keys up to its own, [T, Q * D].

    queries: [T, Q * D], rows of any stride. positions: int64 [T], each token's in its request. context: no request has
    more keys.
    """
    block_size, kv_heads, size = pages.keys.shape[1:]
    tokens, wide = queries.shape
    heads, requests = wide // size, len(pages.context_lengths)
    if queries.stride(1) != 1 or block_size % tiles.keys or tiles.share % tiles.keys:
        raise ValueError(f"queries must have rows without gaps, blocks and shares whole tiles of {tiles.keys} keys")
    attended = queries.new_empty(tokens, wide)
    if not tokens:
        return attended
    shares = tiles.shares(context)
    part_sums = part_peaks = attended
    if tiles.share:
        part_sums = queries.new_empty(shares, tokens, heads, size, dtype=torch.float32)
        part_peaks = queries.new_empty(shares, tokens, heads, dtype=torch.float32)
    group = heads // kv_heads
    grid = (tokens * group // tiles.rows + requests, kv_heads, shares)
    size_block = max(power_of_two(size), 16)
    gpu_attention.attend[grid](
        queries, pages.keys, pages.values, attended, part_sums, part_peaks, pages.query_offsets, pages.context_lengths,
        pages.block_tables, pages.block_tables.stride(0), queries.stride(0), requests, tokens, tiles.share,
        _LOG2_E / size**0.5,
        GROUP=group, KV_HEADS=kv_heads, SIZE=size, SIZE_BLOCK=size_block, BLOCK_SIZE=block_size, ROWS=tiles.rows,
        KEYS=tiles.keys, WINDOW=window or 0, SHARED=bool(tiles.share), STAGES=tiles.stages, num_warps=tiles.warps,
    )  # fmt: skip
    if tiles.share:
        heads_block = min(power_of_two(heads), max(4096 // size_block, 1))
        gpu_attention.join_attended[(tokens, -(-heads // heads_block))](
            part_sums, part_peaks, attended, positions, tokens, tiles.share,
            HEADS=heads, HEADS_BLOCK=heads_block, SIZE=size, SIZE_BLOCK=size_block, WINDOW=window or 0, num_warps=4,
        )  # fmt: skip
    return attended


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _largest_power(count: int) -> int:
    """The largest power of two that divides it."""
    return count & -count
