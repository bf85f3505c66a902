"""Attention on a GPU: torch's own variable-length attention over the paged cache."""

import inspect
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

from tokenweave.layers.batch import Batch
from tokenweave.layers.cuda import HeadNorm, Packing, Pages, rotate_and_cache
from tokenweave.layers.rotary import Rotation

# Shapes: T tokens of the step, Q query heads, K key/value heads, D head_dim.
PAGE_ROWS = 256  # torch's kernel reads pages of so many rows, or multiples of it, where they are
_ATTEND: Any = varlen_attn  # its parameters differ from version to version
_PARAMETERS = inspect.signature(varlen_attn).parameters
_READS_PAGES = "block_table" in _PARAMETERS  # torch 2.13 and newer
_GROUPED = {"enable_gqa": True} if "enable_gqa" in _PARAMETERS else {}  # before 2.12 it was not asked for


def reads_pages(block_size: int) -> bool:
    """Whether attention reads a cache of such blocks where it is; else keys and values are packed first."""
    return _READS_PAGES and block_size % PAGE_ROWS == 0


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
    into the cache. query_size: Q * D. window: keys that a token attends to, its own the last; None: all up to its own.

    How keys are read: by page where torch can; else, where no request has a past, in qkv itself; else packed. Packing
    costs a copy of the keys, as do 4 MB of one KV head at 8192 tokens.
    """
    cache, limits = batch.cache, batch.limits
    assert cache is not None and batch.slot_mapping is not None and batch.block_tables is not None
    size = cache.keys.shape[-1]
    queries, keys, values = (
        heads.unflatten(1, (-1, size))
        for heads in qkv.split((query_size, *[(qkv.shape[1] - query_size) // 2] * 2), dim=1)
    )
    pages = Pages(
        cache.keys[layer], cache.values[layer], batch.slot_mapping, batch.block_tables, batch.query_offsets,
        batch.context_lengths,
    )  # fmt: skip
    paged = reads_pages(cache.block_size)
    packing = None if paged or not limits.past else _packing(batch, keys)
    rotate_and_cache(qkv, rotation.rows, (rotation.cos, rotation.sin), pages, norm=norm, packing=packing)
    seen = (-1 if window is None else window - 1, 0)
    if not len(qkv):
        return qkv[:, :query_size]
    offsets = batch.query_offsets
    # a claim of one query a request has the kernel take query heads of a group together: it must hold for all of them
    most = limits.query if limits.single else max(limits.query, 2)
    if paged:
        attended = _ATTEND(
            queries, pages.keys, pages.values, offsets, None, most, limits.context, window_size=seen,
            seqused_k=batch.context_lengths, block_table=batch.block_tables, **_GROUPED,
        )  # fmt: skip
    elif packing is None:
        attended = _ATTEND(
            queries, keys, values, offsets, offsets, most, most, window_size=seen, **_GROUPED
        )  # fmt: skip
    else:
        attended = _ATTEND(
            queries, packing.keys, packing.values, offsets, packing.starts, most, limits.context,
            window_size=seen, **_GROUPED,
        )  # fmt: skip
    assert isinstance(attended, torch.Tensor)
    return attended.flatten(1)


def _packing(batch: Batch, keys: torch.Tensor) -> Packing:
    layout, limits = batch.key_layout, batch.limits
    memory = keys.new_empty(2, limits.keys, *keys.shape[1:])
    return Packing(layout.rows, layout.starts, memory[0], memory[1], limits.past)
