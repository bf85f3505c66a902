"""The simulator against published woven latencies. The bounds are claims of the documentation."""

from dataclasses import replace

import numpy as np
import pytest

from tokenweave.plan.choose import choose
from tokenweave.plan.hardware import hardware
from tokenweave.plan.published import (
    LLAMA,
    MIXTRAL,
    QWEN,
    SIZES,
    errors,
    figures,
    fit,
    predict_all,
    published_costs,
)
from tokenweave.plan.shape import StepShape
from tokenweave.plan.simulate import simulate
from tokenweave.plan.step import StepPlan


@pytest.fixture(scope="module")
def contention():
    return fit()


def test_the_fit_is_the_least_squares_and_is_what_the_hardware_facts_carry(contention):
    woven = figures()[LLAMA.name, 8, "tokenweave"]

    def error(value):
        return sum((p / woven[n] - 1) ** 2 for n, p in zip(SIZES, predict_all(LLAMA, 8, value), strict=True))

    grid = np.arange(0, 0.2, 0.002)
    assert contention == pytest.approx(grid[np.argmin([error(value) for value in grid])], abs=0.002)
    assert hardware("h100").contention == pytest.approx(contention, abs=0.001)


@pytest.mark.parametrize(("model", "tp"), [(LLAMA, 8), (QWEN, 8), (LLAMA, 4), (QWEN, 4)], ids=lambda v: str(v)[:30])
def test_woven_latencies_are_predicted(model, tp, contention):
    ours, nocomm = (np.abs(e) for e in errors(model, tp, contention))
    assert ours.mean() <= 0.025
    assert ours.max() <= 0.06
    assert ours.mean() < nocomm.mean()


def test_what_is_fed_in_are_the_published_latencies():
    """The parts add up to the latency without communication that they were taken from."""
    for model, tp in ((LLAMA, 8), (QWEN, 4), (MIXTRAL, 8)):
        costs = published_costs(model, tp)
        for tokens, latency in figures()[model.name, tp, "nocomm"].items():
            seconds = simulate(costs, StepShape.prefill(tokens), StepPlan("nocomm")).seconds
            assert seconds == pytest.approx(latency, rel=1e-3)


def test_the_attention_rate_is_that_of_the_latencies_without_communication():
    """Per-token latency grows with the prompt by attention alone: a straight line's slope from 8K tokens on."""
    norm = figures()["-", 8, "add_rms_norm_all_tokens"]
    largest = max(norm)
    points = {
        n: (seconds - 161 * norm.get(n, norm[largest] * n / largest)) / n
        for n, seconds in figures()[LLAMA.name, 8, "nocomm"].items()
        if n >= 8192
    }
    slope = np.polyfit(list(points), list(points.values()), 1)[0]
    flops = 80 * 4 * 8192 / 8 / 2 / slope
    assert hardware("h100").attention_efficiency * hardware("h100").peak_flops == pytest.approx(flops, rel=0.02)


def test_mixtral_loses_at_1k_and_llama_wins_at_2k(contention):
    """Each lane of a mixture of experts reads the weights of nearly all experts again."""
    mixtral = choose(replace(published_costs(MIXTRAL, 8), contention=contention, grain=256), StepShape.prefill(1024))
    assert mixtral.plan.mode == "fused"
    woven, fused = mixtral.by_mode["weave"][1].seconds, mixtral.by_mode["fused"][1].seconds
    assert woven > 1.15 * fused and "reads the weights again" in mixtral.reason
    published = figures()[MIXTRAL.name, 8, "tokenweave"][1024] / figures()[MIXTRAL.name, 8, "serial_multimem"][1024]
    assert published > 1.15
    llama = choose(replace(published_costs(LLAMA, 8), contention=contention, grain=256), StepShape.prefill(2048))
    assert llama.plan.mode == "weave" and llama.plan.cut == 1024
