"""What training takes of a rank's memory, as the system sees it."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from tokenweave.comm.group import Group
from tokenweave.config import ModelConfig, shard
from tokenweave.models.decoder import Decoder
from tokenweave.train.config import TrainingConfig
from tokenweave.train.initialize import initialize
from tokenweave.train.trainer import Trainer
from tokenweave.train.windows import InOrder

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


def warm_up(group: Group, config: TrainingConfig) -> None:
    """Train a tiny model for a step as `config` says, so that what libraries take once does not count as the
    training's."""
    size = max(group.size, 2)
    tiny = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=16 * size, hidden_size=16, intermediate_size=8 * size,
        num_hidden_layers=1, num_attention_heads=size, num_key_value_heads=size, head_dim=8, max_position_embeddings=8,
    )  # fmt: skip
    dtype = getattr(torch, config.dtype)
    model = Decoder(tiny, shard(tiny, group.size, group.rank), dtype=dtype, device=str(group.device))
    with Trainer(group, model, replace(config, batch_size=2, accumulation=1, length=4)) as trainer:
        initialize(trainer.parts, model, 0)
        windows = np.arange(10).reshape(2, 5)
        trainer.step(windows, 0)
        trainer.evaluate(InOrder(windows[0], 2))
    square = torch.ones(512, 512, dtype=dtype, device=group.device)
    square @ square  # libraries of matrix products keep up to 9 MB once one is large


def _resident(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
