"""A matrix of weights and its bias: what attention and MLP are made of."""

import torch
from torch import nn
from torch.nn import functional as F


class Projection(nn.Module):
    """x @ weight.T + bias. weight: [outputs, inputs]; bias: [outputs] or None. Uninitialised until loaded."""

    bias: nn.Parameter | None

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype, device: str = "cpu") -> None:
        super().__init__()
        weight = torch.empty(outputs, inputs, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(weight.new_empty(outputs), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[tokens, inputs] to [tokens, outputs], into `out` where given; `out` may not be the memory of x."""
        if out is None:
            return F.linear(x, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)
