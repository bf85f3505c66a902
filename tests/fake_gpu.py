"""Steps on a GPU that never was: seconds by a formula, so that the best plan is known."""

import numpy as np

from tokenweave.plan.step import StepPlan
from tokenweave.plan.table import TuneKey
from tokenweave.plan.trial import RankTimes, Trial, TrialResult

KEY = TuneKey(
    device="some GPU", processors=132, threads=0, hosts=1, model=(8,), tensor_parallel_size=8, dtype="bfloat16",
    collective="symmetric", version="1", link_latency=1e-5, link_bandwidth=1e11,
)  # fmt: skip
OTHERS = {"serial": 1.4, "reordered": 1.5, "fused": 1.3, "nocomm": 1.1}
WORSE = 0b11110000  # matmuls that lose where they count on fewer processors; the others win


class FakeTrials:
    """Woven steps are fastest with the first lane `share` of the tokens, on `budget` processors; below `least` tokens
    weaving loses. asked: every trial."""

    def __init__(self, *, share: float = 0.4, budget: int = 6, least: int = 512) -> None:
        self.share, self.budget, self.least = share, budget, least
        self.asked: list[Trial] = []

    def seconds(self, plan: StepPlan, tokens: int, layers: int) -> float:
        base = (1e-5 + tokens * 1e-7) * (layers + 0.5)  # half a layer for what is outside of them
        if plan.mode != "weave":
            return base * OTHERS[plan.mode] * (1 + 0.01 * abs((plan.budget or 16) - 16) * (plan.mode == "fused"))
        assert plan.budget is not None
        won, lost = (bin(plan.narrow & bits).count("1") for bits in (0xFF ^ WORSE, WORSE))
        factor = 1 + 0.3 * abs(plan.cut / tokens - self.share) + 0.01 * abs(plan.budget - self.budget)
        return base * factor * (1 - 0.004 * won + 0.004 * lost) * (1.5 if tokens < self.least else 1.0)

    def run(self, trial: Trial) -> TrialResult:
        self.asked.append(trial)
        tokens, layers = sum(trial.counts), 8 if trial.layers is None else trial.layers
        steps = np.array([[self.seconds(plan, tokens, layers)] * trial.rounds for plan in trial.plans])
        parts = np.full((*steps.shape, 1 + 2 * layers), 1e-6 if trial.parts else np.nan)
        return TrialResult([RankTimes(steps, parts, parts, np.full(steps.shape, 1e-6))])
