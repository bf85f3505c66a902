"""Steps that are run to be timed: what is asked of the ranks, and what they answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tokenweave.plan.costs import STAGES
from tokenweave.plan.shape import StepShape
from tokenweave.plan.step import StepPlan


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One step, run `rounds` times under each plan; in every round the plans take turns.

    counts, contexts: of each request, as in `StepShape`. layers: of the model that run; None for all of them. The
    head, on the last token of every request, always runs. parts: whether stages and head are wanted too; where they are
    timed apart from the steps, a trial without them is shorter.
    """

    counts: tuple[int, ...]
    contexts: tuple[int, ...]
    plans: tuple[StepPlan, ...]
    rounds: int
    layers: int | None = None
    parts: bool = True

    @staticmethod
    def of(
        shape: StepShape, plans: Sequence[StepPlan], *, rounds: int, layers: int | None = None, parts: bool = True
    ) -> "Trial":
        counts, contexts = tuple(shape.counts.tolist()), tuple(shape.contexts.tolist())
        return Trial(counts=counts, contexts=contexts, plans=tuple(plans), rounds=rounds, layers=layers, parts=parts)


@dataclass(frozen=True)
class RankTimes:
    """Seconds on one rank. steps: [plans, rounds], from a barrier to the end. stages, reductions: [plans, rounds,
    stages], not a number where a plan weaves. head: [plans, rounds]."""

    steps: np.ndarray
    stages: np.ndarray
    reductions: np.ndarray
    head: np.ndarray


class TrialResult:
    """Seconds of a trial, all ranks taken together, in the order of its plans."""

    def __init__(self, ranks: Sequence[RankTimes]) -> None:
        self.steps = np.max([rank.steps for rank in ranks], axis=0)  # [plans, rounds]
        self._stages = np.max([rank.stages for rank in ranks], axis=0)
        # What a rank measures includes its waiting for the others; the last to arrive waits for nobody.
        self._reductions = np.min([rank.reductions for rank in ranks], axis=0)
        self._head = np.max([rank.head for rank in ranks], axis=0)

    def step(self, plan: int) -> float:
        """Median seconds of a step."""
        return float(np.median(self.steps[plan]))

    def paired(self, plan: int, other: int) -> float:
        """Seconds of a step by its median ratio to the other plan's of the same round: what the machine does besides
        falls on both."""
        return self.step(other) * float(np.median(self.steps[plan] / self.steps[other]))

    def unrest(self, plan: int) -> float:
        """By what share the median step takes longer than the fastest: more than a few percent are somebody else's."""
        return float(np.median(self.steps[plan]) / self.steps[plan].min()) - 1

    def stage(self, kind: str) -> float:
        """Median seconds of one stage of a kind of STAGES, on the slowest rank, over all plans that do not weave."""
        first = {"embed": slice(0, 1), "attention": slice(1, None, 2), "mlp": slice(2, None, 2)}
        assert kind in STAGES
        return float(np.nanmedian(self._stages[:, :, first[kind]]))

    def reduction(self, plan: int) -> float:
        """Median seconds of what happens between two stages."""
        return float(np.median(self._reductions[plan]))

    def head(self) -> float:
        return float(np.median(self._head))


class Trials(Protocol):
    """Runs trials on all ranks."""

    def run(self, trial: Trial) -> TrialResult: ...
