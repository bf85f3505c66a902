"""The executor that keeps gradients: the same stage list, with communication that has a backward pass."""

from functools import partial
from itertools import pairwise

import torch

from tokenweave.comm.collective import Collective
from tokenweave.layers.autograd import copy_to_ranks, gather_rows, scatter_sum, sum_over_ranks
from tokenweave.layers.batch import Batch
from tokenweave.layers.norm import RMSNorm
from tokenweave.layers.recompute import recomputed
from tokenweave.models.decoder import Decoder
from tokenweave.models.stage import Stage


class TrainingExecutor:
    """Runs a batch without a cache, whole prompts, so that its rows have gradients.

    sequence_parallel: between stages a rank holds its own rows (reduce-scatter, norm, all-gather), so that norms and
    residual are 1/N of the work and memory; otherwise all rows (all-reduce). recompute: a stage keeps nothing but the
    residual in front of it, and runs again, communication included, in the backward pass.
    collective: open for the model's hidden size and dtype and for as many tokens as a batch has.
    """

    def __init__(
        self, model: Decoder, collective: Collective, *, sequence_parallel: bool = True, recompute: bool = False
    ) -> None:
        self.model, self.collective = model, collective
        self.sequence_parallel, self.recompute = sequence_parallel, recompute

    def forward(self, batch: Batch) -> torch.Tensor:
        """Normed rows of every token, [tokens, hidden], on every rank."""
        stages = self.model.stages
        residual = self._sum(stages[0].compute(None, batch, None))
        for before, stage in pairwise(stages):
            run = partial(self._stage, before.norm, stage, batch)
            residual = recomputed(run, residual) if self.recompute else run(residual)
        return self._spread(stages[-1].norm(residual), batch.num_tokens)

    def _stage(self, norm: RMSNorm, stage: Stage, batch: Batch, residual: torch.Tensor) -> torch.Tensor:
        normed = self._spread(norm(residual), batch.num_tokens)
        return residual + self._sum(stage.compute(normed, batch, None))

    def _sum(self, own: torch.Tensor) -> torch.Tensor:
        return (scatter_sum if self.sequence_parallel else sum_over_ranks)(own, self.collective)

    def _spread(self, rows: torch.Tensor, tokens: int) -> torch.Tensor:
        if self.sequence_parallel:
            return gather_rows(rows, tokens, self.collective)
        return copy_to_ranks(rows, self.collective)
