"""exp in float32 as plain arithmetic: the loop vectoriser leaves calls of the math library scalar."""
# mypy: disallow-untyped-defs=False

import numpy as np

from tokenweave.layers.kernels.jit import part
from tokenweave.layers.kernels.simd import float_of_bits, round_to_integer

LOG2_E = np.float32(1.44269504088896341)
LN2_HIGH = np.float32(0.693359375)  # 9 bits, so that n * LN2_HIGH is exact
LN2_LOW = np.float32(-2.12194440e-4)
LOWEST, HIGHEST = np.float32(-87.0), np.float32(88.0)  # results stay normal numbers: 1.6e-38 to 1.7e38
C2, C3, C4 = np.float32(5.0000001201e-1), np.float32(1.6666665459e-1), np.float32(4.1665795894e-2)
C5, C6, C7 = np.float32(8.3334519073e-3), np.float32(1.3981999507e-3), np.float32(1.9875691500e-4)
ONE = np.float32(1.0)


@part
def exponential(x):
    """exp(x) within 1.2e-7 relative; x is held to [LOWEST, HIGHEST], NaN stays NaN (Cephes expf)."""
    x = LOWEST if x < LOWEST else x
    x = HIGHEST if x > HIGHEST else x
    whole, bits = round_to_integer(x * LOG2_E)
    r = x - whole * LN2_HIGH - whole * LN2_LOW
    tail = ((((C7 * r + C6) * r + C5) * r + C4) * r + C3) * r + C2
    return (tail * (r * r) + r + ONE) * float_of_bits((bits + np.int32(127)) << np.int32(23))


@part
def silu(x):
    """x / (1 + exp(-x))."""
    return x / (ONE + exponential(-x))
