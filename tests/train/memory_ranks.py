"""What the ranks of the memory test run."""

from typing import Any

import numpy as np
import torch

from tokenweave.comm import Collective, Group
from tokenweave.config import ModelConfig, shard
from tokenweave.models.decoder import Decoder
from tokenweave.train.config import TrainingConfig
from tokenweave.train.initialize import initialize
from tokenweave.train.memory import MeasuredMemory, MemoryMeter, warm_up
from tokenweave.train.trainer import Trainer


def left_open(group: Group, training: TrainingConfig) -> tuple[int, list[int]]:
    """How many collectives `warm_up` opens, and which of them can still be used after it."""
    opened: list[Collective] = []
    open_collective = group.open_collective

    def recorded(*args: Any, **options: Any) -> Collective:
        opened.append(open_collective(*args, **options))
        return opened[-1]

    group.open_collective = recorded  # type: ignore[method-assign]
    warm_up(group, training)
    usable = []
    for number, collective in enumerate(opened):
        try:
            collective.barrier()
            usable.append(number)
        except RuntimeError as error:
            assert "is closed" in str(error)
    return len(opened), usable


def train(group: Group, links: Any, config: ModelConfig, training: TrainingConfig) -> MeasuredMemory:
    """All steps on made-up text."""
    warm_up(group, training)
    meter = MemoryMeter(group.device)
    own = shard(config, group.size, group.rank)
    model = Decoder(config, own, dtype=getattr(torch, training.dtype), device=str(group.device))
    trainer = Trainer(group, model, training)
    initialize(trainer.parts, trainer.model, 0)
    trainer.optimizer.adopt()
    draw = np.random.default_rng(0)
    for step in range(training.steps):
        trainer.step(draw.integers(0, config.vocab_size, (training.batch_size, training.length + 1)), step)
    return meter.measure(trainer)
