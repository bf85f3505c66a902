"""The tuner on a machine that is not there: one that takes exactly what given costs say."""

from dataclasses import replace

import numpy as np
import pytest
from test_table import KEY

from tokenweave.plan.costs import MeasuredCosts
from tokenweave.plan.curves import Curve
from tokenweave.plan.hardware import Tile, cpu
from tokenweave.plan.planner import Planner
from tokenweave.plan.shape import StepShape
from tokenweave.plan.simulate import simulate
from tokenweave.plan.step import StepPlan
from tokenweave.plan.trial import RankTimes, Trial, TrialResult
from tokenweave.plan.tuning import ROUNDS, Tuner

SIZES = [1, 13, 33, 577, 2048]
LAYERS, CONTEXT = 12, 4096
NETWORK, SHARED = cpu(1, shared_memory=False), cpu(1, shared_memory=True)


def line(fixed: float, per_token: float) -> Curve:
    return Curve.of({0: fixed, 4096: fixed + 4096 * per_token})


TRUE = MeasuredCosts(
    layers=LAYERS, stages={"embed": line(1e-5, 1e-7), "attention": line(5e-5, 2e-6), "mlp": line(9e-5, 4e-6)},
    norm_curve=line(5e-6, 3e-7), all_reduce_curve=line(8e-5, 2.6e-6), reordered_curve=line(2e-4, 2.5e-6),
    fused_curves={None: line(9e-5, 2.5e-6)}, pair_seconds=5e-9, key_seconds=4e-8, head_curve=line(1e-3, 1e-4),
    contention=0.25, grain=16,
)  # fmt: skip


class Machine:
    """Two ranks; the first waits 1 ms for the second at every reduction. slower: woven steps take as much longer."""

    def __init__(self, costs: MeasuredCosts, slower: float = 1.0) -> None:
        self.costs, self.slower, self.asked = costs, slower, []

    def run(self, trial: Trial) -> TrialResult:
        self.asked.append(trial)
        layers = LAYERS if trial.layers is None else trial.layers
        shape, stages = StepShape(trial.counts, trial.contexts), 1 + 2 * layers
        load, costs = shape.load(), replace(self.costs, layers=layers)
        size = (len(trial.plans), trial.rounds)
        steps, head = np.empty(size), np.full(size, costs.head(load.rows))
        compute, reductions = np.full((*size, stages), np.nan), np.full((*size, stages), np.nan)
        for i, plan in enumerate(trial.plans):
            steps[i] = simulate(costs, shape, plan).seconds * (self.slower if plan.mode == "weave" else 1.0)
            if plan.mode == "weave":
                continue
            kinds = ["embed", *["attention", "mlp"] * layers]
            compute[i] = [costs.compute(kind, load) for kind in kinds]
            tokens = load.tokens
            reductions[i] = {
                "serial": costs.all_reduce(tokens) + costs.norm(tokens), "nocomm": costs.norm(tokens),
                "reordered": costs.reordered(tokens), "fused": costs.fused(tokens, None),
            }[plan.mode]  # fmt: skip
        return TrialResult(
            [RankTimes(steps, compute / 2, reductions + 1e-3, head), RankTimes(steps, compute, reductions, head)]
        )


def tuner(machine: Machine, sizes: list[int] = SIZES, hardware=NETWORK, **more) -> Tuner:  # noqa: ANN001, ANN003
    return Tuner(machine, sizes, layers=LAYERS, context=CONTEXT, hardware=hardware, **more)


def test_costs_are_found_again() -> None:
    found = tuner(Machine(TRUE)).measure()
    assert found.pair_seconds == pytest.approx(TRUE.pair_seconds, rel=1e-6)
    assert found.key_seconds == pytest.approx(TRUE.key_seconds, rel=1e-6)
    for tokens in (1, 6, 13, 100, 288, 577, 1024, 2048):
        for shape in (StepShape.prefill(tokens), StepShape.decode(tokens, 700)):
            load = shape.load()
            for stage in ("embed", "attention", "mlp"):
                assert found.compute(stage, load) == pytest.approx(TRUE.compute(stage, load), rel=1e-3), (stage, tokens)
        for name in ("norm", "all_reduce", "reordered"):
            assert getattr(found, name)(tokens) == pytest.approx(getattr(TRUE, name)(tokens), rel=1e-3)
        assert found.fused(tokens, None) == pytest.approx(TRUE.fused(tokens, None), rel=1e-3)
    assert found.head(16) == pytest.approx(TRUE.head(16)) and found.layers == LAYERS and found.grain == 16


