"""A matrix of weights and its bias: what attention and MLP are made of."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tokenweave.layers import cublas_lt
from tokenweave.layers.kernels.views import View, empty
from tokenweave.layers.paths import uses_kernels


class Projection(nn.Module):
    """x @ weight.T + bias. weight: [outputs, inputs]; bias: [outputs] or None. Uninitialised until loaded."""

    bias: nn.Parameter | None

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype, device: str = "cpu") -> None:
        super().__init__()
        weight = torch.empty(outputs, inputs, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        bias_parameter = nn.Parameter(weight.new_empty(outputs), requires_grad=False) if bias else None
        self.register_parameter("bias", bias_parameter)
        self._weight_view, self._bias_view, self._no_bias = View(), View(), empty(dtype)

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None, processors: int = 0) -> torch.Tensor:
        """[tokens, inputs] to [tokens, outputs], into `out` where given; `out` may not be the memory of x.

        processors: of the GPU's, that the product should count on; 0 is all, and torch's choice.
        """
        if processors:
            out = x.new_empty(len(x), len(self.weight)) if out is None else out
            return cublas_lt.linear(x, self.weight, self.bias, out, processors)
        if out is None:
            return F.linear(x, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)

    def fits_kernels(self, x: torch.Tensor, out: torch.Tensor | None) -> bool:
        weight = self._parameters["weight"]  # as an attribute it takes 0.5 µs
        assert weight is not None
        return uses_kernels(weight, x, out)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """weight and bias as the kernels take them."""
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        assert weight is not None
        return self._weight_view.of(weight), self._no_bias if bias is None else self._bias_view.of(bias)
