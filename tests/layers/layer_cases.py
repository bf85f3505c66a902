"""Small models, paged batches and float64 oracles of the layer tests. Nothing here calls the layers' own arithmetic."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tokenweave.config import ModelConfig
from tokenweave.layers.batch import Batch
from tokenweave.layers.cache import KVCache
from tokenweave.layers.pieces import Piece

BASE: dict[str, Any] = dict(
    architecture="x", vocab_size=31, hidden_size=20, intermediate_size=13, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, head_dim=6, max_position_embeddings=1024,
)  # fmt: skip
EVERYTHING = ModelConfig(**BASE, qk_norm=True, qkv_bias=True, output_bias=True, mlp_bias=True)
TINY = ModelConfig(**BASE | dict(hidden_size=8, num_attention_heads=4, num_key_value_heads=2, head_dim=2))
DEMO = ModelConfig(**BASE | dict(hidden_size=33, num_attention_heads=9, num_key_value_heads=3, head_dim=64))
ONE_KV = ModelConfig(
    **BASE | dict(hidden_size=64, num_attention_heads=5, num_key_value_heads=1, head_dim=80, qk_norm=True)
)
WINDOW = ModelConfig(**BASE, windows=(3, 9))
CONFIGS = {"window": WINDOW, "everything": EVERYTHING, "tiny": TINY, "demo": DEMO, "one kv head": ONE_KV}
HALF_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 2e-3}


def tensors(config: ModelConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """One layer's checkpoint tensors by the end of their names, rounded to dtype."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    hidden, wide, size = config.hidden_size, config.intermediate_size, config.head_dim
    queries, kv = config.num_attention_heads * size, config.num_key_value_heads * size
    found = {}
    for name, outputs, inputs, bias in (
        ("q_proj", queries, hidden, config.qkv_bias),
        ("k_proj", kv, hidden, config.qkv_bias),
        ("v_proj", kv, hidden, config.qkv_bias),
        ("o_proj", hidden, queries, config.output_bias),
        ("gate_proj", wide, hidden, config.mlp_bias),  # for the ungated, one too many
        ("up_proj", wide, hidden, config.mlp_bias),
        ("down_proj", hidden, wide, config.mlp_bias),
    ):
        found[f"{name}.weight"] = random(outputs, inputs, scale=inputs**-0.5)
        if bias:
            found[f"{name}.bias"] = random(outputs)
    if config.qk_norm:
        found["q_norm.weight"], found["k_norm.weight"] = random(size) + 1, random(size) + 1
    return found


def fill(pieces: Iterable[Piece], checkpoint: dict[str, torch.Tensor], prefix: str) -> None:
    """What a loader does: copy each piece's part of its tensor, whose shape must be as the piece says."""
    for piece in pieces:
        whole = checkpoint[piece.name.removeprefix(f"{prefix}.")]
        assert tuple(whole.shape) == piece.shape
        if piece.part is not None:
            whole = whole.narrow(piece.dim, piece.part.start, piece.part.stop - piece.part.start)
        piece.target.copy_(whole)


@dataclass
class Paged:
    """Requests of (new tokens, context) over one cache; every slot that no context covers holds NaN."""

    requests: list[tuple[int, int]]
    block_size: int
    batch: Batch
    slots: list[list[int]]  # of each request's whole context

    def rank(self, kv_heads: slice) -> Batch:
        """The batch with only these KV heads in its cache, a copy."""
        assert self.batch.cache is not None
        sides = (self.batch.cache.keys, self.batch.cache.values)
        return replace(self.batch, cache=KVCache(*(side[..., kv_heads, :].clone() for side in sides)))


