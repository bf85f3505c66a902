"""Trials on real ranks: what is timed is what was asked for."""

import functools
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from execute.weave_ranks import MODELS, build

from tokenweave.comm import Group, launch
from tokenweave.execute.measure import TrialRunner
from tokenweave.plan.step import StepPlan
from tokenweave.plan.trial import RankTimes, Trial, TrialResult

PLANS = tuple(StepPlan(mode) for mode in ("serial", "fused", "reordered", "nocomm")) + (StepPlan("weave", 3),)
TRIALS = [
    Trial(counts=(13,), contexts=(13,), plans=PLANS, rounds=4),
    Trial(counts=(1, 5, 1), contexts=(9, 5, 40), plans=PLANS, rounds=3, layers=2),
    Trial(counts=(1,), contexts=(1,), plans=PLANS[:1], rounds=1, layers=1),
    Trial(counts=(4,), contexts=(4,), plans=(PLANS[1], PLANS[1], PLANS[4]), rounds=2, layers=0),
]


def run_trials(group: Group) -> dict[str, Any]:
    model = build(MODELS[0], group)
    stages, seen = model.stages, []
    with group.open_collective(model.config.hidden_size, 64, torch.float32, 2) as collective:
        with closing(TrialRunner(model, collective, max_tokens=64, cache_tokens=200)) as runner:
            forward = runner.executor.forward

            def watched(batch: Any, plan: StepPlan) -> torch.Tensor:
                rows = forward(batch, plan)
                seen.append((plan, batch.num_tokens, len(model.stages), rows.isfinite().all().item()))
                return rows

            runner.executor.forward = watched  # type: ignore[method-assign]
            times = [runner.run(trial) for trial in TRIALS]
            with pytest.raises(ValueError, match="blocks"):
                runner.run(Trial(counts=(1,), contexts=(500,), plans=PLANS[:1], rounds=1))
    return {"times": times, "seen": seen, "restored": model.stages is stages}


@functools.cache
def results() -> list[dict[str, Any]]:
    return launch(run_trials, 2, "shared_memory", threads=1)


def times(trial: int) -> list[RankTimes]:
    return [found["times"][trial] for found in results()]


def test_every_plan_runs_every_round_and_no_plan_always_behind_the_same() -> None:
    for found in results():
        seen = iter(found["seen"])
        for trial in TRIALS:
            rounds = [[next(seen) for _ in trial.plans] for _ in range(trial.rounds)]
            stages = 1 + 2 * (3 if trial.layers is None else trial.layers)
            for ran in rounds:
                assert sorted(map(str, (plan for plan, *_ in ran))) == sorted(map(str, trial.plans))
                assert {(tokens, count, finite) for _, tokens, count, finite in ran} == {
                    (sum(trial.counts), stages, True)
                }
            if len(trial.plans) > 2 and trial.rounds > 1:
                assert rounds[0][0][0] != rounds[1][0][0] or trial.plans[0] == trial.plans[1]
        assert found["restored"]


@pytest.mark.parametrize("index", range(len(TRIALS)))
def test_times_add_up(index: int) -> None:
    trial = TRIALS[index]
    for rank in times(index):
        assert rank.steps.shape == rank.head.shape == (len(trial.plans), trial.rounds)
        assert (rank.head > 0).all() and (rank.steps > rank.head).all()
        for i, plan in enumerate(trial.plans):
            parts = np.concatenate((rank.stages[i], rank.reductions[i]), axis=1)
            if plan.mode == "weave":
                assert np.isnan(parts).all()
            else:
                assert (parts > 0).all() and (parts.sum(1) + rank.head[i] <= rank.steps[i]).all()


def test_a_result_of_real_ranks() -> None:
    result = TrialResult(times(0))
    assert all(result.stage(kind) > 0 for kind in ("embed", "attention", "mlp"))
    assert all(result.step(i) > 0 and result.unrest(i) >= 0 for i in range(len(PLANS)))
    assert all(result.reduction(i) > 0 for i in range(4)) and result.head() > 0
