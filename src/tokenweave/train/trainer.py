"""One rank's part of training: forward, backward, sum, clip, step."""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from tokenweave.comm.group import Group
from tokenweave.layers.cross_entropy import LossOptions, Vocabulary
from tokenweave.layers.head_loss import head_loss
from tokenweave.models.decoder import Decoder
from tokenweave.train.adamw import AdamW
from tokenweave.train.config import TrainingConfig, head_chunk
from tokenweave.train.executor import TrainingExecutor
from tokenweave.train.gradients import Gradients
from tokenweave.train.parts import parts_of
from tokenweave.train.pieces import in_pieces
from tokenweave.train.run import Diverged
from tokenweave.train.schedule import learning_rate
from tokenweave.train.windows import InOrder, as_batch

SUM_ROWS = 64


@dataclass(frozen=True)
class StepResult:
    """Of one step, alike on every rank. norm: of the gradient before it was clipped."""

    loss: float
    norm: float
    learning_rate: float


class Trainer:
    """Weights, gradients and optimizer of this rank. All ranks make the same calls.

    model: of the config's dtype, its weights filled. Its parameters get gradients from here on. A context manager:
    `close` closes its collectives.
    """

    def __init__(self, group: Group, model: Decoder, config: TrainingConfig) -> None:
        self.group, self.model, self.config = group, model, config
        hidden, vocabulary = model.config.hidden_size, model.config.vocab_size
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        self.collective = group.open_collective(hidden, config.tokens, model.dtype)
        self.sums = group.open_collective(hidden, SUM_ROWS, torch.float32)
        self.vocabulary = Vocabulary.open(group, vocabulary, model.shard, head_chunk(config.tokens, vocabulary))
        self.executor = TrainingExecutor(
            model, self.collective, sequence_parallel=config.sequence_parallel, recompute=config.recompute
        )
        self.parts, self.shared = parts_of(model, self.sums, group.rank, group.size)
        self.optimizer = AdamW(list(model.parameters()), config)
        self.gradients = Gradients(
            model, self.parts, self.shared, self.sums, rank=group.rank, rows=SUM_ROWS,
            sequence_parallel=config.sequence_parallel, wide=model.dtype != torch.float32 and config.accumulation > 1,
        )  # fmt: skip
        self._options = LossOptions(label_smoothing=config.label_smoothing, z_loss=config.z_loss)

    def close(self) -> None:
        for collective in (self.collective, self.sums, self.vocabulary.collective):
            collective.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def step(self, windows: np.ndarray, step: int) -> StepResult:
        """One step of the optimizer on windows [batch_size, length + 1].

        Raises Diverged, alike on every rank, if the loss or the gradient is not finite; the weights are then as before.
        """
        config = self.config
        loss = 0.0
        for part in np.split(windows, config.accumulation):
            loss += self.backward(part, count=config.batch_size * config.length)
            self.gradients.accumulate()
        norm = self.gradients.reduce()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise Diverged(f"at step {step + 1} the loss is {loss} and the norm of its gradient {norm}")
        rate = learning_rate(config, step)
        scale = min(1.0, config.clip_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_ has it
        self.optimizer.step(self.gradients.tensors, step, learning_rate=rate, scale=scale)
        self.gradients.clear()
        return StepResult(loss, norm, rate)

    def backward(self, windows: np.ndarray, *, count: int) -> float:
        """Add the gradients of some windows to the parameters' own; returns their losses' sum over `count`."""
        batch, targets = as_batch(windows, str(self.group.device))
        rows = self.executor.forward(batch)
        loss = head_loss(rows, self.model.lm_head.weight, targets, self.vocabulary, self._options, count=count)
        loss.backward()
        return float(loss.detach())

    def finite(self) -> bool:
        """Whether all ranks' weights and moments are finite. Every rank asks and gets the same answer."""
        optimizer = self.optimizer
        states = (*optimizer.masters, *optimizer.first, *optimizer.second)
        mine = all(bool(piece.isfinite().all()) for tensor in states for piece in in_pieces(tensor))
        return self.gradients.total(0.0 if mine else 1.0) == 0.0

    @torch.no_grad()
    def evaluate(self, windows: InOrder) -> float:
        """Mean loss, without smoothing or z-loss, of windows as long as the config's or shorter."""
        total = 0.0
        for start in range(0, len(windows), self.config.windows):
            batch, targets = as_batch(windows.rows(start, self.config.windows), str(self.group.device))
            rows = self.executor.forward(batch)
            total += len(targets) * float(head_loss(rows, self.model.lm_head.weight, targets, self.vocabulary))
        return total / (len(windows) * windows.length)
