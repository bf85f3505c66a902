"""Tuning of a GPU whose best plans are known."""

import json

from fake_gpu import KEY, FakeTrials

from tokenweave.plan.gpu_tuning import GpuTuner
from tokenweave.plan.hardware import hardware
from tokenweave.plan.planner import Planner
from tokenweave.plan.table import TunedTable


def tuner(trials: FakeTrials, sizes: list[int]) -> GpuTuner:
    return GpuTuner(trials, sizes, layers=8, context=8192, hardware=hardware("h200"), report=lambda what: None)


def test_what_was_fastest_is_chosen_and_survives_a_file() -> None:
    trials = FakeTrials(share=0.375, budget=8)
    table = tuner(trials, [1, 128, 256, 1024]).tune(KEY)
    table = TunedTable.from_json(json.loads(json.dumps(table.to_json())))
    planner = Planner("auto", table)
    assert planner.plan([1], [1]).mode == planner.plan([256], [256]).mode == "fused"
    plan = planner.plan([1024], [1024])
    assert (plan.mode, plan.cut, plan.budget, plan.narrow) == ("weave", 384, 8, 0b1111)
    whole = {check.plan: check.seconds for check in table.checks if sum(check.counts) == 1024}
    assert abs(whole[plan] / trials.seconds(plan, 1024, 8) - 1) < 1e-9  # all layers, though fewer were run
    assert {budget for budget in table.costs.budgets} == set(hardware("h200").budgets)


def test_regret_is_against_every_cut() -> None:
    trials = FakeTrials(share=0.375, budget=8)
    made = tuner(trials, [1024])
    table = made.tune(KEY)
    regret = made.regret(table, 1024)
    assert regret.chosen == regret.best and regret.chosen_seconds == regret.best_seconds
    trials.share = 0.75  # the device has changed since
    worse = made.regret(table, 1024)
    assert worse.best.cut == 768 and worse.chosen_seconds > 1.05 * worse.best_seconds
