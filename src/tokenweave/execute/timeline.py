"""What happened when in a step: its stages and operations as events. A step that is not recorded pays nothing for it:
recording puts other stages and another collective into the executor, and takes them out again."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tokenweave.execute.executor import Executor
from tokenweave.execute.steps import made_up_step
from tokenweave.layers.batch import Batch
from tokenweave.layers.cache import KVCache
from tokenweave.models.stage import Stage
from tokenweave.plan.step import StepPlan
from tokenweave.plan.trial import Trial

Kind = Literal["compute", "communication"]
_OPERATIONS = ("all_reduce_add_rms_norm", "all_reduce", "reduce_scatter", "all_gather")


@dataclass(frozen=True)
class Event:
    """stage: its name. begin, end: seconds of time.perf_counter, which all processes of a host share."""

    stage: str
    lane: int
    kind: Kind
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class RecordedStep:
    """One rank's part of a step."""

    plan: StepPlan
    rank: int
    begin: float
    end: float
    events: list[Event]

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def total(self, kind: Kind) -> float:
        return sum(event.seconds for event in self.events if event.kind == kind)

    @property
    def beside(self) -> float:
        """Seconds of communication in which this rank computed; its stages do not overlap, nor do its operations."""
        computed = [event for event in self.events if event.kind == "compute"]
        return sum(
            max(0.0, min(one.end, other.end) - max(one.begin, other.begin))
            for one in self.events
            if one.kind == "communication"
            for other in computed
        )

    @property
    def exposed(self) -> float:
        """Seconds of communication in which it did not."""
        return self.total("communication") - self.beside


@contextmanager
def recorded(executor: Executor) -> Iterator[list[Event]]:
    """The events of the steps that run within, as they end."""
    events: list[Event] = []
    model, collective, stages = executor.model, executor.collective, executor.model.stages
    spy = _Spy(collective, events)
    model.stages = [Stage(stage.name, spy.compute(stage), stage.norm) for stage in stages]
    executor.collective = spy
    try:
        yield events
    finally:
        model.stages, executor.collective = stages, collective


def record_step(executor: Executor, batch: Batch, plan: StepPlan) -> RecordedStep:
    """Run a step and record it, from a barrier to its end. All ranks call it together."""
    with recorded(executor) as events:
        executor.collective.barrier()
        begin = time.perf_counter()
        executor.forward(batch, plan)
        end = time.perf_counter()
    rank = executor.model.shard.rank
    if plan.mode in ("serial", "reordered", "nocomm"):
        events = _with_norms(events, "compute" if plan.mode == "nocomm" else "communication", end)
    return RecordedStep(plan, rank, begin, end, sorted(events, key=lambda event: event.begin))


def record_trial(executor: Executor, cache: KVCache, trial: Trial) -> list[list[RecordedStep]]:
    """One rank's recorded steps of a trial, by round and plan. All ranks call it together."""
    starts = [context - count for count, context in zip(trial.counts, trial.contexts, strict=True)]
    batch = made_up_step(cache, trial.counts, starts, vocab_size=executor.model.config.vocab_size)
    return [[record_step(executor, batch, plan) for plan in trial.plans] for _ in range(trial.rounds)]


class _Spy:
    """A collective that notes when its operations begin and end, and when the stages between them do."""

    def __init__(self, collective: Any, events: list[Event]) -> None:
        self._collective, self._events = collective, events
        self._lane = 0  # whose buffer was asked for last: the executor does so before each stage
        self._stage = ["", ""]  # by lane, that computed last; its operation ends before another of the lane computes
        for name in _OPERATIONS:
            setattr(self, name, self._watched(getattr(collective, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collective, name)

    def buffer(self, lane: int, tokens: int) -> torch.Tensor:
        self._lane = lane
        return self._collective.buffer(lane, tokens)

    def compute(self, stage: Stage) -> Callable[..., torch.Tensor]:
        def run(*args: Any) -> torch.Tensor:
            lane = self._lane
            begin = time.perf_counter()
            partial = stage.compute(*args)
            self._events.append(Event(stage.name, lane, "compute", begin, time.perf_counter()))
            self._stage[lane] = stage.name
            return partial

        return run

    def _watched(self, operation: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: Any, lane: int = 0, **options: Any) -> torch.Tensor:
            begin = time.perf_counter()
            result = operation(*args, lane=lane, **options)
            self._events.append(Event(self._stage[lane], lane, "communication", begin, time.perf_counter()))
            return result

        return run


def _with_norms(events: list[Event], after: Kind, end: float) -> list[Event]:
    """In modes whose norm is not part of an operation it is what happens after events of a kind until the next."""
    found: list[Event] = []
    for event, begin in zip(events, [*(other.begin for other in events[1:]), end], strict=True):
        found.append(event)
        if event.kind == after:
            found.append(Event(f"{event.stage}.norm", event.lane, "compute", event.end, begin))
    return found
