"""Tiny models on a GPU and their like on the CPU, and a group of one rank in this process."""

from types import SimpleNamespace
from typing import Any

import torch

from tokenweave.config import ModelConfig, shard
from tokenweave.layers.cache import KVCache
from tokenweave.layers.residual import add_rms_norm
from tokenweave.models.decoder import Decoder
from tokenweave.models.random_weights import randomise

CONFIG = dict(
    architecture="LlamaForCausalLM", vocab_size=97, hidden_size=64, intermediate_size=72, num_hidden_layers=2,
    num_attention_heads=6, num_key_value_heads=2, head_dim=16, max_position_embeddings=4096,
)  # fmt: skip


class Alone:
    """The collective of a group of one rank."""

    copies = 0

    def __init__(self, tokens: int, hidden: int, dtype: torch.dtype, device: str) -> None:
        self._lanes = [torch.full((tokens, hidden), float("nan"), dtype=dtype, device=device) for _ in range(2)]

    def buffer(self, lane: int, tokens: int) -> torch.Tensor:
        return self._lanes[lane][:tokens]

    def all_reduce_add_rms_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, lane: int = 0,
        budget: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        norm = SimpleNamespace(weight=weight, eps=eps)
        return add_rms_norm(partial, residual, norm)  # type: ignore[arg-type]

    def all_reduce(self, partial: torch.Tensor, *, lane: int = 0) -> torch.Tensor:
        return partial

    def reduce_scatter(self, partial: torch.Tensor, *, lane: int = 0) -> torch.Tensor:
        return partial.clone()

    def all_gather(self, rows: torch.Tensor, tokens: int, *, lane: int = 0) -> torch.Tensor:
        return self.buffer(lane, tokens).copy_(rows)

    def barrier(self, *, lane: int = 0) -> None:
        pass

    def check(self) -> None:
        pass


def pair(dtype: torch.dtype, **changes: Any) -> tuple[Decoder, Decoder]:
    """The model on the GPU, and one of the same weights in float32 on the CPU."""
    config = ModelConfig(**CONFIG | changes)  # type: ignore[arg-type]
    ours = Decoder(config, shard(config, 1, 0), dtype=dtype, device="cuda")
    randomise(ours)
    theirs = Decoder(config, shard(config, 1, 0), dtype=torch.float32)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        other.data.copy_(mine.float())
    return ours, theirs


def caches(ours: Decoder, blocks: int, block_size: int) -> tuple[KVCache, KVCache]:
    config = ours.config
    shape = (config.num_hidden_layers, blocks, block_size, config.num_key_value_heads, config.head_dim)
    return KVCache.zeros(*shape, ours.dtype, "cuda"), KVCache.zeros(*shape, torch.float32)
