"""What one worker holds for one model: the collective, the planner, the plan of the step under way, and counters.

It stands in vLLM's own table of layers (static_forward_context) under KEY, where the custom operation, the metadata
builders and the model find it: no state of a module.
"""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.logger import init_logger

from tokenweave.comm.collective import Collective
from tokenweave.comm.group import Group
from tokenweave.execute.gpu_stream import CommunicationStream, PendingOnStream
from tokenweave.execute.modes import REDUCTIONS, SHARDED
from tokenweave.execute.streams import CommunicationThread, Pending
from tokenweave.integrations.vllm.planning import Plan
from tokenweave.plan.step import StepPlan

if TYPE_CHECKING:
    from tokenweave.integrations.vllm.lanes import Step

KEY = "tokenweave"
FUSED = StepPlan("fused")
logger = init_logger("vllm.tokenweave")


@dataclass(frozen=True)
class Norm:
    """What a reduction needs of an RMSNorm."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Block:
    """One layer as a woven step runs it: two stages, each with the norm that follows its reduction."""

    attention: torch.nn.Module
    attention_norm: torch.nn.Module
    mlp: torch.nn.Module
    mlp_norm: torch.nn.Module


@dataclass
class Counts:
    """steps: by the mode they ran in. fused: calls of the fused operation, of both lanes."""

    steps: Counter[str] = field(default_factory=Counter)
    fused: int = 0

    @property
    def woven(self) -> int:
        return self.steps["weave"]

    def __str__(self) -> str:
        steps = ", ".join(f"{count} {mode}" for mode, count in sorted(self.steps.items()))
        return f"steps: {steps or 'none'}; fused operations: {self.fused}"


class Runtime:
    """planned: gives the plan of a step, the same on every rank. weaves: whether steps may have lanes. blocks,
    first_norm: the model's."""

    def __init__(self, group: Group, collective: Collective, planned: Plan, *, weaves: bool) -> None:
        self.group, self.collective, self.planned, self.weaves = group, collective, planned, weaves
        self.counts = Counts()
        self._stream: CommunicationThread | CommunicationStream | None = None  # made by the first woven step
        self.plan = FUSED
        self.first_norm: torch.nn.Module | None = None
        self.blocks: list[Block] = []
        self._reported, self._told = time.monotonic(), ""

    def begin(self) -> "Step | None":
        """Start a step: take up the plan that its metadata carries. None for a step without requests: warming up."""
        step = _step_under_way()
        self.plan = FUSED if step is None else step.plan
        if step is not None:
            self.counts.steps[step.plan.mode] += 1
            self._report()
        return step

    def reduce(self, partial: torch.Tensor, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        """What the step's plan puts between two stages, in a step of one lane; the result lies in the lane's buffer.

        residual: [tokens, hidden], of which only this rank's rows are kept up to date, unless the mode is serial.
        """
        mode = self.plan.mode
        rows = self.own(residual) if mode in SHARDED else residual
        self.counts.fused += mode == "fused"
        return REDUCTIONS[mode](self.collective, rows, self.plan)(partial, norm)  # type: ignore[arg-type]

    def reduce_in_lane(
        self, partial: torch.Tensor, residual: torch.Tensor, norm: Norm, *, lane: int
    ) -> Pending | PendingOnStream:
        """Start the fused operation of a lane, beside what computes. residual: this rank's rows of it."""
        if self._stream is None:
            device = self.group.device
            self._stream = CommunicationStream(device) if device.type == "cuda" else CommunicationThread()
        self.counts.fused += 1
        operation = self.collective.all_reduce_add_rms_norm
        return self._stream.submit(
            operation, partial, residual, norm.weight, norm.eps, lane=lane, budget=self.plan.budget
        )

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's rows."""
        return rows[self.group.rows(rows.shape[0])]

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self.group.close()

    def _report(self) -> None:
        """Log the counters as often as vLLM logs its own, while they change."""
        now = time.monotonic()
        if self.group.rank == 0 and now - self._reported >= envs.VLLM_LOG_STATS_INTERVAL:
            self._reported = now
            if (told := str(self.counts)) != self._told:
                self._told = told
                logger.info("TokenWeave %s", told)


def _step_under_way() -> Any:
    if not is_forward_context_available():
        return None
    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict) or not metadata:
        return None
    return getattr(next(iter(metadata.values())), "tokenweave", None)
