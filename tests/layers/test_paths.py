import pytest
import torch

from tokenweave.layers import paths
from tokenweave.layers.paths import kernel_multiplies, uses_kernels

WEIGHT = torch.empty(5, 4)


def test_kernels_take_contiguous_rows_of_the_weights_type() -> None:
    with torch.inference_mode():
        x = torch.empty(3, 4)
        assert uses_kernels(WEIGHT, x) and uses_kernels(WEIGHT, x, torch.empty(3, 4)) and uses_kernels(WEIGHT, x[:0])
        for wrong in (torch.empty(3, 5), torch.empty(4, 3).t(), torch.empty(3, 8)[:, ::2], x.bfloat16(), x.double(),
                      torch.empty(3, 4, device="meta")):  # fmt: skip
            assert not uses_kernels(WEIGHT, wrong) and not uses_kernels(WEIGHT, x, wrong)
        assert not uses_kernels(WEIGHT, x, torch.empty(2, 4))
        assert not uses_kernels(WEIGHT.double(), x.double())
    with torch.no_grad():
        assert uses_kernels(WEIGHT, x)
    assert not uses_kernels(WEIGHT, x)  # torch records gradients


@pytest.mark.parametrize("dtype", paths.MOST_ROWS)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_limit_is_that_of_dtype_and_threads(dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    most = paths.MOST_ROWS[dtype][threads - 1]
    assert kernel_multiplies(most, dtype) and not kernel_multiplies(most + 1, dtype)


def test_more_threads_leave_fewer_rows_to_the_kernels() -> None:
    assert all(list(most) == sorted(most, reverse=True) for most in paths.MOST_ROWS.values())
