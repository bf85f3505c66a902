"""Random rows of the kernels' three element types, and torch's view of them."""

import numpy as np
import torch

from tokenweave.layers.kernels.views import as_array

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 6e-8, torch.bfloat16: 4e-3, torch.float16: 5e-4}  # half a unit of the last place, relative


def rows(dtype: torch.dtype, *shape: int, scale: float = 1.0) -> tuple[torch.Tensor, np.ndarray]:
    tensor = (torch.randn(shape) * scale).to(dtype)
    return tensor, as_array(tensor)


def guarded(dtype: torch.dtype, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An uninitialised tensor inside a larger one of 7s, whose edges must stay 7."""
    count = int(np.prod(shape))
    whole = torch.full((count + 128,), 7.0, dtype=dtype)
    whole[64 : 64 + count] = float("nan")
    return whole[64 : 64 + count].view(shape), whole


def edges_untouched(whole: torch.Tensor) -> bool:
    return bool(whole[:64].eq(7).all() and whole[-64:].eq(7).all())
