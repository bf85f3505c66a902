"""Plans by what was run."""

import pytest
from fake_gpu import KEY
from test_table import COSTS

from tokenweave.plan.nearest import nearest_plan
from tokenweave.plan.planner import Planner
from tokenweave.plan.shape import StepShape
from tokenweave.plan.step import StepPlan
from tokenweave.plan.table import Check, TunedTable

SERIAL, FUSED = StepPlan("serial"), StepPlan("fused", budget=16)
RUNS = {
    16: {SERIAL: 1.0, FUSED: 1.004},  # a tie: fused
    256: {SERIAL: 2.0, FUSED: 2.1, StepPlan("weave", 128, 8): 2.2},
    1024: {SERIAL: 4.0, FUSED: 3.9, StepPlan("weave", 384, 8, 5): 3.0, StepPlan("weave", 512, 4): 3.1},
    4096: {SERIAL: 16.0, FUSED: 15.0, StepPlan("weave", 2304, 8): 12.0},
}
TABLE = TunedTable(KEY, COSTS, tuple(
    Check((tokens,), (tokens,), plan, seconds) for tokens, runs in RUNS.items() for plan, seconds in runs.items()
))  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "plan"),
    [
        (1, FUSED), (16, FUSED), (20, FUSED), (256, SERIAL), (250, SERIAL), (300, SERIAL), (900, SERIAL),
        (1024, StepPlan("weave", 384, 8, 5)), (1000, StepPlan("weave", 384, 8, 5)),  # of as many tiles
        (1536, StepPlan("weave", 576, 8, 5)), (3000, StepPlan("weave", 1664, 8)),
        (4096, StepPlan("weave", 2304, 8)), (8192, StepPlan("weave", 4608, 8)),
    ],
)  # fmt: skip
def test_auto(tokens: int, plan: StepPlan) -> None:
    assert nearest_plan(TABLE, StepShape.prefill(tokens), "auto") == plan
    assert Planner("auto", TABLE).plan([tokens], [tokens]) == plan


def test_a_named_mode_gets_its_best_plan() -> None:
    assert nearest_plan(TABLE, StepShape.prefill(1024), "fused") == FUSED
    assert nearest_plan(TABLE, StepShape.prefill(250), "weave") == StepPlan("weave", 128, 8)
    assert nearest_plan(TABLE, StepShape.prefill(16), "weave") is None
    assert nearest_plan(TABLE, StepShape.prefill(0), "auto") is None
    assert nearest_plan(TunedTable(KEY, COSTS), StepShape.prefill(5), "auto") is None


@pytest.mark.parametrize("tokens", [2, 3, 13, 65, 577, 5000])
def test_a_cut_is_inside_the_step(tokens: int) -> None:
    woven = TunedTable(KEY, COSTS, (Check((64,), (64,), StepPlan("weave", 32, 8), 1.0),))
    plan = nearest_plan(woven, StepShape.prefill(tokens), "weave")
    assert plan is not None and 0 < plan.cut < tokens
