import numpy as np
from numba import njit

from tokenweave.layers.kernels.exponential import HIGHEST, LOWEST, exponential, silu


@njit
def exponentials(values, out):  # type: ignore[no-untyped-def]
    for i in range(values.size):
        out[i] = exponential(values[i])


@njit
def silus(values, out):  # type: ignore[no-untyped-def]
    for i in range(values.size):
        out[i] = silu(values[i])


def exp(values: np.ndarray) -> np.ndarray:
    out = np.empty_like(values)
    exponentials(values, out)
    return out


def test_is_within_a_bit_over_its_range() -> None:
    random = np.random.default_rng(0).uniform(-87, 88, 500_000)
    values = np.concatenate((random, np.linspace(-1, 1, 200_001), [0.0, -0.0, 87.99, -86.99])).astype(np.float32)
    exact = np.exp(values.astype(np.float64))
    assert (np.abs(exp(values) - exact) / exact).max() < 1.2e-7
    assert exp(np.zeros(1, np.float32))[0] == 1.0


def test_beyond_its_range() -> None:
    values = np.array([np.inf, 1e30, 89.0, -88.0, -1e30, -np.inf, np.nan], np.float32)
    found = exp(values)
    assert (found[:3] == exp(np.array([HIGHEST], np.float32))).all() and found[0] > 1e38
    assert (found[3:6] == exp(np.array([LOWEST], np.float32))).all() and 0 < found[3] < 2e-38
    assert np.isnan(found[6])


def test_silu() -> None:
    values = np.concatenate((np.linspace(-30, 30, 100_001), [-87.0, -100.0, 1e4])).astype(np.float32)
    found, exact = np.empty_like(values), values.astype(np.float64)
    silus(values, found)
    exact = exact / (1 + np.exp(-exact))
    assert (np.abs(found - exact) <= 3e-7 * np.abs(exact) + 1e-36).all()
    silus(np.array([np.nan, np.inf], np.float32), found)
    assert np.isnan(found[0]) and found[1] == np.inf
