"""Add and RMSNorm on rows that one rank holds whole, by the collectives' own kernel: a group of one rank."""

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from numba import types

from tokenweave.comm.kernels.exchange import FUSED, combine
from tokenweave.comm.kernels.sync import LANE_WORDS, LaneWord
from tokenweave.comm.kernels.vector import ELEMENTS


def add_rms_norm(rows: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """y = rows + residual, rounded and stored as the residual; rows become the norm of y. Returns rows.

    rows, residual: [n, hidden], contiguous CPU memory of one dtype. weight: [hidden], of that dtype or float32.
    For the same sums the results are the fused operation's, bit for bit.
    """
    assert rows.shape == residual.shape and rows.shape[1:] == weight.shape
    assert rows.dtype == residual.dtype and weight.dtype in (rows.dtype, torch.float32)
    assert all(tensor.is_contiguous() and tensor.is_cpu for tensor in (rows, residual, weight))
    words = np.zeros(LANE_WORDS, dtype=np.int64)
    words[LaneWord.SIZE] = 1
    words[LaneWord.HIDDEN] = rows.shape[1]
    words[LaneWord.ROW_BYTES] = rows.shape[1] * rows.dtype.itemsize
    words[LaneWord.SOURCES] = words[LaneWord.TARGETS] = rows.data_ptr()
    run = compiled_combine(str(rows.dtype).removeprefix("torch."))
    wide = weight.dtype == torch.float32
    run(words.ctypes.data, FUSED, residual.data_ptr(), weight.data_ptr(), wide, rows.shape[0], eps)
    return rows


@cache
def compiled_combine(dtype: str) -> Callable[..., None]:
    """The kernel for rows of `dtype`, compiled or loaded once in a process."""
    word = types.int64
    signature = (word, word, ELEMENTS[dtype], word, types.boolean, word, types.float64)
    combine.compile(signature)
    return combine.get_overload(signature)
