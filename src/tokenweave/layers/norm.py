"""RMSNorm: the weight and epsilon that a collective's fused operation takes."""

import torch
from torch import nn

from tokenweave.layers.norm_autograd import rms_norm
from tokenweave.layers.pieces import Piece, Pieces


class RMSNorm(nn.Module):
    """x * rsqrt(mean(x²) + eps) * weight, computed in float32 and rounded before the weight as Llama does.

    weight: [hidden].
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: str = "cpu") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            return rms_norm(x, self.weight, self.eps)
        wide = x.float()
        scaled = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return (self.weight.float() * scaled).to(x.dtype)

    def pieces(self, name: str) -> Pieces:
        yield Piece(f"{name}.weight", tuple(self.weight.shape), self.weight.data)
