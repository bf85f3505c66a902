"""Add and RMSNorm in place against float64."""

import pytest
import torch

from tokenweave.layers.norm import RMSNorm
from tokenweave.layers.residual import add_rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide_weight", [False, True])
@pytest.mark.parametrize("tokens,hidden", [(0, 64), (1, 1), (1, 577), (3, 16), (13, 576), (33, 4096)])
def test_equals_float64(tokens: int, hidden: int, wide_weight: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens + hidden)
    norm = RMSNorm(hidden, 1e-5, dtype=torch.float32 if wide_weight else dtype)
    norm.weight.data.uniform_(0.5, 1.5)
    rows, residual = torch.randn(tokens, hidden).to(dtype), torch.randn(tokens, hidden).to(dtype)
    total = (rows.float() + residual.float()).to(dtype)
    wide = total.double()
    scaled = (wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt()).to(dtype).double()
    expected = norm.weight.double() * scaled
    found = add_rms_norm(rows, residual, norm)
    assert found.data_ptr() == rows.data_ptr()
    assert torch.equal(residual, total)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[dtype]  # two roundings
    torch.testing.assert_close(found.double(), expected, atol=tolerance / 100, rtol=tolerance)
