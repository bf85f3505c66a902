"""What the ranks tell each other as functions with gradients: the layers between them stay as they are.

A stage is run with out=None, which keeps its autograd graph; these functions stand in front of it and behind it. Each
is the other's gradient, in pairs (Megatron-LM, arXiv 1909.08053, section 3; with rows sharded, arXiv 2205.05198,
section 4.2):

    copy_to_ranks   identity       all-reduce         every rank holds every row
    sum_over_ranks  all-reduce     identity
    gather_rows     all-gather     reduce-scatter     a rank holds its own rows between stages
    scatter_sum     reduce-scatter all-gather

The gradient of what all ranks hold alike is whole on every rank; that of a rank's own tensor is its own.
"""

from typing import Any, cast

import torch

from tokenweave.comm.collective import Collective

# Rows of T tokens: rank r of N owns [r*T//N, (r+1)*T//N). A collective answers in memory that its next call overwrites,
# so what a graph keeps is copied.


def copy_to_ranks(x: torch.Tensor, collective: Collective) -> torch.Tensor:
    """x, [T, hidden], alike on all ranks, to each rank's own stage: the gradients that come back are summed."""
    return cast(torch.Tensor, _CopyToRanks.apply(x, collective))


def sum_over_ranks(partial: torch.Tensor, collective: Collective) -> torch.Tensor:
    """The sum of all ranks' partials, [T, hidden], on every rank."""
    return cast(torch.Tensor, _SumOverRanks.apply(partial, collective))


def gather_rows(rows: torch.Tensor, tokens: int, collective: Collective) -> torch.Tensor:
    """Every rank's rows, [own rows, hidden] each, as [tokens, hidden] on every rank."""
    return cast(torch.Tensor, _GatherRows.apply(rows, tokens, collective))


def scatter_sum(partial: torch.Tensor, collective: Collective) -> torch.Tensor:
    """This rank's rows of the sum of all ranks' partials: [T, hidden] to [own rows, hidden]."""
    return cast(torch.Tensor, _ScatterSum.apply(partial, collective))


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, collective: Collective) -> torch.Tensor:
        ctx.collective = collective
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.collective.all_reduce(grads[0].contiguous()).clone(), None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, collective: Collective) -> torch.Tensor:
        return collective.all_reduce(partial.contiguous()).clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, tokens: int, collective: Collective) -> torch.Tensor:
        ctx.collective = collective
        return collective.all_gather(rows.contiguous(), tokens).clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.collective.reduce_scatter(grads[0].contiguous()), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, collective: Collective) -> torch.Tensor:
        ctx.collective, ctx.tokens = collective, partial.shape[0]
        return collective.reduce_scatter(partial.contiguous())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.collective.all_gather(grads[0].contiguous(), ctx.tokens).clone(), None
