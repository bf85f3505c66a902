"""How the kernels are compiled."""

from collections.abc import Callable
from typing import Any

from numba import njit

from tokenweave.comm.kernels.kept import keep

# called by kernels only: nothing to unpack Python's arguments with
part = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True)

# as `part`, where sums may be reordered (the loop vectoriser then keeps several); NaN and infinity are not assumed away
summing_part = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, fastmath={"reassoc", "contract"})


def kernel(function: Callable) -> Any:
    """Compile `function` for calls from Python, without the interpreter lock, and keep the result on disk."""
    return keep(njit(nogil=True, error_model="numpy", cache=True)(function))
