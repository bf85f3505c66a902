"""Attention itself at sizes no layer test reaches; what the layers do with it is tests/layers/test_attention.py."""

import pytest
import torch
from kernel_cases import DTYPES, ROUNDING, edges_untouched, guarded

from tokenweave.layers.kernels.attention import ROWS, WHOLE_CONTEXT, attend_rows
from tokenweave.layers.kernels.views import as_array, empty


def run(dtype: torch.dtype, *, new: int, context: int, block_size: int, heads: int, kv_heads: int, size: int,
        scale: float = 1.0, window: int = WHOLE_CONTEXT) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(kernel's result, oracle in float64), no rotation: all positions are 0."""
    qkv = (torch.randn(new, (heads + 2 * kv_heads) * size) * scale).to(dtype)
    blocks = -(-context // block_size)
    table = torch.randperm(blocks + 1)[:blocks]
    keys, values = (torch.full((blocks + 1, block_size, kv_heads, size), float("nan"), dtype=dtype) for _ in range(2))
    slots = (table.unsqueeze(1) * block_size + torch.arange(block_size)).flatten()[:context]
    for side in (keys, values):
        side.flatten(0, 1)[slots[: context - new]] = (torch.randn(context - new, kv_heads, size) * scale).to(dtype)
    queries, new_keys, new_values = qkv.split((heads * size, kv_heads * size, kv_heads * size), 1)
    exact_queries = queries.clone().view(new, heads, size).double()
    out, whole = guarded(dtype, new, heads * size)
    rotation = (torch.ones(1, size // 2).numpy(), torch.zeros(1, size // 2).numpy())
    step = (torch.zeros(new, dtype=torch.int64), torch.tensor([0, new], dtype=torch.int32),
            torch.tensor([context], dtype=torch.int32), slots[context - new :], table.int().unsqueeze(0))  # fmt: skip
    attend_rows(qkv.data_ptr(), out.data_ptr(), new, heads, (empty(dtype), empty(dtype), 1e-5), rotation,
                (as_array(keys), as_array(values)), tuple(tensor.contiguous().numpy() for tensor in step),
                window)  # fmt: skip
    assert edges_untouched(whole)
    cached_keys, cached_values = keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots]
    assert torch.equal(cached_keys[context - new :].flatten(1), new_keys)
    assert torch.equal(cached_values[context - new :].flatten(1), new_values)
    exact = [side.double().repeat_interleave(heads // kv_heads, 1) for side in (cached_keys, cached_values)]
    scores = torch.einsum("thd,shd->hts", exact_queries, exact[0]) / size**0.5
    back = torch.arange(context - new, context).unsqueeze(1) - torch.arange(context)
    weights = scores.masked_fill((back < 0) | (back >= window), float("-inf")).softmax(-1)
    return out, torch.einsum("hts,shd->thd", weights, exact[1]).flatten(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 16, 18, 64, 66, 80, 128, 256])
def test_head_sizes(size: int, dtype: torch.dtype) -> None:
    out, oracle = run(dtype, new=3, context=35, block_size=16, heads=6, kv_heads=2, size=size)
    assert (out.double() - oracle).abs().max() < (ROUNDING[dtype] + 1e-6) * oracle.abs().max()


@pytest.mark.parametrize("new", [1, 2, ROWS - 1, ROWS, ROWS + 1, 77])
@pytest.mark.parametrize("context", [77, 78, 80, 95, 96, 97, 577])
def test_contexts_over_many_blocks(context: int, new: int) -> None:
    for block_size in (1, 2, 5, 16, 64):
        out, oracle = run(torch.float32, new=new, context=context, block_size=block_size, heads=3, kv_heads=1, size=8)
        assert (out.double() - oracle).abs().max() < 2e-6 * oracle.abs().max()


@pytest.mark.parametrize("context", range(1, 36))
def test_every_short_context(context: int) -> None:
    for new in range(1, context + 1):
        out, oracle = run(torch.float32, new=new, context=context, block_size=3, heads=2, kv_heads=2, size=4)
        assert (out.double() - oracle).abs().max() < 2e-6 * oracle.abs().max()


@pytest.mark.parametrize("window", [1, 2, 3, 13, 16, 33, 34, 577])
def test_windows(window: int) -> None:
    for new, context, block_size, heads in ((1, 33, 5, 3), (33, 33, 1, 2), (20, 97, 16, 3), (ROWS + 1, 50, 3, 1)):
        out, oracle = run(torch.float32, new=new, context=context, block_size=block_size, heads=heads, kv_heads=1,
                          size=8, window=window)  # fmt: skip
        assert (out.double() - oracle).abs().max() < 2e-6 * oracle.abs().max()


def test_large_scores_do_not_overflow() -> None:
    out, oracle = run(torch.float32, new=4, context=40, block_size=16, heads=2, kv_heads=1, size=64, scale=30.0)
    assert (out.double() - oracle).abs().max() < 1e-3 * oracle.abs().max()


def test_many_queries_of_one_key_head() -> None:
    out, oracle = run(torch.float32, new=2, context=20, block_size=16, heads=37, kv_heads=1, size=16)
    assert (out.double() - oracle).abs().max() < 2e-6 * oracle.abs().max()


@pytest.mark.parametrize("size", [16, 64, 80, 128])
@pytest.mark.parametrize("new, context", [(16, 16), (17, 18), (33, 33), (50, 97), (77, 160), (64, 577)])
def test_many_bfloat16_queries(new: int, context: int, size: int) -> None:
    """Their weights are rounded to bfloat16, by 4e-3 of each at most, as in torch's own."""
    for heads, kv_heads, block_size, window in (
        (6, 2, 16, WHOLE_CONTEXT), (3, 3, 5, 7), (4, 1, 1, 1), (8, 2, 64, 40), (5, 1, 3, context), (7, 1, 16, 33),
    ):  # fmt: skip
        out, oracle = run(torch.bfloat16, new=new, context=context, block_size=block_size, heads=heads,
                          kv_heads=kv_heads, size=size, window=window)  # fmt: skip
        assert (out.double() - oracle).abs().max() < 1.5 * ROUNDING[torch.bfloat16] * oracle.abs().max()
