"""Launches the GPU kernels of the layers. Imported only where tensors are on a GPU: Triton is not needed elsewhere."""

from dataclasses import dataclass

import torch

from tokenweave.layers.kernels import gpu
from tokenweave.layers.padding import power_of_two

LARGEST_ROW = 1 << 16  # elements of a row that one program holds in registers


def silu_multiply(wide: torch.Tensor) -> torch.Tensor:
    """silu(wide[:, :columns]) * wide[:, columns:], [tokens, columns]. wide: [tokens, 2 * columns], contiguous."""
    _check_contiguous(wide=wide)
    tokens, columns = wide.shape[0], wide.shape[1] // 2
    gated = wide.new_empty(tokens, columns)
    if gated.numel():
        block = min(power_of_two(columns), 1024)
        grid = (-(-columns // block) * tokens,)
        gpu.silu_multiply[grid](wide, gated, columns, BLOCK=block, num_warps=max(1, block // 256))
    return gated


def add_rms_norm(rows: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """y = rows + residual, rounded and stored as the residual; rows become the norm of y. Returns rows.

    rows, residual: [n, hidden]. weight: [hidden], of that dtype or float32. For the same sums the results are those of
    the collectives' fused operation, but for the order of the sum of squares.
    """
    _check_contiguous(rows=rows, residual=residual, weight=weight)
    hidden = rows.shape[1]
    if rows.shape != residual.shape or weight.shape != (hidden,):
        raise ValueError(
            f"rows, residual and weight do not fit: {[list(t.shape) for t in (rows, residual, weight)]}"
        )  # fmt: skip
    block = power_of_two(hidden)
    if block > LARGEST_ROW:
        raise ValueError(f"hidden size must be at most {LARGEST_ROW}, got {hidden}")
    if len(rows):
        warps = min(max(block // 512, 1), 16)
        gpu.add_rms_norm[(len(rows),)](rows, residual, weight, eps, hidden, BLOCK=block, num_warps=warps)
    return rows


def look_up(token_ids: torch.Tensor, table: torch.Tensor, first: int, out: torch.Tensor) -> torch.Tensor:
    """out[t] = table[token_ids[t] - first], zeros where `table` has no such row. table: [rows, hidden]."""
    _check_contiguous(token_ids=token_ids, table=table, out=out)
    hidden = table.shape[1]
    if len(token_ids):
        block = min(power_of_two(hidden), 2048)
        gpu.look_up[(-(-hidden // block) * len(token_ids),)](
            token_ids, table, out, first, len(table), hidden, BLOCK=block, num_warps=4
        )
    return out


@dataclass(frozen=True)
class HeadNorm:
    """RMSNorm of each query and key head. Weights: [head_dim]."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Pages:
    """A layer's cache, [blocks, block_size, KV heads, head_dim] each, and where a step's tokens are in it."""

    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    query_offsets: torch.Tensor
    context_lengths: torch.Tensor


def rotate_and_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    pages: Pages,
    *,
    norm: HeadNorm | None = None,
) -> None:
    """Turn (and norm) the query and key heads of qkv, [tokens, (Q + 2K) * D], in place; write keys and values to the
    cache, at no place where a slot is negative.

    tables: cos and sin, float32 [positions, D / 2].
    """
    cos, sin = tables
    kv_heads, size = pages.keys.shape[-2:]
    tokens, heads = len(qkv), qkv.shape[1] // size - 2 * kv_heads
    _check_contiguous(qkv=qkv, keys=pages.keys, values=pages.values, slots=pages.slots, positions=positions)
    if tokens:
        gpu.rotate_and_cache[(tokens,)](
            qkv, positions, pages.slots, cos, sin,
            qkv if norm is None else norm.query, qkv if norm is None else norm.key, 0.0 if norm is None else norm.eps,
            pages.keys, pages.values,
            QUERY_HEADS=heads, KV_HEADS=kv_heads, HALF=size // 2, HEADS_BLOCK=power_of_two(heads),
            KV_BLOCK=power_of_two(kv_heads), HALF_BLOCK=power_of_two(size // 2), NORM=norm is not None, num_warps=4,
        )  # fmt: skip


def _check_contiguous(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()} for {list(tensor.shape)}")
