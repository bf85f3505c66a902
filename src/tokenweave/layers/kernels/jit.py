"""How the kernels are compiled."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

SOURCES = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()

# called by kernels only: nothing to unpack Python's arguments with
part = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True)

# as `part`, where sums may be reordered (the loop vectoriser then keeps several); NaN and infinity are not assumed away
summing_part = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, fastmath={"reassoc", "contract"})


def kernel(function: Callable) -> Any:
    """Compile `function` for calls from Python, without the interpreter lock, and keep the result on disk.

    Numba compares what it kept with the function's own file only; here with all files of this package, whose functions
    the kernels call.
    """
    compiled = njit(nogil=True, error_model="numpy", cache=True)(function)
    kept: Any = getattr(compiled._cache, "_cache_file", None)
    if hasattr(kept, "_source_stamp"):
        kept._source_stamp = SOURCES
    return compiled
