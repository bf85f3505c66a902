"""Whether there are GPUs, asked without torch, which the caller's process does without."""

import ctypes
from importlib.metadata import version


def gpu_count() -> int:
    """CUDA devices that the driver offers and torch, as installed, can use; 0 where anything of that is missing."""
    if "+cpu" in version("torch"):
        return 0
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def device_for(device: str, ranks: int, collective: str) -> str:
    """The device; for "auto" GPUs where each rank has one (fewer would be shared, in turns), else the CPU."""
    if device != "auto":
        return device
    return "cuda" if collective != "shared_memory" and gpu_count() >= ranks else "cpu"
