"""Times steps and their parts on a GPU, each as a CUDA graph: what `tune` and the benchmarks measure with."""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tokenweave.comm.collective import Collective
from tokenweave.execute.capture import GraphPool
from tokenweave.execute.executor import Executor
from tokenweave.execute.power import PowerMeter
from tokenweave.execute.steps import made_up_step
from tokenweave.layers.batch import Batch
from tokenweave.layers.cache import KVCache
from tokenweave.layers.transfer import anew, sent
from tokenweave.models.decoder import Decoder
from tokenweave.models.stage import Stage
from tokenweave.plan.step import StepPlan
from tokenweave.plan.trial import RankTimes, Trial

BLOCK_SIZE = 256
DECODES = 64  # requests of one token, each with a block of its own, for which there is room beside
PART_ROUNDS = 7


@dataclass(frozen=True)
class LaneTimes:
    """Seconds of a layer's parts, each lane's alone: compute by stage, and its fused operation."""

    attention: list[float]
    mlp: list[float]
    communication: list[float]


@dataclass(frozen=True)
class Sustained:
    """A step run again and again: seconds of one once the clock has settled, the clock and the power it settles at."""

    seconds: float
    mhz: float
    watts: float


class GpuTrialRunner:
    """One rank's part of every trial, as TrialRunner is on CPUs. All ranks run the same trials in the same order.

    Every plan is captured, and the graphs take turns. Stages are timed alone, as graphs of one kind of stage over the
    layers; what a step takes beyond its stages is shared out among its reductions.
    """

    def __init__(self, model: Decoder, collective: Collective, *, max_tokens: int, cache_tokens: int) -> None:
        self.model, self.collective = model, collective
        self.executor = Executor(model, collective, max_tokens=max_tokens)
        self._stages, self._device = model.stages, torch.device(model.device)
        config, heads = model.config, model.shard.num_kv_heads
        blocks = -(-cache_tokens // BLOCK_SIZE) + DECODES
        shape = (config.num_hidden_layers, blocks, BLOCK_SIZE, heads, config.head_dim)
        self.cache = KVCache.zeros(*shape, model.dtype, model.device)
        self.cache.keys.normal_()  # attention to zeros would be faster than to anything else
        self.cache.values.normal_()
        self._rows = torch.randn(max_tokens, config.hidden_size, dtype=model.dtype, device=model.device)
        self._pool = GraphPool(self._device)
        self._warm: set[Any] = set()

    @torch.inference_mode()
    def run(self, trial: Trial) -> RankTimes:
        layers = self.model.config.num_hidden_layers if trial.layers is None else trial.layers
        batch = self._batch(trial.counts, trial.contexts)
        steps = self._steps(batch, trial.plans, layers, trial.rounds)
        count = 1 + 2 * layers
        shape = (len(trial.plans), trial.rounds)
        if not trial.parts:
            unknown = np.full((*shape, count), np.nan)
            return RankTimes(steps, unknown, unknown, np.zeros(shape))
        whole = self._parts(batch, layers)
        last = sent([batch], self._device)[0].query_offsets[1:].long() - 1
        head = np.full(shape, self._median(lambda: self.model.head(self._rows[last])))
        stages = np.empty((*shape, count))
        stages[..., 0], stages[..., 1::2], stages[..., 2::2] = whole
        between = np.maximum(steps - sum(stages[0, 0]), 0.0) / count
        reductions = np.repeat(between[..., None], count, axis=2)
        for i, plan in enumerate(trial.plans):
            if plan.mode == "weave":
                stages[i], reductions[i] = np.nan, np.nan
        return RankTimes(steps + head, stages, reductions, head)

    @torch.inference_mode()
    def lane_times(self, trial: Trial, layers: int) -> LaneTimes:
        """Of the first plan of the trial. A plan of one lane has lists of one."""
        plan = trial.plans[0]
        lanes = sent(self.executor.lanes(self._batch(trial.counts, trial.contexts), plan), self._device)
        attention, mlp, communication = [], [], []
        for index, lane in enumerate(lanes):
            _, a, m = self._parts(lane, layers, index)
            attention.append(a)
            mlp.append(m)
            communication.append(self._communication(index, lane.num_tokens, plan.budget))
        return LaneTimes(attention, mlp, communication)

    @torch.inference_mode()
    def sustained(self, trial: Trial) -> Sustained:
        """The first plan of the trial, `rounds` times without a pause: what a GPU does that is never idle.

        Side by side with others (`run`) a plan that computes all the time profits from the power that those which wait
        for communication leave it.
        """
        plan, layers = trial.plans[0], self.model.config.num_hidden_layers if trial.layers is None else trial.layers
        with self._only(layers):
            lanes = sent(self.executor.lanes(self._batch(trial.counts, trial.contexts), plan), self._device)
            graph = self._step_graph(lanes, plan, layers)
            with PowerMeter(self._device) as meter:
                seconds = self._times([graph], trial.rounds)[0]
        return Sustained(float(np.median(seconds[trial.rounds // 2 :])), meter.mhz, meter.watts)

    def close(self) -> None:
        self.executor.close()

    def _batch(self, counts: Sequence[int], contexts: Sequence[int]) -> Batch:
        starts = [context - count for count, context in zip(counts, contexts, strict=True)]
        return made_up_step(self.cache, counts, starts, vocab_size=self.model.config.vocab_size)

    def _steps(self, batch: Batch, plans: Sequence[StepPlan], layers: int, rounds: int) -> np.ndarray:
        """Seconds, [plans, rounds]."""
        with self._only(layers):
            # a graph does not keep the memory that it reads: the lanes must outlive it
            lanes = [sent(self.executor.lanes(batch, plan), self._device) for plan in plans]
            graphs = [self._step_graph(own, plan, layers) for own, plan in zip(lanes, plans, strict=True)]
            return self._times(graphs, rounds)

    def _step_graph(self, lanes: list[Batch], plan: StepPlan, layers: int) -> torch.cuda.CUDAGraph:
        sizes = tuple((lane.num_tokens, lane.limits, *lane.processors.items()) for lane in lanes)
        shapes = (sizes, plan.mode)
        # whatever compiles or allocates does so on the first layers already
        with self._only(min(layers, 1)):
            if shapes not in self._warm:
                self.executor.run([anew(lane) for lane in lanes], plan)
                self._warm.add(shapes)
        return self._pool.capture(lambda: self.executor.run([anew(lane) for lane in lanes], plan))[0]

    def _parts(self, batch: Batch, layers: int, lane: int = 0) -> tuple[float, float, float]:
        """Seconds of the embedding, one attention and one MLP of this batch alone, medians over graphs of `layers`."""
        there = sent([batch], self._device)[0]
        out, rows = self.collective.buffer(lane, there.num_tokens), self._rows[: there.num_tokens]

        def chain(stages: Sequence[Stage]) -> Callable[[], None]:
            def run() -> None:
                own = anew(there)
                for stage in stages:
                    stage.compute(rows, own, out)

            return run

        stages = self._stages[: 1 + 2 * layers]
        parts = (stages[:1], stages[1::2], stages[2::2])
        return tuple(self._median(chain(part)) / max(len(part), 1) for part in parts)  # type: ignore[return-value]

    def _communication(self, lane: int, tokens: int, budget: int | None, calls: int = 8) -> float:
        """Seconds of one fused operation."""
        partial, norm = self.collective.buffer(lane, tokens), self._stages[0].norm
        residual = torch.zeros_like(self._rows[: self.executor.own_rows(tokens)])

        def run() -> None:
            for _ in range(calls):
                self.collective.all_reduce_add_rms_norm(
                    partial, residual, norm.weight, norm.eps, lane=lane, budget=budget
                )

        return self._median(run) / calls

    def _median(self, run: Callable[[], object]) -> float:
        run()
        return float(np.median(self._times([self._pool.capture(run)[0]], PART_ROUNDS)))

    def _times(self, graphs: Sequence[torch.cuda.CUDAGraph], rounds: int) -> np.ndarray:
        """Seconds of replays, [graphs, rounds], in another order each round: behind a graph that draws much power the
        next one runs at a lower clock, 8 % at 8192 tokens of Llama-70B on an H200."""
        count = len(graphs)
        events = [[[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)] for _ in graphs]
        self.collective.barrier()
        for graph in graphs[:1]:
            graph.replay()  # the processors' clocks are up when the first is timed
        draw = np.random.default_rng(0)
        for round_ in range(rounds):
            for which in draw.permutation(count).tolist():
                begin, end = events[which][round_]
                begin.record()
                graphs[which].replay()
                end.record()
        torch.cuda.synchronize()
        self.collective.check()
        return np.array([[begin.elapsed_time(end) / 1e3 for begin, end in row] for row in events])

    @contextmanager
    def _only(self, layers: int) -> Any:
        before = self.model.stages
        self.model.stages = self._stages[: 1 + 2 * layers]
        try:
            yield
        finally:
            self.model.stages = before
