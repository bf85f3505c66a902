"""Weights of a model that is trained from scratch, the same whatever the number of ranks."""

import zlib

import torch

from tokenweave.models.decoder import Decoder
from tokenweave.train.parts import Part

DEVIATION = 0.02


def initialize(parts: list[Part], model: Decoder, seed: int) -> None:
    """Matrices normal with deviation 0.02, those that end a block less by sqrt(2 * layers), so that the residual does
    not grow with depth (GPT-2's rule, section 2.3 of its paper); norms 1, biases 0.

    Each whole tensor is drawn from a seed of its own name, and the rank keeps its part.
    """
    deep = (2 * model.config.num_hidden_layers) ** -0.5
    for part in parts:
        piece = part.piece
        if len(piece.shape) == 1:
            piece.target.fill_(0.0 if piece.name.endswith("bias") else 1.0)
            continue
        draw = torch.Generator().manual_seed(zlib.crc32(f"{seed} {piece.name}".encode()))
        ends = piece.name.endswith(("o_proj.weight", "down_proj.weight"))
        whole = torch.randn(piece.shape, generator=draw).mul_(DEVIATION * (deep if ends else 1.0))
        piece.target.copy_(
            whole if piece.part is None else whole.narrow(piece.dim, piece.part.start, piece.target.shape[piece.dim])
        )
