import numpy as np
import pytest
import torch
from kernel_cases import DTYPES, edges_untouched, guarded, rows

from tokenweave.layers.kernels.lookup import look_up_rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 33, 64])
def test_rows_of_the_table_and_zeros(hidden: int, dtype: torch.dtype) -> None:
    table, array = rows(dtype, 10, hidden)
    ids = np.array([0, 99, 100, 105, 109, 110, 2**40, -1], np.int64)
    out, whole = guarded(dtype, len(ids), hidden)
    look_up_rows(ids, 100, array, out.data_ptr())
    zeros = torch.zeros(hidden, dtype=dtype)
    expected = torch.stack([zeros, zeros, table[0], table[5], table[9], zeros, zeros, zeros])
    assert torch.equal(out, expected) and edges_untouched(whole)


def test_no_tokens() -> None:
    out = torch.full((1, 2), 7.0)
    look_up_rows(np.empty(0, np.int64), 0, np.ones((2, 2), np.float32), out.data_ptr())
    assert out.eq(7).all()
