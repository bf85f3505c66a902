"""RMSNorm with a gradient that keeps its input and one number a row, not the five tensors that autograd would."""

from typing import Any, cast

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x * rsqrt(mean(x²) + eps) * weight over the last dimension, as `RMSNorm.forward` rounds it.

    x: [..., size] of any float type, computed in float32 where it is narrower. weight: [size], of x's type or float32.
    """
    return cast(torch.Tensor, _RMSNorm.apply(x, weight, eps))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = _wide(x)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (_wide(weight) * (wide * scale).to(x.dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        grad = _wide(grads[0])
        unit = _wide(x) * scale
        grad_weight = (grad * unit).flatten(0, -2).sum(0).to(weight.dtype)
        weighted = grad * weight
        grad_x = scale * (weighted - unit * (weighted * unit).mean(-1, keepdim=True))
        return grad_x.to(x.dtype), grad_weight, None


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()
