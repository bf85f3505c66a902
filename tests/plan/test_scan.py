"""The scan against a GPU whose best plan is known."""

import pytest
from fake_gpu import FakeTrials

from tokenweave.plan.scan import FEWEST, GRAIN, Scan
from tokenweave.plan.shape import StepShape


@pytest.mark.parametrize("tokens", [512, 577, 1024, 4096, 8192, 32768])
@pytest.mark.parametrize(("share", "budget"), [(0.4, 6), (0.6, 12), (0.5, 8)])
def test_finds_the_best_cut_budget_and_matmuls(tokens: int, share: float, budget: int) -> None:
    trials = FakeTrials(share=share, budget=budget)
    found = Scan(trials).best(StepShape.prefill(tokens))
    best = found.best
    grain = GRAIN if tokens <= 8192 else 1024
    assert abs(best.cut - share * tokens) <= max(grain, FEWEST)
    assert (best.budget, best.narrow) == (budget, 0b00001111)
    assert [seconds for _, seconds in found.plans] == sorted(seconds for _, seconds in found.plans)
    for trial in trials.asked:
        assert not trial.parts
        assert all(FEWEST <= plan.cut <= tokens - FEWEST for plan in trial.plans)


@pytest.mark.parametrize("tokens", [0, 1, 13, 255])
def test_few_tokens_are_not_cut(tokens: int) -> None:
    trials = FakeTrials()
    assert Scan(trials).best(StepShape.prefill(tokens)).plans == [] and not trials.asked


def test_every_cut_is_run_with_every_budget() -> None:
    trials = FakeTrials(share=0.25, budget=4)
    found = Scan(trials).every(StepShape.prefill(1024), budgets=(4, 16))
    assert (found.best.cut, found.best.budget) == (256, 4)
    tried = {(plan.cut, plan.budget) for trial in trials.asked for plan in trial.plans}
    assert tried == {(cut, budget) for cut in range(64, 1024, 64) for budget in (4, 16)}