def paged(
    config: ModelConfig,
    requests: list[tuple[int, int]],
    *,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Paged:
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-context // block_size) for _, context in requests]
    order = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    tables = torch.full((len(requests), max(counts, default=0)), -1, dtype=torch.int32)
    shape = (2, len(order), block_size, config.num_key_value_heads, config.head_dim)
    cache = KVCache(torch.full(shape, float("nan"), dtype=dtype), torch.full(shape, float("nan"), dtype=dtype))
    slots, new_slots, positions = [], [], []
    for i, (new, context) in enumerate(requests):
        blocks = [order.pop() for _ in range(counts[i])]
        tables[i, : counts[i]] = torch.tensor(blocks)
        own = [blocks[p // block_size] * block_size + p % block_size for p in range(context)]
        slots.append(own)
        past = own[: context - new]
        for side in (cache.keys, cache.values):
            random = torch.randn((2, len(past), *shape[3:]), generator=generator)
            side.flatten(1, 2)[:, past] = random.to(dtype)
        new_slots += own[context - new :]
        positions += range(context - new, context)
    lengths = torch.tensor([new for new, _ in requests], dtype=torch.int32)
    batch = Batch(
        token_ids=torch.randint(config.vocab_size, (len(positions),), generator=generator),
        positions=torch.tensor(positions, dtype=torch.int64),
        query_offsets=torch.cat((torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int())),
        context_lengths=torch.tensor([context for _, context in requests], dtype=torch.int32),
        slot_mapping=torch.tensor(new_slots, dtype=torch.int64),
        block_tables=tables,
        cache=cache,
    )
    return Paged(requests, block_size, batch, slots)


def turned(x: torch.Tensor, positions: list[int], theta: float) -> torch.Tensor:
    """[tokens, heads, size] in float64: dimensions i and i + size/2 as one complex number, times e^(i position w_i)."""
    half = x.shape[-1] // 2
    speeds = torch.tensor([theta ** (-2 * i / x.shape[-1]) for i in range(half)], dtype=torch.float64)
    turns = torch.polar(torch.ones(len(positions), half, dtype=torch.float64),
                        torch.tensor(positions, dtype=torch.float64).unsqueeze(1) * speeds)  # fmt: skip
    z = torch.complex(x[..., :half], x[..., half:]) * turns.unsqueeze(1)
    return torch.cat((z.real, z.imag), -1)


def attention_oracle(
    config: ModelConfig, checkpoint: dict[str, torch.Tensor], x: torch.Tensor, case: Paged, layer: int = 0
) -> torch.Tensor:
    """The unsharded layer in float64, request by request with a mask written out."""
    w = {name: tensor.double() for name, tensor in checkpoint.items()}
    size, group = config.head_dim, config.queries_per_group
    assert case.batch.cache is not None
    sides = (case.batch.cache.keys, case.batch.cache.values)
    past_keys, past_values = (side[layer].flatten(0, 1).double() for side in sides)
    results, start = [], 0
    for (new, context), slots in zip(case.requests, case.slots, strict=True):
        rows = x[start : start + new].double()
        start += new
        heads = {}
        for name in ("q", "k", "v"):
            flat = rows @ w[f"{name}_proj.weight"].T + w.get(f"{name}_proj.bias", 0.0)
            heads[name] = flat.reshape(new, -1, size)
            if config.qk_norm and name != "v":
                mean = (heads[name] ** 2).mean(-1, keepdim=True)
                heads[name] = heads[name] / (mean + config.rms_norm_eps).sqrt() * w[f"{name}_norm.weight"]
        positions = list(range(context - new, context))
        queries = turned(heads["q"], positions, config.rope.theta)
        past = slots[: context - new]
        keys = torch.cat((past_keys[past], turned(heads["k"], positions, config.rope.theta)))
        values = torch.cat((past_values[past], heads["v"]))
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("thd,shd->hts", queries, keys) / size**0.5
        back = torch.tensor(positions).unsqueeze(1) - torch.arange(context)
        unseen = (back < 0) | (back >= (config.windows[layer] or context if config.windows else context))
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        results.append(torch.einsum("hts,shd->thd", weights, values).reshape(new, -1))
    return torch.cat(results) @ w["o_proj.weight"].T + w.get("o_proj.bias", 0.0)


FORMULAS = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
    "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "relu": lambda x: x * (x > 0),
    "relu2": lambda x: x**2 * (x > 0),
}


def mlp_oracle(
    checkpoint: dict[str, torch.Tensor], x: torch.Tensor, activation: str = "silu", gated: bool = True
) -> torch.Tensor:
    w = {name: tensor.double() for name, tensor in checkpoint.items()}
    gate, up = (x.double() @ w[f"{n}_proj.weight"].T + w.get(f"{n}_proj.bias", 0.0) for n in ("gate", "up"))
    formula = FORMULAS[activation]
    inner = formula(gate) * up if gated else formula(up)
    return inner @ w["down_proj.weight"].T + w.get("down_proj.bias", 0.0)


def distance(x: torch.Tensor, oracle: torch.Tensor) -> float:
    """The largest difference, relative to the oracle's largest value."""
    assert x.shape == oracle.shape
    if not x.numel():
        return 0.0
    return ((x.double() - oracle).abs().max() / oracle.abs().max()).item()