@pytest.mark.parametrize("contention", [0.0, 0.1, 0.6])
def test_contention_is_found_again(contention: float) -> None:
    machine = Machine(replace(TRUE, contention=contention))
    tuning = tuner(machine)
    assert tuning.fit(tuning.measure()) == pytest.approx(contention, abs=0.01)


def test_where_nothing_is_hidden_nothing_is_woven() -> None:
    machine = Machine(TRUE)
    table = tuner(machine, hardware=SHARED).tune(KEY)
    assert table.costs.contention == SHARED.contention
    assert not any(plan.mode == "weave" for trial in machine.asked for plan in trial.plans)
    assert Planner("auto", table).plan([2048], [2048]).mode == "fused"


def test_every_mode_that_may_be_chosen_was_run_beside_serial_and_fused() -> None:
    table = tuner(Machine(TRUE)).tune(KEY)
    for size in SIZES:
        plans = [check.plan for check in table.checks if sum(check.counts) == size]
        assert {StepPlan("serial"), StepPlan("fused")} <= set(plans) and len(plans) == len(set(plans))
        assert size == 1 or any(plan.mode == "weave" for plan in plans)
        assert Planner("auto", table).plan([size], [size]) in plans
    assert Planner("auto", table).plan([2048], [2048]).mode == "weave"
    slow = tuner(Machine(TRUE, slower=2.0)).tune(KEY)
    assert all(Planner("auto", slow).plan([size], [size]).mode != "weave" for size in SIZES)


def test_slow_steps_run_some_layers_and_are_told_whole() -> None:
    slow = replace(
        TRUE, stages={stage: Curve.of({0: 0.0, 4096: 20.0}) for stage in TRUE.stages}, pair_seconds=0.0, key_seconds=0.0
    )
    machine = Machine(slow)
    table = tuner(machine).tune(KEY)
    by_size = {sum(trial.counts): trial.layers for trial in machine.asked}
    assert by_size[1] is None and 2 <= by_size[2048] < LAYERS
    for check in table.checks:
        whole = simulate(slow, StepShape(check.counts, check.contexts), check.plan).seconds
        assert check.seconds == pytest.approx(whole, rel=0.01)
    assert all(ROUNDS[0] <= trial.rounds <= ROUNDS[-1] for trial in machine.asked)


def test_regret_is_what_a_scan_would_have_gained() -> None:
    machine = Machine(TRUE)
    tuning = tuner(machine)
    table = tuning.tune(KEY)
    for size in SIZES:
        regret = tuning.regret(table, size)
        assert regret.best_seconds <= regret.chosen_seconds <= 1.02 * regret.best_seconds
        scanned = machine.asked[-1].plans
        assert regret.chosen in scanned and all(0 < plan.cut < size for plan in scanned if plan.mode == "weave")
    blind = replace(table, checks=(), costs=replace(table.costs, contention=SHARED.contention))
    assert tuning.regret(blind, 2048).chosen_seconds > 1.1 * tuning.regret(blind, 2048).best_seconds


@pytest.mark.parametrize("sizes", [SIZES, [1], [2], [3, 3], [5000]])
def test_any_sizes(sizes: list[int]) -> None:
    told: list[str] = []
    machine = Machine(TRUE)
    tuning = tuner(machine, sizes, report=told.append)
    table = tuning.tune(KEY)
    assert len(told) == tuning.reports
    assert {sum(check.counts) for check in table.checks} == set(sizes)
    assert all(max(trial.contexts) <= CONTEXT for trial in machine.asked)


def test_a_context_of_one_token() -> None:
    table = Tuner(Machine(TRUE), [1, 4], layers=LAYERS, context=1, hardware=SHARED).tune(KEY)
    assert table.costs.key_seconds == table.costs.pair_seconds == 0.0


@pytest.mark.parametrize("sizes", [[], [0], [4, -1]])
def test_sizes_must_be_positive(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        tuner(Machine(TRUE), sizes)


def test_cuts_are_rounded_to_the_tiles_of_the_hardware() -> None:
    assert tuner(Machine(TRUE), hardware=replace(NETWORK, tiles=(Tile(64, 64),))).measure().grain == 64
