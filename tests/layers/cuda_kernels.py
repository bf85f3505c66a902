"""Tests of the layers' GPU kernels against float64, run by test_cuda.py: on a GPU, or on CPU memory in a process in
which Triton interprets them."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the GPU kernels need Triton")

from tokenweave.layers import cuda  # noqa: E402
from tokenweave.layers.cuda import HeadNorm, Pages  # noqa: E402
from tokenweave.layers.cuda_attention import Tiles, attend_pages, choose_tiles  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# the interpreter cuts bfloat16 off where the GPU rounds it
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-7 if INTERPRETED else 2**-8, torch.float16: 2**-11}


if INTERPRETED:  # NumPy 2.4 makes no number of an array of one, as the interpreter's scalars are, where loops want one
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_with_index(tensor: Any, scope: Any) -> None:
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_with_index


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    torch.set_default_device("cpu" if INTERPRETED else "cuda")
    yield
    torch.set_default_device("cpu")


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, *, ulps: float = 1.0) -> None:
    """Within so many roundings of each number, and of 1e-3 near zero."""
    limit = ulps * ROUNDING[dtype] * expected.abs().clamp_min(1e-3 if dtype != torch.float32 else 1.0)
    worst = ((found.double() - expected).abs() / limit).max().item() if found.numel() else 0.0
    assert worst <= 1.0, worst


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "columns"), [(0, 8), (1, 1), (3, 13), (2, 577), (5, 1100)])
def test_silu_multiply(dtype: torch.dtype, tokens: int, columns: int) -> None:
    wide = (3 * torch.randn(tokens, 2 * columns)).to(dtype)
    gate, up = wide.double().chunk(2, dim=1)
    close(cuda.silu_multiply(wide), gate / (1 + (-gate).exp()) * up, dtype, ulps=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide_weight", [False, True])
@pytest.mark.parametrize(("rows", "hidden"), [(0, 8), (1, 1), (3, 13), (2, 577), (2, 4096)])
def test_add_rms_norm(dtype: torch.dtype, wide_weight: bool, rows: int, hidden: int) -> None:
    x, residual = torch.randn(rows, hidden).to(dtype), torch.randn(rows, hidden).to(dtype)
    weight = torch.rand(hidden) + 0.5
    weight = weight if wide_weight else weight.to(dtype)
    y = (x.float() + residual.float()).to(dtype)
    found = cuda.add_rms_norm(x, residual, weight, 1e-5)
    assert found is x
    if dtype == torch.bfloat16 and INTERPRETED:
        close(residual, y.double(), dtype)
    else:
        assert residual.equal(y)
    y = residual.double()  # of a y that is cut off, the norm is of that one
    scaled = y / (y.square().mean(1, keepdim=True) + 1e-5).sqrt()
    close(x, scaled * weight.double(), dtype, ulps=2)
    if dtype == torch.float16 and x.numel() > 1000:
        # rounded before the weight: but for a scaled number near a tie, to the last bit
        exact = (scaled.to(dtype).float() * weight.float()).to(dtype)
        assert (x == exact).float().mean() > 0.98


def test_add_rms_norm_lets_nan_and_infinity_through() -> None:
    x = torch.tensor([[1.0, float("nan")], [1.0, 2.0], [float("inf"), 1.0]])
    cuda.add_rms_norm(x, torch.zeros(3, 2), torch.ones(2), 1e-5)
    assert x[0].isnan().all() and x[1].isfinite().all() and x[2].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "tokens"), [(8, 0), (1, 1), (13, 7), (2100, 3)])
def test_look_up(dtype: torch.dtype, hidden: int, tokens: int) -> None:
    table, ids = torch.randn(10, hidden).to(dtype), torch.randint(0, 40, (tokens,))
    out = torch.full((tokens, hidden), float("nan"), dtype=dtype)
    cuda.look_up(ids, table, 20, out)
    for token, row in zip(ids.tolist(), out, strict=True):
        assert row.equal(table[token - 20] if 20 <= token < 30 else torch.zeros(hidden, dtype=dtype))


class Requests:
    """Requests with a past in a paged cache of random content, and the new tokens of a step."""

    def __init__(
        self, counts: list[int], contexts: list[int], *, kv_heads: int, size: int, dtype: torch.dtype,
        block_size: int = 4,
    ) -> None:  # fmt: skip
        self.block_size, blocks = block_size, 40
        self.counts, self.contexts = counts, contexts
        self.keys, self.values = (torch.randn(blocks, self.block_size, kv_heads, size).to(dtype) for _ in range(2))
        order, width = torch.randperm(blocks, dtype=torch.int32), -(-max(contexts) // self.block_size)
        self.tables = torch.zeros(len(counts), width + 1, dtype=torch.int32)[:, :width]  # a stride of its own
        used = 0
        for i, context in enumerate(contexts):
            need = -(-context // self.block_size)
            self.tables[i, :need] = order[used : used + need]
            used += need
        self.positions = torch.tensor([p for n, c in zip(counts, contexts, strict=True) for p in range(c - n, c)])
        self.slots = torch.tensor(
            [self.slot(i, p) for i, (n, c) in enumerate(zip(counts, contexts, strict=True)) for p in range(c - n, c)]
        )
        self.offsets = torch.tensor([0, *counts]).cumsum(0).int()
        self.starts = torch.tensor([0, *contexts]).cumsum(0).int()

    def slot(self, request: int, position: int) -> int:
        block = int(self.tables[request, position // self.block_size])
        return block * self.block_size + position % self.block_size

    def pages(self) -> Pages:
        contexts = torch.tensor(self.contexts, dtype=torch.int32)
        return Pages(self.keys, self.values, self.slots, self.tables, self.offsets, contexts)


def turned(heads: torch.Tensor, positions: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """float64 [T, heads, D] turned pair by pair, as complex numbers."""
    left, right = heads.chunk(2, dim=-1)
    turned = torch.complex(left, right) * torch.polar(torch.ones_like(angles), angles)[positions].unsqueeze(1)
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("counts", "contexts", "heads", "kv_heads", "size", "normed"),
    [
        ([1], [1], 1, 1, 8, False),
        ([3, 1, 5], [3, 9, 18], 3, 1, 24, False),
        ([2, 7], [66, 7], 6, 2, 16, True),
        ([1], [149], 2, 1, 8, False),
        ([1, 1, 1], [33, 1, 13], 4, 4, 8, True),
    ],
)
def test_rotate_and_cache(
    dtype: torch.dtype, counts: list[int], contexts: list[int], heads: int,
    kv_heads: int, size: int, normed: bool,
) -> None:  # fmt: skip
    step = Requests(counts, contexts, kv_heads=kv_heads, size=size, dtype=dtype)
    tokens = sum(counts)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size).to(dtype)
    angles = torch.rand(160, size // 2, dtype=torch.float64) * 6
    tables = angles.cos().float(), angles.sin().float()
    norm = HeadNorm(torch.rand(size).to(dtype) + 0.5, torch.rand(size).to(dtype) + 0.5, 1e-5) if normed else None
    before = qkv.double().unflatten(1, (-1, size)), step.keys.clone(), step.values.clone()
    if tokens > 1:
        step.slots[1] = -1  # a padded token: kept nowhere

    cuda.rotate_and_cache(qkv, step.positions, tables, step.pages(), norm=norm)

    queries, keys, values = before[0].split((heads, kv_heads, kv_heads), dim=1)
    if norm is not None:
        queries, keys = (
            (x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()).to(dtype).double() * w.double()
            for x, w in ((queries, norm.query), (keys, norm.key))
        )
    found = qkv.unflatten(1, (-1, size))
    turned_queries, turned_keys = turned(queries, step.positions, angles), turned(keys, step.positions, angles)
    for ours, right, before_turning in (
        (found[:, :heads], turned_queries, queries),
        (found[:, heads : heads + kv_heads], turned_keys, keys),
    ):
        # what cancels in left * cos - right * sin errs by the roundings of its terms
        scale = before_turning.abs().amax(-1, keepdim=True)
        assert ((ours.double() - right).abs() / (scale + 1e-3)).max() <= 4 * ROUNDING[dtype]
    assert found[:, heads + kv_heads :].double().equal(values)

    expected_keys, expected_values = before[1].flatten(0, 1), before[2].flatten(0, 1)
    for token, slot in enumerate(step.slots.tolist()):
        if slot >= 0:
            expected_keys[slot], expected_values[slot] = found[token, heads : heads + kv_heads], values[token].to(dtype)
    assert step.keys.flatten(0, 1).equal(expected_keys) and step.values.flatten(0, 1).equal(expected_values)


ATTENDED = [  # new tokens and contexts of requests, query heads, key/value heads, head size
    ([1], [1], 1, 1, 8),
    ([3, 1, 0, 20, 1], [3, 50, 0, 70, 1], 6, 2, 24),
    ([1, 1, 1], [33, 1, 90], 8, 1, 16),
    ([37], [37], 4, 4, 16),
    ([13], [77], 3, 1, 32),
]


@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("tiles", [Tiles(16, 16), Tiles(16, 16, 32), Tiles(64, 32, 64)])
@pytest.mark.parametrize(("counts", "contexts", "heads", "kv_heads", "size"), ATTENDED)
def test_attend_pages(
    dtype: torch.dtype, window: int | None, tiles: Tiles, counts: list[int], contexts: list[int], heads: int,
    kv_heads: int, size: int,
) -> None:  # fmt: skip
    """Everything in the cache that is no key or value of a request is not a number, and nothing comes of it."""
    step = Requests(counts, contexts, kv_heads=kv_heads, size=size, dtype=dtype, block_size=32)
    queries = torch.randn(sum(counts), heads * size + 8).to(dtype)[:, : heads * size]  # rows with a gap
    cached = [[step.slot(i, p) for p in range(context)] for i, context in enumerate(contexts)]
    nobodys = torch.ones(len(step.keys) * step.block_size, dtype=torch.bool)
    nobodys[[slot for slots in cached for slot in slots]] = False
    for memory in (step.keys, step.values):
        memory.flatten(0, 1)[nobodys] = float("nan")

    found = attend_pages(queries, step.pages(), step.positions, max(contexts), tiles, window=window)

    owners = [i for i, count in enumerate(counts) for _ in range(count)]
    limit = 4 * ROUNDING[dtype]  # weights and result are rounded
    for token, (request, position) in enumerate(zip(owners, step.positions.tolist(), strict=True)):
        first = 0 if window is None else max(position - window + 1, 0)
        slots = cached[request][first : position + 1]
        keys, values = (memory.flatten(0, 1)[slots].double() for memory in (step.keys, step.values))
        query = queries[token].double().view(kv_heads, heads // kv_heads, size)
        weights = (torch.einsum("kgd,skd->kgs", query, keys) / size**0.5).softmax(-1)
        expected = torch.einsum("kgs,skd->kgd", weights, values).flatten()
        error = (found[token].double() - expected).abs().max() / values.abs().max()
        assert error <= limit, (token, float(error))


def test_tiles_fit_what_they_are_for() -> None:
    common = dict(heads=(8, 1), size=128, block_size=256, processors=132)
    whole = choose_tiles(8192, 1, 8192, single=False, **common)
    assert whole.rows == 64 and not whole.share
    assert choose_tiles(16384, 1, 32768, single=False, **common).rows == 128
    lane = choose_tiles(512, 1, 1024, single=False, **common)  # 64 tiles: too few for 132 processors
    assert 256 <= lane.share < 1024 and lane.share % lane.keys == 0
    decodes = choose_tiles(16, 16, 2048, single=True, **common)
    assert decodes.rows == 16 and decodes.shares(2048) == 8
    assert not choose_tiles(228, 228, 2048, single=True, **common).share
    assert not choose_tiles(1, 1, 1, single=True, **common).share
    assert choose_tiles(64, 1, 64, single=False, **common | dict(block_size=48)).keys == 16
    assert choose_tiles(4, 4, 600, single=True, **common | dict(size=256)).keys == 64


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="wide must be contiguous"):
        cuda.silu_multiply(torch.zeros(4, 8).t())
    with pytest.raises(ValueError, match="do not fit"):
        cuda.add_rms_norm(torch.zeros(2, 8), torch.zeros(3, 8), torch.zeros(8), 1e-5)
    with pytest.raises(ValueError, match="at most 65536, got 65537"):
        cuda.add_rms_norm(torch.zeros(1, 65537), torch.zeros(1, 65537), torch.zeros(65537), 1e-5)
    step = Requests([1], [1], kv_heads=1, size=8, dtype=torch.float16, block_size=8)
    with pytest.raises(ValueError, match="whole tiles of 16 keys"):
        attend_pages(torch.zeros(1, 8, dtype=torch.float16), step.pages(), step.positions, 1, Tiles(16, 16))
    step = Requests([1], [50], kv_heads=1, size=8, dtype=torch.float16, block_size=32)
    with pytest.raises(ValueError, match="shares whole tiles of 16 keys"):
        attend_pages(torch.zeros(1, 8, dtype=torch.float16), step.pages(), step.positions, 50, Tiles(16, 16, 40))
