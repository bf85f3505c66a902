"""The paged key/value cache as the layers see it: tensors only; who owns which block is the engine's business."""

from dataclasses import dataclass

import torch


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

    @staticmethod
    def zeros(
        layers: int, blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str = "cpu"
    ) -> "KVCache":
        shape = (layers, blocks, block_size, kv_heads, head_dim)
        return KVCache(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
