"""The paged key/value cache as the layers see it: tensors only; who owns which block is the engine's business."""

import math
import mmap
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from tokenweave.layers.kernels.views import as_array


@dataclass(frozen=True)
class KVCache:
    """Keys and values of this rank's KV heads.

    keys, values: [layers, blocks, block_size, kv_heads, head_dim]. Slot s is position s % block_size of block
    s // block_size.
    """

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def num_blocks(self) -> int:
        return self.keys.shape[1]

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @cached_property
    def arrays(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Keys and values of each layer as the CPU kernels take them."""
        return [(as_array(keys), as_array(values)) for keys, values in zip(self.keys, self.values, strict=True)]

    @staticmethod
    def zeros(
        layers: int, blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str = "cpu"
    ) -> "KVCache":
        shape = (layers, blocks, block_size, kv_heads, head_dim)
        if device != "cpu":
            return KVCache(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))
        return KVCache(*(_untouched_zeros(shape, dtype) for _ in range(2)))


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages the system hands out when first written: torch.zeros writes all of them, 2 s for 4 GB."""
    count = math.prod(shape)
    memory = mmap.mmap(-1, max(count * dtype.itemsize, 1))
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
