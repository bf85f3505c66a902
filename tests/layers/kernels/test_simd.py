import numpy as np
import pytest
import torch
from numba import njit

from tokenweave.layers.kernels import simd
from tokenweave.layers.kernels.views import STORED, as_array


@njit
def widen_all(values, out):  # type: ignore[no-untyped-def]
    for i in range(values.size):
        out[i] = simd.widen(values[i])


@njit
def narrow_all(values, out):  # type: ignore[no-untyped-def]
    for i in range(values.size):
        out[i] = simd.narrow(out, values[i])


@njit
def highest_of(values, length):  # type: ignore[no-untyped-def]
    return simd.highest(values.ctypes.data, length)


@njit
def total_of(values, length):  # type: ignore[no-untyped-def]
    return simd.total(values.ctypes.data, length)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_value_widens_as_in_torch(dtype: torch.dtype) -> None:
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    wide = np.empty(2**16, np.float32)
    widen_all(as_array(bits.view(dtype)), wide)
    assert np.array_equal(wide, bits.view(dtype).float().numpy(), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounds_as_torch_does(dtype: torch.dtype) -> None:
    """Ties, overflow, subnormal numbers, NaN of any payload, and random bits."""
    random = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    ties = (np.arange(2**16, dtype=np.uint32) << 16) | 0x8000
    named = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.9, 65520, 3.4e38, 6e-8, 2.98e-8], np.float32)
    values = np.concatenate((random.view(np.float32), ties.view(np.float32), named))
    values = np.concatenate((values, np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)))
    found = np.empty(values.size, STORED[dtype])
    narrow_all(values, found)
    expected = torch.from_numpy(values).to(dtype)
    nan = np.isnan(values)
    assert (found[~nan] == as_array(expected)[~nan]).all()
    assert torch.from_numpy(found).view(dtype)[torch.from_numpy(nan)].isnan().all()


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 33, 577])
def test_highest(length: int) -> None:
    values = np.random.default_rng(length).standard_normal(600).astype(np.float32) - 100
    values[length:] = 1000.0
    assert highest_of(values, length) == (values[:length].max() if length else -np.inf)
    if length > 1:
        values[length - 2] = np.nan
        assert highest_of(values, length) == np.nanmax(values[:length])


@pytest.mark.parametrize("length", [0, 16, 32, 592])
def test_total_takes_zeros_at_the_end_without_a_change(length: int) -> None:
    values = np.zeros(640, np.float32)
    values[:length] = np.random.default_rng(length).standard_normal(length)
    found = total_of(values, length)
    assert found == pytest.approx(values.astype(np.float64).sum(), abs=1e-4)
    assert found == total_of(values, 640)
