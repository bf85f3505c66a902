"""Rotary position embedding (Su et al., arXiv 2104.09864, section 3.4.2), rotating the two halves of a head."""

import math

import torch

from tokenweave.config import ModelConfig, RopeConfig
from tokenweave.layers.batch import Batch

FIRST_POSITIONS = 2048  # a table of 2048 positions is built in 1 ms; longer contexts grow it


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of dimensions, float32 [head_dim // 2].

    In the float32 operations of the published models: at position 8000 one bit of a frequency is 5e-4 radians.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return frequencies
    # llama3: long waves are stretched by `factor`, short ones kept, those between blended
    context = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    kept = (context / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - kept) * frequencies / rope.factor + kept * frequencies
    long = wavelengths > context / rope.low_freq_factor
    short = wavelengths < context / rope.high_freq_factor
    return torch.where(long, frequencies / rope.factor, torch.where(short, frequencies, blended))


class Rope:
    """cos and sin of every position, float32 [positions, head_dim // 2]; one for all layers, grown as contexts grow."""

    def __init__(self, config: ModelConfig, *, device: str = "cpu") -> None:
        self.limit = config.max_position_embeddings
        self.frequencies = inverse_frequencies(config.rope, config.head_dim)
        self.device = device
        self.cos = self.sin = torch.empty(0, config.head_dim // 2, device=device)
        # captured steps read these tables where they are: on a GPU they never move
        self._grow(min(FIRST_POSITIONS, self.limit) if device == "cpu" else self.limit)

    def reserve(self, batch: Batch) -> None:
        """Make the tables reach every position of `batch`. Raises ValueError if the model's context does not."""
        needed = batch.max_context_length
        if needed <= self.cos.shape[0]:
            return
        if needed > self.limit:
            raise ValueError(f"a context of {needed} tokens is longer than the model's {self.limit}")
        self._grow(min(max(needed, 2 * self.cos.shape[0]), self.limit))

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x, [tokens, heads, head_dim], turned by its positions, [tokens]; computed in float32 and rounded once."""
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        left, right = x.float().chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)

    def _grow(self, positions: int) -> None:
        angles = torch.arange(positions).float().unsqueeze(1) * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        self.cos, self.sin = cos.to(self.device), sin.to(self.device)
        self.arrays = (cos.numpy(), sin.numpy())  # for the CPU kernels
