"""A woven step over vLLM's own layers (arXiv 2505.11329, section 3.3)."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context

from tokenweave.execute.gpu_stream import PendingOnStream
from tokenweave.execute.streams import Pending
from tokenweave.integrations.vllm.lanes import Step
from tokenweave.integrations.vllm.runtime import Norm, Runtime


@dataclass
class Lane:
    """Tokens [0, cut) or the rest, and how far they have come. residual: this rank's rows of them."""

    index: int
    context: ForwardContext
    positions: torch.Tensor
    residual: torch.Tensor
    rows: torch.Tensor | Pending | PendingOnStream  # normed, or about to be

    def normed(self) -> torch.Tensor:
        return self.rows if isinstance(self.rows, torch.Tensor) else self.rows.wait()


def woven(runtime: Runtime, step: Step, embedded: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Normed rows of all tokens, [tokens, hidden].

    embedded: [tokens, hidden], whole on every rank. It may have more rows than the step has tokens (padding): they go
    with the second lane. Each stage runs lane 0 first, so that lane 0's keys and values of a layer are in the cache
    when lane 1 attends to them.
    """
    assert runtime.first_norm is not None
    lanes = _lanes(runtime, step, embedded, positions)
    for block in runtime.blocks:
        for lane in lanes:
            with override_forward_context(lane.context):
                partial = block.attention(positions=lane.positions, hidden_states=lane.normed())
            lane.rows = _reduced(runtime, lane, partial, block.attention_norm)
        for lane in lanes:
            with override_forward_context(lane.context):
                partial = block.mlp(lane.normed())
            lane.rows = _reduced(runtime, lane, partial, block.mlp_norm)
    return torch.cat([lane.normed() for lane in lanes])


def _lanes(runtime: Runtime, step: Step, embedded: torch.Tensor, positions: torch.Tensor) -> list[Lane]:
    assert step.lanes is not None and runtime.first_norm is not None
    whole, cut = get_forward_context(), step.plan.cut
    lanes = []
    for index, rows in enumerate((slice(0, cut), slice(cut, None))):
        residual = embedded[rows]
        lanes.append(
            Lane(
                index, _context(whole, step.lanes[index], rows), positions[rows], runtime.own(residual),
                runtime.first_norm(residual),
            )
        )  # fmt: skip
    return lanes


def _context(whole: ForwardContext, metadata: Any, rows: slice) -> ForwardContext:
    """The forward context of the whole step, for some of its rows. Experts' layers are counted in each by itself."""
    context = copy.copy(whole)
    context.attn_metadata = dict.fromkeys(whole.attn_metadata, metadata)
    context.slot_mapping = {name: slots[rows] for name, slots in whole.slot_mapping.items()}
    context.is_padding = None if whole.is_padding is None else whole.is_padding[rows]
    return context


def _reduced(runtime: Runtime, lane: Lane, partial: torch.Tensor, norm: Any) -> Pending | PendingOnStream:
    return runtime.reduce_in_lane(partial, lane.residual, Norm(norm.weight, norm.variance_epsilon), lane=lane.index)
