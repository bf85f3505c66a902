import pytest

from tokenweave.plan.planner import plan_step
from tokenweave.plan.step import MODES, StepPlan


@pytest.mark.parametrize("tokens", [0, 1, 3, 13, 33, 577])
def test_a_named_mode_is_taken_as_it_is(tokens):
    for mode in MODES:
        assert plan_step(mode, tokens) == StepPlan(mode=mode, cut=tokens // 2 if mode == "weave" else 0)
    assert plan_step("auto", tokens) == StepPlan(mode="fused")


@pytest.mark.parametrize(("mode", "tokens"), [("fast", 1), ("", 1), ("fused", -1)])
def test_bad_input_is_refused(mode, tokens):
    with pytest.raises(ValueError):
        plan_step(mode, tokens)
