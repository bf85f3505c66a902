"""Rotary position embedding (Su et al., arXiv 2104.09864, section 3.4.2), rotating the two halves of a head."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from tokenweave.config import ModelConfig, RopeConfig
from tokenweave.layers.batch import Batch

FIRST_POSITIONS = 2048  # a table of 2048 positions is built in 1 ms; longer contexts grow it


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of dimensions, float32 [head_dim // 2]; of "dynamic", up to its own context.

    In the float32 operations of the published models: at position 8000 one bit of a frequency is 5e-4 radians.
    """
    frequencies = 1.0 / (rope.theta ** _exponents(head_dim))
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, head_dim)
    return frequencies


def dynamic_frequencies(rope: RopeConfig, head_dim: int, lengths: torch.Tensor) -> torch.Tensor:
    """The same for each of n requests' total lengths, int64 [n]: float32 [n, head_dim // 2].

    Beyond the original context the base grows so that the longest wave fits (NTK-aware interpolation, dynamic by
    length).
    """
    original = rope.original_max_position_embeddings
    stretch = rope.factor * lengths.clamp(min=original).float() / original - (rope.factor - 1)
    bases = rope.theta * stretch ** (head_dim / (head_dim - 2))
    return 1.0 / (bases.unsqueeze(1) ** _exponents(head_dim, lengths.device))


def _exponents(head_dim: int, device: torch.device | None = None) -> torch.Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    context = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    kept = (context / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - kept) * frequencies / rope.factor + kept * frequencies
    long = wavelengths > context / rope.low_freq_factor
    short = wavelengths < context / rope.high_freq_factor
    return torch.where(long, frequencies / rope.factor, torch.where(short, frequencies, blended))


def _yarn(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """The same with a ramp over the dimensions ("NTK-by-parts", arXiv 2309.00071, section 3.2)."""

    def dimension(turns: float) -> float:
        """The one whose wave turns so often over the original context."""
        return (
            head_dim
            * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    kept = 1 - ((torch.arange(head_dim // 2).float() - low) / width).clamp(0, 1)
    powers = rope.theta ** _exponents(head_dim)
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept


@dataclass(frozen=True)
class Rotation:
    """cos and sin, float32 [n, head_dim // 2], of n angles, and rows, int64 [T], the angle of each new token."""

    cos: torch.Tensor
    sin: torch.Tensor
    rows: torch.Tensor

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        """x, [T, heads, head_dim], turned to its positions; computed in float32 and rounded once."""
        cos, sin = self.cos[self.rows].unsqueeze(1), self.sin[self.rows].unsqueeze(1)
        left, right = x.float().chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class Rope:
    """cos and sin of every position, float32 [positions, head_dim // 2]; one for all layers, grown as contexts grow.

    Of kind "dynamic" the angle depends on the request's total length too: of all its prompt, or up to the token itself
    where that is longer. So a key is the same whether its prompt came whole, in chunks or cut into lanes.
    """

    def __init__(self, config: ModelConfig, *, device: str = "cpu") -> None:
        self.limit = config.max_position_embeddings
        self.config, self.head_dim = config.rope, config.head_dim
        self.dynamic = config.rope.kind == "dynamic"
        self.frequencies = inverse_frequencies(config.rope, config.head_dim)
        self.device = device
        self.cos = self.sin = torch.empty(0, config.head_dim // 2, device=device)
        self._turns: list[tuple[Batch, Rotation]] = []  # of the latest batches: every layer asks for them
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

    def rotation(self, batch: Batch) -> Rotation:
        """The angles of the batch's tokens. Call `reserve` first."""
        if not self.dynamic:
            return Rotation(self.cos, self.sin, batch.positions)
        for known, rotation in self._turns:
            if known is batch:
                return rotation
        inverse = dynamic_frequencies(self.config, self.head_dim, batch.total_lengths)
        cos, sin = self._tables(batch.positions.float().unsqueeze(1) * inverse)
        rotation = Rotation(cos, sin, torch.arange(len(cos), device=cos.device))
        self._turns = [(batch, rotation), *self._turns[:1]]  # one for each lane
        return rotation

    def _tables(self, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return angles.cos() * self.config.attention_factor, angles.sin() * self.config.attention_factor

    def _grow(self, positions: int) -> None:
        cos, sin = self._tables(torch.arange(positions).float().unsqueeze(1) * self.frequencies)
        self.cos, self.sin = cos.to(self.device), sin.to(self.device)
        self.arrays: tuple[np.ndarray, np.ndarray] = (cos.numpy(), sin.numpy())  # for the CPU kernels
