"""Runs a step over the stage list, in the mode its plan names."""

import torch

from tokenweave.comm.collective import Collective
from tokenweave.config import partition
from tokenweave.execute.clock import StepClock
from tokenweave.execute.modes import REDUCTIONS, SHARDED
from tokenweave.execute.streams import CommunicationThread
from tokenweave.execute.weave import Lane, weave
from tokenweave.layers.batch import Batch
from tokenweave.models.decoder import Decoder
from tokenweave.plan.step import StepPlan


class Executor:
    """One rank's executor: the model, the collective, and what a step needs besides: residual, stream and clock.

    collective: open for the model's hidden size and dtype with max_tokens rows, and two lanes if steps are woven.
    """

    def __init__(self, model: Decoder, collective: Collective, *, max_tokens: int) -> None:
        self.model, self.collective, self.max_tokens = model, collective, max_tokens
        self.clock = StepClock()
        self._stream: CommunicationThread | None = None  # started by the first woven step
        self._residual = torch.empty(0, model.config.hidden_size, dtype=model.dtype, device=model.device)

    @torch.inference_mode()
    def forward(self, batch: Batch, plan: StepPlan) -> torch.Tensor:
        """Normed rows of every token, [tokens, hidden], on every rank; valid until the next forward.

        Raises ValueError if the batch has more than max_tokens tokens.
        """
        if batch.num_tokens > self.max_tokens:
            raise ValueError(f"a step takes at most {self.max_tokens} tokens, got {batch.num_tokens}")
        lanes = batch.split(plan.cut) if plan.mode == "weave" else (batch,)
        if all(lane.num_tokens for lane in lanes) and len(lanes) == 2:
            return self._weave(lanes, plan)
        return self._in_turn(batch, plan)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def _in_turn(self, batch: Batch, plan: StepPlan) -> torch.Tensor:
        """Every mode but weave, and a weave with an empty lane, which is the fused mode."""
        mode = "fused" if plan.mode == "weave" else plan.mode
        tokens = batch.num_tokens
        residual = self._zero_residual([self._rows(tokens) if mode in SHARDED else tokens])[0]
        reduce = REDUCTIONS[mode](self.collective, residual, plan)
        self.clock.start()
        normed: torch.Tensor | None = None
        for stage in self.model.stages:
            partial = stage.compute(normed, batch, self.collective.buffer(0, tokens))
            self.clock.computed()
            normed = reduce(partial, stage.norm)
            self.clock.communicated()
        assert normed is not None
        return normed

    def _weave(self, halves: tuple[Batch, ...], plan: StepPlan) -> torch.Tensor:
        self._stream = self._stream or CommunicationThread()
        residuals = self._zero_residual([self._rows(half.num_tokens) for half in halves])
        lanes = [Lane(i, half, rows) for i, (half, rows) in enumerate(zip(halves, residuals, strict=True))]
        self.clock.start()
        return weave(self.model.stages, lanes, self.collective, self._stream, self.clock, plan.budget)

    def _rows(self, tokens: int) -> int:
        own = partition(tokens, self.model.shard.size, self.model.shard.rank)
        return own.stop - own.start

    def _zero_residual(self, rows: list[int]) -> list[torch.Tensor]:
        """Zeros, so many rows for each lane. One memory that grows to the largest step seen."""
        if sum(rows) > self._residual.shape[0]:
            self._residual = self._residual.new_empty(sum(rows), self._residual.shape[1])
        return list(self._residual[: sum(rows)].zero_().split(rows))
