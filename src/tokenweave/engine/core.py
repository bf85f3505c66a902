"""The engine's core, in rank 0's process: schedule a step, run it, sample, hand out tokens."""

import time
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from tokenweave.engine.events import NO_TOKEN, REASONS, StepEvents
from tokenweave.engine.request import Request
from tokenweave.engine.sampler import Sampler
from tokenweave.engine.scheduler import PlanStep, Scheduled, Scheduler
from tokenweave.engine.stats import StepStats
from tokenweave.engine.step import Step

_STOP, _LENGTH, _NOT_FINITE = (REASONS.index(reason) for reason in ("stop", "length", "not finite"))


@dataclass(frozen=True)
class StepOutput:
    """Rank 0's results of a step. Of the sampled rows logits, [S, V], or best, the most likely tokens, int32 [S].
    scores: float32 [C] of the scored ones. Times in seconds: what the ranks computed, communicated, and communicated
    under compute. graph_memory: bytes, of this rank."""

    logits: torch.Tensor | None
    best: np.ndarray | None
    scores: np.ndarray | None
    compute: float = 0.0
    communication: float = 0.0
    hidden: float = 0.0
    graph_memory: int = 0


class Runner(Protocol):
    """Runs a step on all ranks."""

    def run(self, step: Step) -> StepOutput: ...


class EngineCore:
    """Requests in, tokens out, one step at a time. Knows nothing of processes."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        plan: PlanStep,
        *,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.scheduler, self.runner, self.plan = scheduler, runner, plan
        self.sampler = Sampler(len(scheduler.slots.requests))
        slots = len(scheduler.slots.requests)
        self._eos = np.array(eos_token_ids, dtype=np.int32)
        self._limit = np.zeros(slots, dtype=np.int32)
        self._heeds_eos = np.zeros(slots, dtype=bool)
        self._stop_ids: dict[int, tuple[int, ...]] = {}  # by slot, for those that have any
        self._scores: dict[int, list[np.ndarray]] = {}  # by ident

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def cancel(self, ident: int) -> None:
        """Forget a request; one that is not there, finished perhaps, is no error."""
        self.scheduler.cancel(ident)
        self._scores.pop(ident, None)

    def step(self) -> StepEvents:
        """Run one step. There must be something to run."""
        began = time.perf_counter()
        scheduled = self.scheduler.schedule(self.plan)
        assert scheduled is not None, "nothing to run"
        for slot in scheduled.admitted:
            self._assign(slot)
        if self.sampler.greedy(scheduled.sampled_slots):
            scheduled = replace(scheduled, step=replace(scheduled.step, best_only=True))
        running = time.perf_counter()
        output = self.runner.run(scheduled.step)
        ran = time.perf_counter()
        self.scheduler.commit(scheduled)
        scores = self._score(scheduled, output)
        idents, token_ids, reasons, logprobs = self._sample(scheduled, output)
        plan = scheduled.step.plan
        stats = StepStats(
            tokens=len(scheduled.step.token_ids),
            requests=len(scheduled.step.slots),
            waiting=len(self.scheduler.waiting),
            mode=plan.mode,
            cut=plan.cut,
            budget=plan.budget,
            compute=output.compute,
            communication=output.communication,
            hidden=output.hidden,
            exposed=output.communication - output.hidden,
            host=time.perf_counter() - began - (ran - running),
            reused=scheduled.reused,
            preempted=scheduled.preempted,
            free_blocks=self.scheduler.pool.available,
            graph_memory=output.graph_memory,
        )
        return StepEvents(idents, token_ids, reasons, logprobs, scores, stats)

    def _assign(self, slot: int) -> None:
        request = self.scheduler.slots.request(slot)
        self._limit[slot] = request.limit
        self._stop_ids.pop(slot, None)
        if request.params is None:
            self._scores[request.ident] = []  # afresh after a preemption
        else:
            self.sampler.assign(slot, request.params, request.seed)
            self._heeds_eos[slot] = not request.params.ignore_eos
            if request.params.stop_token_ids:
                self._stop_ids[slot] = tuple(request.params.stop_token_ids)

    def _sample(
        self, scheduled: Scheduled, output: StepOutput
    ) -> tuple[list[int], list[int], list[int], dict[int, dict[int, float]]]:
        slots, chosen = self.scheduler.slots, scheduled.sampled_slots
        if not len(chosen):
            return [], [], [], {}
        if output.best is not None:
            token_ids, logprobs = output.best, {}
        else:
            assert output.logits is not None
            sampled = self.sampler.sample(output.logits, chosen, slots.length[chosen] - slots.prompt_length[chosen])
            token_ids, logprobs = sampled.token_ids, sampled.logprobs
        slots.append(chosen, token_ids)
        reasons = np.where(slots.length[chosen] >= self._limit[chosen], _LENGTH, 0).astype(np.int8)
        reasons[np.isin(token_ids, self._eos) & self._heeds_eos[chosen]] = _STOP
        if self._stop_ids:
            for row, slot in enumerate(chosen.tolist()):
                if token_ids[row] in self._stop_ids.get(slot, ()):
                    reasons[row] = _STOP
        reasons[token_ids == NO_TOKEN] = _NOT_FINITE
        idents = slots.ident[chosen].tolist()
        for row in np.flatnonzero(reasons).tolist():
            self.scheduler.finish(int(chosen[row]))
        return idents, token_ids.tolist(), reasons.tolist(), logprobs

    def _score(self, scheduled: Scheduled, output: StepOutput) -> dict[int, np.ndarray]:
        """Keep the step's scores; those of the requests that are through."""
        slots = self.scheduler.slots
        if output.scores is not None:
            for slot in set(scheduled.scored_slots.tolist()):
                part = output.scores[scheduled.scored_slots == slot]
                self._scores[slots.request(slot).ident].append(part)
        finished = {}
        step_slots = scheduled.step.slots
        for slot in step_slots[slots.scores[step_slots]].tolist():
            if slots.computed[slot] == slots.length[slot]:
                ident = self.scheduler.finish(slot).ident
                finished[ident] = np.concatenate(self._scores.pop(ident))
        return finished
