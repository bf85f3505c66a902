"""What training takes of a rank's memory, as the system sees it."""

from dataclasses import dataclass
from pathlib import Path

import torch

from tokenweave.train.trainer import Trainer

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class MeasuredMemory:
    """Bytes of one rank. peak: the most that the process grew by, over everything, since `MemoryMeter` was made."""

    weights: int
    gradients: int
    optimizer: int
    peak: int


class MemoryMeter:
    """Made before the model. On the CPU the peak is of resident memory, on CUDA of torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        else:
            _CLEAR.write_text("5")  # from now on VmHWM is the peak of what follows
            self._before = _resident("VmRSS")

    def measure(self, trainer: Trainer) -> MeasuredMemory:
        weights = [parameter.data for parameter in trainer.optimizer.parameters]
        optimizer = trainer.optimizer
        states = [*optimizer.masters, *optimizer.first, *optimizer.second]
        own = {tensor.untyped_storage().data_ptr() for tensor in weights}
        grads = {t.untyped_storage().data_ptr(): t for t in trainer.gradients.tensors}
        grads |= {p.grad.untyped_storage().data_ptr(): p.grad for p in optimizer.parameters if p.grad is not None}
        return MeasuredMemory(
            weights=sum(tensor.untyped_storage().nbytes() for tensor in weights),
            gradients=sum(tensor.untyped_storage().nbytes() for tensor in grads.values()),
            optimizer=sum(t.untyped_storage().nbytes() for t in states if t.untyped_storage().data_ptr() not in own),
            peak=self._peak() - self._before,
        )

    def _peak(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return _resident("VmHWM")


def _resident(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
