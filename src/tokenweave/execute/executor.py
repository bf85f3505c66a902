"""Runs a step over the stage list, in the mode its plan names."""

import torch

from tokenweave.comm.collective import Collective
from tokenweave.config import partition
from tokenweave.execute.clock import StepClock
from tokenweave.execute.modes import REDUCTIONS, SHARDED
from tokenweave.layers.batch import Batch
from tokenweave.models.decoder import Decoder
from tokenweave.plan.step import StepPlan


class Executor:
    """One rank's executor. Holds what a step needs besides the model: the residual and the clock.

    model: this rank's part. collective: open for the model's hidden size and dtype, with max_tokens rows.
    """

    def __init__(self, model: Decoder, collective: Collective, *, max_tokens: int) -> None:
        self.model, self.collective, self.max_tokens = model, collective, max_tokens
        self.clock = StepClock()
        self._residual = torch.empty(0, model.config.hidden_size, dtype=model.dtype, device=model.device)

    @torch.inference_mode()
    def forward(self, batch: Batch, plan: StepPlan) -> torch.Tensor:
        """Normed rows of every token, [tokens, hidden], on every rank; valid until the next forward.

        Raises ValueError if the batch has more than max_tokens tokens or the mode has no executor.
        """
        tokens = batch.num_tokens
        if tokens > self.max_tokens:
            raise ValueError(f"a step takes at most {self.max_tokens} tokens, got {tokens}")
        if plan.mode not in REDUCTIONS:
            raise ValueError(f"mode {plan.mode!r} has no executor; there are: {', '.join(REDUCTIONS)}")
        reduce = REDUCTIONS[plan.mode](self.collective, self._zero_residual(tokens, plan.mode), plan)
        self.clock.start()
        normed: torch.Tensor | None = None
        for stage in self.model.stages:
            partial = stage.compute(normed, batch, self.collective.buffer(0, tokens))
            self.clock.computed()
            normed = reduce(partial, stage.norm)
            self.clock.communicated()
        assert normed is not None
        return normed

    def _zero_residual(self, tokens: int, mode: str) -> torch.Tensor:
        """Zeros for the rows of the residual that this rank keeps in `mode`; memory grows to the largest step seen."""
        own = partition(tokens, self.model.shard.size, self.model.shard.rank)
        rows = own.stop - own.start if mode in SHARDED else tokens
        if rows > self._residual.shape[0]:
            self._residual = self._residual.new_empty(rows, self._residual.shape[1])
        return self._residual[:rows].zero_()
