"""Whole steps as CUDA graphs, woven ones too: captured once for a size, replayed for every step of that size."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tokenweave.execute.capture import GraphPool
from tokenweave.layers.batch import Batch, Limits
from tokenweave.layers.padding import bucket, pad_requests, pad_tokens
from tokenweave.layers.paths import fits_gpu_pages
from tokenweave.layers.transfer import anew, bytes_of, sent
from tokenweave.plan.step import StepPlan

if TYPE_CHECKING:
    from tokenweave.execute.executor import Executor

KEPT = 128  # graphs; one of 80 woven layers takes some 10 MB of the driver's memory beside the pool


@dataclass(frozen=True)
class Size:
    """What two steps have in common that one graph serves. cache: its address, since the graph holds that.
    Lanes: tokens, requests, table width, limits."""

    plan: StepPlan
    cache: int
    lanes: tuple[tuple[int, int, int, Limits], ...]


@dataclass
class _Captured:
    """memory: where the lanes' arrays are put before each replay. Before the capture graph and rows are None."""

    memory: torch.Tensor
    graph: torch.cuda.CUDAGraph | None = None
    rows: torch.Tensor | None = None


class StepGraphs:
    """The captured steps of an executor.

    A step is padded to a size that recurs. The first of a size runs as it is, which compiles and allocates whatever it
    needs; the second is captured, and replayed from then on. All ranks run the same steps, so they capture the same
    ones. The memory of all graphs is one pool: one step runs at a time.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor, self._device = executor, executor.device
        self._known: OrderedDict[Size, _Captured] = OrderedDict()
        self._pool = GraphPool(self._device)
        self.pool_bytes = self._pool.bytes  # GPU memory of the pool that the graphs compute in
        self._capturable = all(getattr(stage.compute, "capturable", True) for stage in executor.model.stages)
        self._limit = executor.model.config.max_position_embeddings

    @property
    def count(self) -> int:
        """Graphs captured and kept."""
        return sum(captured.graph is not None for captured in self._known.values())

    def takes(self, batch: Batch) -> bool:
        """Whether such a step can be captured: what its stages launch must not depend on what is in it."""
        if batch.cache is None or not fits_gpu_pages(batch.cache.block_size):
            return False
        return self._capturable and batch.token_ids.is_cpu

    def forward(self, batch: Batch, plan: StepPlan) -> torch.Tensor:
        """Executor.forward of a batch on the CPU."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("steps are captured by the executor itself; run it outside of a capture")
        lanes = self._padded(batch, plan)
        assert batch.cache is not None
        size = Size(plan, batch.cache.keys.data_ptr(), tuple(_size(lane) for lane in lanes))
        captured = self._known.get(size)
        if captured is None:
            captured = self._known[size] = _Captured(
                torch.empty(bytes_of(lanes), dtype=torch.uint8, device=self._device)
            )
            rows = self._executor.run(sent(lanes, self._device, captured.memory), plan)
            self._forget()
        else:
            self._known.move_to_end(size)
            static = sent(lanes, self._device, captured.memory)
            if captured.graph is None:
                # anew, so that what a batch computes of itself on the device is part of the graph
                fresh = [anew(lane) for lane in static]
                captured.graph, captured.rows = self._pool.capture(lambda: self._executor.run(fresh, plan))
                self.pool_bytes = self._pool.bytes
            clock = self._executor.clock
            clock.start()
            captured.graph.replay()
            clock.computed()
            assert captured.rows is not None
            rows = captured.rows
        return rows[: batch.num_tokens]

    def _padded(self, batch: Batch, plan: StepPlan) -> list[Batch]:
        tokens = min(bucket(batch.num_tokens), self._executor.max_tokens)
        lanes = self._executor.lanes(pad_tokens(batch, tokens), plan)
        return [pad_requests(lane, context_limit=self._limit) for lane in lanes]

    def _forget(self) -> None:
        while len(self._known) > KEPT:
            self._known.popitem(last=False)


def _size(lane: Batch) -> tuple[int, int, int, Limits]:
    assert lane.block_tables is not None and lane.limits_given is not None
    return lane.num_tokens, lane.num_requests, lane.block_tables.shape[1], lane.limits_given
