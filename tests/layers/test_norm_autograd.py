"""RMSNorm's gradient: gradcheck, autograd's own in float64, and narrow types."""

import pytest
import torch
from torch.autograd import gradcheck

from tokenweave.layers.norm import RMSNorm
from tokenweave.layers.norm_autograd import rms_norm


def plain(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (3, 5), (2, 3, 4)])
def test_gradcheck(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(shape[-1], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (x, weight))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_the_module_uses_it(dtype: torch.dtype, tolerance: float) -> None:
    norm = RMSNorm(33, 1e-5, dtype=dtype)
    norm.weight.requires_grad_()
    norm.weight.data.uniform_(0.5, 1.5)
    x = torch.randn(13, 33).to(dtype).requires_grad_()
    grad = torch.randn(13, 33).to(dtype)
    with torch.inference_mode():
        expected = norm(x)
    found = norm(x)
    assert torch.equal(found, expected)
    wide, wide_weight = (t.detach().double().requires_grad_() for t in (x, norm.weight))
    oracle = torch.autograd.grad(plain(wide, wide_weight, 1e-5), (wide, wide_weight), grad.double())
    for one, other in zip(torch.autograd.grad(found, (x, norm.weight), grad), oracle, strict=True):
        assert one.dtype == dtype
        assert float((one.double() - other).norm() / other.norm()) <= tolerance


def test_what_it_keeps() -> None:
    """x, the weight and one number a row."""
    x, weight = torch.randn(13, 64, requires_grad=True), torch.ones(64, requires_grad=True)
    kept = rms_norm(x, weight, 1e-5).grad_fn.saved_tensors
    assert sum(tensor.numel() for tensor in kept) == x.numel() + weight.numel() + 13
