"""What every engine does by default on GPUs of its own: NCCL's collectives, as the baseline."""

from typing import Any

import torch
import torch.distributed as dist

from tokenweave.comm import Collective
from tokenweave.comm.nccl import connected

_PATIENCE_SECONDS = 180.0


class NcclOperations:
    """A GPU collective whose all_reduce, reduce_scatter and all_gather are NCCL's; the rest is that collective's own.

    Every rank makes it at the same time, with ranks on GPUs of their own. reduce_scatter and all_gather take tokens
    that the ranks divide evenly, as NCCL's do.
    """

    def __init__(self, collective: Collective, device: torch.device) -> None:
        self._own: Any = collective
        self.nccl = connected(device, _PATIENCE_SECONDS)

    def all_reduce(self, partial: torch.Tensor, *, lane: int = 0) -> torch.Tensor:
        dist.all_reduce(partial, group=self.nccl)
        return partial

    def reduce_scatter(self, partial: torch.Tensor, *, lane: int = 0) -> torch.Tensor:
        rows = partial.new_empty(self._own.own_rows(len(partial)), partial.shape[1])
        dist.reduce_scatter_tensor(rows, partial, group=self.nccl)
        return rows

    def all_gather(self, rows: torch.Tensor, tokens: int, *, lane: int = 0) -> torch.Tensor:
        gathered = self._own.buffer(lane, tokens)
        dist.all_gather_into_tensor(gathered, rows, group=self.nccl)
        return gathered

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)
