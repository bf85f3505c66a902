"""The one decoder: blocks flattened to a stage list."""

from dataclasses import replace

import torch
from torch import nn

from tokenweave.config import ModelConfig, Shard
from tokenweave.config.families import FAMILIES
from tokenweave.layers.attention import Attention
from tokenweave.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from tokenweave.layers.experts import Experts
from tokenweave.layers.mlp import MLP
from tokenweave.layers.norm import RMSNorm
from tokenweave.layers.pieces import Pieces
from tokenweave.layers.rotary import Rope
from tokenweave.models.stage import Stage


class Block(nn.Module):
    """One layer: attention and MLP, each with the norm in front of it."""

    def __init__(
        self, config: ModelConfig, shard: Shard, layer: int, rope: Rope, *, dtype: torch.dtype, device: str
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.self_attn = Attention(config, shard, layer, rope, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        kind = MLP if config.layer_experts(layer) is None else Experts
        self.mlp = kind(config, shard, dtype=dtype, device=device)


class Decoder(nn.Module):
    """One rank's part of a decoder-only model, as stages that executors run.

    Parameters are uninitialised until `models.loading` fills them.
    """

    def __init__(self, config: ModelConfig, shard: Shard, *, dtype: torch.dtype, device: str = "cpu") -> None:
        super().__init__()
        self.config, self.shard, self.dtype, self.device = config, shard, dtype, device
        rope = Rope(config, device=device)
        self.embed_tokens = VocabParallelEmbedding(config, shard, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            Block(config, shard, layer, rope, dtype=dtype, device=device) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.lm_head = VocabParallelHead(self.embed_tokens, tied=config.tie_word_embeddings)
        self.stages = self._flatten()

    @property
    def blocks(self) -> list[Block]:
        return list(self.layers)  # type: ignore[arg-type]

    def _flatten(self) -> list[Stage]:
        """embed | layers.0.attention | layers.0.mlp | ...; a stage's norm is the one in front of what follows it."""
        fronts = [block.input_layernorm for block in self.blocks] + [self.norm]
        stages = [Stage("embed", self.embed_tokens, fronts[0])]
        for index, block in enumerate(self.blocks):
            stages.append(Stage(f"layers.{index}.attention", block.self_attn, block.post_attention_layernorm))
            stages.append(Stage(f"layers.{index}.mlp", block.mlp, fronts[index + 1]))
        return stages

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, hidden] normed rows to this rank's slice of the logits, [n, own vocabulary rows]."""
        return self.lm_head(rows)

    def pieces(self) -> Pieces:
        """Every part of every checkpoint tensor that this rank holds, by the family's names."""
        family = FAMILIES.get(self.config.architecture)
        for piece in self._pieces():
            yield piece if family is None else replace(piece, name=family.tensor_name(piece.name))

    def _pieces(self) -> Pieces:
        yield from self.embed_tokens.pieces("model.embed_tokens")
        for index, block in enumerate(self.blocks):
            prefix = f"model.layers.{index}"
            yield from block.input_layernorm.pieces(f"{prefix}.input_layernorm")
            yield from block.self_attn.pieces(f"{prefix}.self_attn")
            yield from block.post_attention_layernorm.pieces(f"{prefix}.post_attention_layernorm")
            yield from block.mlp.pieces(f"{prefix}.mlp")
        yield from self.norm.pieces("model.norm")
        yield from self.lm_head.pieces("lm_head")
