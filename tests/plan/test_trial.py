import numpy as np
import pytest

from tokenweave.plan.shape import StepShape
from tokenweave.plan.step import StepPlan
from tokenweave.plan.trial import RankTimes, Trial, TrialResult

PLANS = (StepPlan("fused"), StepPlan("weave", 2))


def rank(seed: int) -> RankTimes:
    """Two plans, five rounds, two layers; the second plan weaves."""
    draw = np.random.default_rng(seed)
    stages, reductions = draw.random((2, 5, 5)), draw.random((2, 5, 5))
    stages[1], reductions[1] = np.nan, np.nan
    return RankTimes(draw.random((2, 5)), stages, reductions, draw.random((2, 5)))


def test_the_slowest_rank_computes_and_the_last_to_arrive_communicates() -> None:
    ranks = [rank(seed) for seed in range(3)]
    result = TrialResult(ranks)
    for plan in (0, 1):
        assert result.step(plan) == np.median([max(r.steps[plan, i] for r in ranks) for i in range(5)])
    assert result.head() == np.median([max(r.head[p, i] for r in ranks) for p in (0, 1) for i in range(5)])
    for kind, where in (("embed", [0]), ("attention", [1, 3]), ("mlp", [2, 4])):
        slowest = [max(r.stages[0, i, s] for r in ranks) for i in range(5) for s in where]
        assert result.stage(kind) == np.median(slowest)
    assert result.reduction(0) == np.median(
        [min(r.reductions[0, i, s] for r in ranks) for i in range(5) for s in range(5)]
    )


def test_paired_times_do_not_see_what_falls_on_both() -> None:
    quiet = np.array([[1.0] * 5, [1.2] * 5])
    busy = quiet * np.array([1.0, 1.0, 1.0, 3.0, 9.0])
    nothing = np.zeros((2, 5, 1))
    result = TrialResult([RankTimes(busy, nothing, nothing, np.zeros((2, 5)))])
    assert result.paired(1, 0) == pytest.approx(1.2) and result.paired(0, 0) == 1.0
    assert result.unrest(0) == 0.0
    rising = TrialResult([RankTimes(quiet * np.arange(1, 6), nothing, nothing, np.zeros((2, 5)))])
    assert rising.unrest(0) == 2.0


def test_a_trial_of_a_shape() -> None:
    trial = Trial.of(StepShape([3, 1], [5, 1]), PLANS, rounds=7, layers=2)
    assert trial == Trial(counts=(3, 1), contexts=(5, 1), plans=PLANS, rounds=7, layers=2)
    assert Trial.of(StepShape.prefill(3), PLANS, rounds=1).layers is None
