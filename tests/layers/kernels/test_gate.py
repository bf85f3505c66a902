import pytest
import torch
from kernel_cases import DTYPES, edges_untouched, guarded, rows

from tokenweave.layers.kernels.mlp import gate_rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, columns", [(0, 5), (1, 1), (3, 33), (13, 64), (2, 577)])
def test_equals_torch_with_its_roundings(tokens: int, columns: int, dtype: torch.dtype) -> None:
    wide, array = rows(dtype, tokens, 2 * columns, scale=4.0)
    gated, whole = guarded(dtype, tokens, columns)
    gate_rows(array.ctypes.data, gated.data_ptr(), tokens, columns, array)
    left, right = wide[:, :columns], wide[:, columns:]
    expected = (left.double() * torch.sigmoid(left.double())).to(dtype) * right
    # the silu of float32 may fall on the other side of a tie
    torch.testing.assert_close(gated, expected, rtol=2e-6 if dtype == torch.float32 else 8e-3, atol=1e-30)
    assert gated.eq(expected).double().mean() > 0.97 or dtype == torch.float32 or not tokens
    assert edges_untouched(whole)
