"""Runs steps to time them, on one rank: what `tune` and `bench step` start in every rank process."""

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tokenweave.comm.collective import Collective
from tokenweave.comm.group import Group
from tokenweave.comm.links import Links
from tokenweave.execute.executor import Executor
from tokenweave.execute.gpu_trials import GpuTrialRunner
from tokenweave.execute.machine import hardware_here, tune_key
from tokenweave.execute.steps import made_up_step
from tokenweave.layers.batch import Batch
from tokenweave.layers.cache import KVCache
from tokenweave.layers.kernels.warm_up import warm_up
from tokenweave.models.decoder import Decoder
from tokenweave.models.loading import load_model
from tokenweave.models.random_weights import random_model
from tokenweave.models.stage import Stage
from tokenweave.plan.hardware import Hardware
from tokenweave.plan.step import StepPlan
from tokenweave.plan.table import TuneKey
from tokenweave.plan.trial import RankTimes, Trial

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Here:
    """The first message of each rank: where it runs."""

    key: TuneKey
    hardware: Hardware


def main(
    group: Group, links: Links, directory: Path, dtype_name: str, max_tokens: int, cache_tokens: int, weights: str
) -> None:
    """Load this rank's part, then run every `Trial` that comes and answer with `RankTimes`, until None comes."""
    dtype = getattr(torch, dtype_name)
    on_gpu = group.device.type == "cuda"
    make = load_model if weights == "checkpoint" else random_model
    model = make(directory, rank=group.rank, size=group.size, dtype=dtype, device=str(group.device))
    if not on_gpu:
        warm_up(dtype)
    runner_type: type[TrialRunner] | type[GpuTrialRunner] = GpuTrialRunner if on_gpu else TrialRunner
    with group.open_collective(model.config.hidden_size, max_tokens, dtype, 2) as collective:
        key = tune_key(group, collective, model, max_tokens=max_tokens)
        with closing(runner_type(model, collective, max_tokens=max_tokens, cache_tokens=cache_tokens)) as runner:
            links.parent.send(Here(key, hardware_here(group)))
            while (trial := links.parent.recv()) is not None:
                links.parent.send(runner.run(trial))


class TrialRunner:
    """One rank's part of every trial. All ranks run the same trials in the same order."""

    def __init__(self, model: Decoder, collective: Collective, *, max_tokens: int, cache_tokens: int) -> None:
        self.model, self.collective = model, collective
        self.executor = Executor(model, collective, max_tokens=max_tokens)
        self._stages = model.stages
        self._marks: list[float] = []
        config, heads = model.config, model.shard.num_kv_heads
        shape = (config.num_hidden_layers, -(-cache_tokens // BLOCK_SIZE), BLOCK_SIZE, heads, config.head_dim)
        self.cache = KVCache.zeros(*shape, model.dtype, model.device)
        self.cache.keys.normal_()  # attention to zeros would be faster than to anything else
        self.cache.values.normal_()

    @torch.inference_mode()
    def run(self, trial: Trial) -> RankTimes:
        count = len(self._stages) if trial.layers is None else 1 + 2 * trial.layers
        self.model.stages = [self._marked(stage) for stage in self._stages[:count]]
        starts = [context - count for count, context in zip(trial.counts, trial.contexts, strict=True)]
        batch = made_up_step(self.cache, trial.counts, starts, vocab_size=self.model.config.vocab_size)
        last = batch.query_offsets[1:].long() - 1
        shape = (len(trial.plans), trial.rounds)
        steps, head = np.empty(shape), np.empty(shape)
        stages, reductions = np.full((*shape, count), np.nan), np.full((*shape, count), np.nan)
        for round_ in range(trial.rounds):
            for turn in range(len(trial.plans)):
                plan = (turn + round_) % len(trial.plans)  # no plan always runs behind the same other
                began, ran, ended = self._step(batch, trial.plans[plan], last)
                steps[plan, round_], head[plan, round_] = ended - began, ended - ran
                if len(self._marks) == 2 * count:
                    marks = np.array([*self._marks, ran])
                    stages[plan, round_] = marks[1::2] - marks[:-1:2]
                    reductions[plan, round_] = marks[2::2] - marks[1::2]
        return RankTimes(steps, stages, reductions, head)

    def close(self) -> None:
        self.model.stages = self._stages
        self.executor.close()

    def _step(self, batch: Batch, plan: StepPlan, last: torch.Tensor) -> tuple[float, float, float]:
        """When it began, had its normed rows, and had the logits of the `last` ones."""
        self._marks.clear()
        self.collective.barrier()
        began = time.perf_counter()
        normed = self.executor.forward(batch, plan)
        ran = time.perf_counter()
        self.model.head(normed[last])
        return began, ran, time.perf_counter()

    def _marked(self, stage: Stage) -> Stage:
        """The stage, telling when it begins and ends."""

        def compute(normed: torch.Tensor | None, batch: Batch, out: torch.Tensor | None) -> torch.Tensor:
            self._marks.append(time.perf_counter())
            partial = stage.compute(normed, batch, out)
            self._marks.append(time.perf_counter())
            return partial

        return Stage(stage.name, compute, stage.norm)
