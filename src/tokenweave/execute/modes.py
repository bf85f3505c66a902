"""What happens between two stages, mode by mode. The loop over the stages is the executor's."""

from collections.abc import Callable

import torch

from tokenweave.comm.collective import Collective
from tokenweave.layers.norm import RMSNorm
from tokenweave.layers.residual import add_rms_norm
from tokenweave.plan.step import StepPlan

# (partial [T, hidden], the norm that follows) -> normed rows [T, hidden] on every rank
Reduction = Callable[[torch.Tensor, RMSNorm], torch.Tensor]


def serial(collective: Collective, residual: torch.Tensor, plan: StepPlan) -> Reduction:
    """All-reduce, add, RMSNorm over all rows on every rank: what every engine does by default."""

    def reduce(partial: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        return add_rms_norm(collective.all_reduce(partial), residual, norm)

    return reduce


def reordered(collective: Collective, residual: torch.Tensor, plan: StepPlan) -> Reduction:
    """Reduce-scatter, add, RMSNorm over own rows, all-gather, as separate operations."""

    def reduce(partial: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        rows = add_rms_norm(collective.reduce_scatter(partial), residual, norm)
        return collective.all_gather(rows, partial.shape[0])

    return reduce


def fused(collective: Collective, residual: torch.Tensor, plan: StepPlan) -> Reduction:
    """The same as one operation."""

    def reduce(partial: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        return collective.all_reduce_add_rms_norm(partial, residual, norm.weight, norm.eps, budget=plan.budget)

    return reduce


def nocomm(collective: Collective, residual: torch.Tensor, plan: StepPlan) -> Reduction:
    """Add, RMSNorm over all rows, no communication: wrong results, a bound for benchmarks."""

    def reduce(partial: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        return add_rms_norm(partial, residual, norm)

    return reduce


REDUCTIONS: dict[str, Callable[[Collective, torch.Tensor, StepPlan], Reduction]] = {
    "serial": serial,
    "reordered": reordered,
    "fused": fused,
    "nocomm": nocomm,
}
SHARDED = frozenset({"reordered", "fused", "weave"})  # modes whose residual holds this rank's rows only
