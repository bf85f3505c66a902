import pytest
import torch
from layer_cases import distance, fill

from tokenweave.layers.norm import RMSNorm


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 33), (2, 5, 577)])
def test_equals_the_formula(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    norm = RMSNorm(shape[-1], 1e-5, dtype=dtype)
    weight, x = torch.randn(shape[-1]).to(dtype), (torch.randn(shape) * 9).to(dtype)
    fill(norm.pieces("n"), {"weight": weight}, "n")
    exact = x.double()
    oracle = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    result = norm(x)
    assert result.dtype == dtype and distance(result, oracle) < tolerance


def test_a_wide_weight_with_half_rows_gives_no_nan() -> None:
    norm = RMSNorm(8, 1e-5, dtype=torch.float32)
    result = norm(torch.randn(3, 8).bfloat16())
    assert result.dtype == torch.bfloat16 and result.isfinite().all()


def test_zeros_stay_zeros() -> None:
    assert RMSNorm(8, 1e-5, dtype=torch.float32)(torch.zeros(2, 8)).eq(0).all()
