"""Runs a step over the stage list, in the mode its plan names."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from tokenweave.comm.collective import Collective
from tokenweave.config import partition
from tokenweave.execute.clock import StepClock
from tokenweave.execute.gpu_clock import GpuClock
from tokenweave.execute.gpu_stream import CommunicationStream
from tokenweave.execute.graphs import StepGraphs
from tokenweave.execute.modes import REDUCTIONS, SHARDED
from tokenweave.execute.streams import CommunicationThread
from tokenweave.execute.weave import Lane, weave
from tokenweave.layers.batch import Batch
from tokenweave.layers.transfer import sent
from tokenweave.models.decoder import Decoder
from tokenweave.plan.step import StepPlan


class Executor:
    """One rank's executor: the model, the collective, and what a step needs besides: residual, stream and clock.

    collective: open for the model's hidden size and dtype with max_tokens rows, and two lanes if steps are woven.
    graphs: on a GPU, capture steps whose sizes recur and replay them.
    """

    def __init__(self, model: Decoder, collective: Collective, *, max_tokens: int, graphs: bool = False) -> None:
        self.model, self.collective, self.max_tokens = model, collective, max_tokens
        self.device = torch.device(model.device)
        on_gpu = self.device.type == "cuda"
        self.clock: StepClock | GpuClock = GpuClock() if on_gpu else StepClock()
        self.graphs = StepGraphs(self) if graphs and on_gpu else None
        self._processors = torch.cuda.get_device_properties(self.device).multi_processor_count if on_gpu else 0
        self._stream: CommunicationThread | CommunicationStream | None = None  # started by the first woven step
        self._residual = torch.empty(0, model.config.hidden_size, dtype=model.dtype, device=model.device)
        if on_gpu:  # captured steps have its address
            self._stream = CommunicationStream(self.device)
            self._residual = self._residual.new_empty(max_tokens, self._residual.shape[1])

    @torch.inference_mode()
    def forward(self, batch: Batch, plan: StepPlan) -> torch.Tensor:
        """Normed rows of every token, [tokens, hidden], on every rank; valid until the next forward.

        A batch on the CPU is sent to the model's device. Raises ValueError if it has more than max_tokens tokens.
        """
        if batch.num_tokens > self.max_tokens:
            raise ValueError(f"a step takes at most {self.max_tokens} tokens, got {batch.num_tokens}")
        if self.graphs is not None and self.graphs.takes(batch):
            return self.graphs.forward(batch, plan)
        lanes = self.lanes(batch, plan)
        return self.run(sent(lanes, self.device) if self.device.type == "cuda" else lanes, plan)

    def lanes(self, batch: Batch, plan: StepPlan) -> list[Batch]:
        """The batch, or two where it is woven; each knows its matmuls' processors. An empty lane is none."""
        lanes = list(batch.split(plan.cut)) if plan.mode == "weave" else [batch]
        lanes = [lane for lane in lanes if lane.num_tokens] or [batch]
        if not plan.narrow or len(lanes) < 2:
            return lanes
        assert plan.budget is not None
        left = self._processors - plan.budget
        return [
            replace(lane, processors=dict.fromkeys(plan.narrow_matmuls(i), left)) for i, lane in enumerate(lanes)
        ]  # fmt: skip

    def run(self, lanes: Sequence[Batch], plan: StepPlan) -> torch.Tensor:
        """`forward` of what `lanes` made, on the model's device."""
        return self._weave(lanes, plan) if len(lanes) == 2 else self._in_turn(lanes[0], plan)

    def own_rows(self, tokens: int) -> int:
        """How many of a lane's rows this rank owns."""
        own = partition(tokens, self.model.shard.size, self.model.shard.rank)
        return own.stop - own.start

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def _in_turn(self, batch: Batch, plan: StepPlan) -> torch.Tensor:
        """Every mode but weave, and a weave with an empty lane, which is the fused mode."""
        mode = "fused" if plan.mode == "weave" else plan.mode
        tokens = batch.num_tokens
        residual = self._zero_residual([self.own_rows(tokens) if mode in SHARDED else tokens])[0]
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

    def _weave(self, halves: Sequence[Batch], plan: StepPlan) -> torch.Tensor:
        self._stream = self._stream or CommunicationThread()
        residuals = self._zero_residual([self.own_rows(half.num_tokens) for half in halves])
        lanes = [Lane(i, half, rows) for i, (half, rows) in enumerate(zip(halves, residuals, strict=True))]
        self.clock.start()
        return weave(self.model.stages, lanes, self.collective, self._stream, self.clock, plan.budget)

    def _zero_residual(self, rows: list[int]) -> list[torch.Tensor]:
        """Zeros, so many rows for each lane. One memory that grows to the largest step seen."""
        if sum(rows) > self._residual.shape[0]:
            self._residual = self._residual.new_empty(sum(rows), self._residual.shape[1])
        return list(self._residual[: sum(rows)].zero_().split(rows))
