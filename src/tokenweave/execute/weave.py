"""Two lanes over the one stage list: while one computes, the other's reduction runs (arXiv 2505.11329, section 3.3)."""

from dataclasses import dataclass

import torch

from tokenweave.comm.collective import Collective
from tokenweave.execute.clock import StepClock
from tokenweave.execute.gpu_clock import GpuClock
from tokenweave.execute.gpu_stream import CommunicationStream, PendingOnStream
from tokenweave.execute.streams import CommunicationThread, Pending
from tokenweave.layers.batch import Batch
from tokenweave.models.stage import Stage


@dataclass
class Lane:
    """One half of the step's tokens and how far it has come. residual: this rank's rows of the lane."""

    index: int
    batch: Batch
    residual: torch.Tensor
    pending: Pending | PendingOnStream | None = None


def weave(
    stages: list[Stage],
    lanes: list[Lane],
    collective: Collective,
    stream: CommunicationThread | CommunicationStream,
    clock: StepClock | GpuClock,
    budget: int | None,
) -> torch.Tensor:
    """Normed rows of both lanes, [tokens, hidden], in token order.

    Compute runs A, B, A, B, ... in the order of the stages, which also writes A's keys and values of a layer before B
    reads them. A lane's next stage waits for that lane's own reduction and for nothing else. A lane without tokens is
    not in `lanes`.
    """
    for stage in stages:
        for lane in lanes:
            normed = None if lane.pending is None else _wait(lane.pending, clock)
            partial = stage.compute(normed, lane.batch, collective.buffer(lane.index, lane.batch.num_tokens))
            clock.computed()
            lane.pending = stream.submit(
                collective.all_reduce_add_rms_norm,
                partial,
                lane.residual,
                stage.norm.weight,
                stage.norm.eps,
                lane=lane.index,
                budget=budget,
            )
    return torch.cat([_wait(lane.pending, clock) for lane in lanes if lane.pending is not None])


def _wait(pending: Pending | PendingOnStream, clock: StepClock | GpuClock) -> torch.Tensor:
    rows = pending.wait()
    clock.waited(pending)  # type: ignore[arg-type]  # clock and stream are of one kind
    return rows
