"""What stands between an MLP's two matrices."""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

from tokenweave.layers.paths import uses_gpu_kernels

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def activate(wide: torch.Tensor, activation: str, *, gated: bool) -> torch.Tensor:
    """activation(left half) * right half of wide, [tokens, 2 * columns], if gated, else activation(wide)."""
    if not gated:
        return ACTIVATIONS[activation](wide)
    if activation == "silu" and uses_gpu_kernels(wide):
        from tokenweave.layers.cuda import silu_multiply

        return silu_multiply(wide)
    gate, up = wide.chunk(2, dim=1)
    return ACTIVATIONS[activation](gate) * up
