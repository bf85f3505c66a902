from dataclasses import replace

import pytest
from known_models import LLAMA_70B, SMOLLM

from tokenweave.plan.analytical import AnalyticalCosts
from tokenweave.plan.hardware import hardware
from tokenweave.plan.pipeline import predict_pipeline
from tokenweave.plan.shape import StepShape
from tokenweave.plan.simulate import simulate
from tokenweave.plan.step import StepPlan

H100 = replace(hardware("h100"), link_latency=0.0, link_bandwidth=1e30)  # sends are free
COSTS = AnalyticalCosts(LLAMA_70B, H100, 8)


def test_one_stage_is_one_gpu():
    alone = AnalyticalCosts(LLAMA_70B, H100, 1)
    found = predict_pipeline(alone, 2048, 0)
    step = simulate(alone, StepShape.prefill(2048), StepPlan("nocomm")).seconds
    assert found.chunks == 1 and found.bubble == pytest.approx(0)
    assert found.first_token == pytest.approx(step, rel=0.01)


@pytest.mark.parametrize("tokens", [1, 127])
def test_a_prompt_too_short_to_cut_leaves_all_but_one_gpu_idle(tokens):
    found = predict_pipeline(COSTS, tokens, 0)
    assert found.chunks == 1 and found.bubble == pytest.approx(7 / 8)


def test_the_bubble_is_that_of_equal_micro_batches():
    """(p - 1) / (m + p - 1) where all micro-batches cost the same: short ones after a long context."""
    found = predict_pipeline(COSTS, 8192, 10**6)
    assert found.bubble == pytest.approx(7 / (found.chunks + 7), abs=0.01)


def test_decode_takes_as_long_as_on_one_gpu():
    one, eight = (predict_pipeline(AnalyticalCosts(LLAMA_70B, H100, n), 64, 0).token_latency for n in (1, 8))
    assert eight == pytest.approx(one)
    tensor = simulate(COSTS, StepShape.decode(1, 65), StepPlan("fused", budget=8)).seconds
    assert tensor < eight / 4


def test_stages_of_unequal_depth_all_count():
    """30 layers on 4 GPUs: 7, 8, 7 and 8."""
    costs = AnalyticalCosts(SMOLLM, H100, 4)
    assert predict_pipeline(costs, 64, 0).bubble == pytest.approx(3 / 4)


def test_more_gpus_than_layers_are_refused():
    few = replace(LLAMA_70B, num_hidden_layers=4)
    with pytest.raises(ValueError, match="4 layers"):
        predict_pipeline(AnalyticalCosts(few, H100, 8), 64, 0)
