import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from known_models import LLAMA_70B, MIXTRAL_8X22B, QWEN_72B, SMOLLM

from tokenweave.plan.analytical import AnalyticalCosts, Matmul
from tokenweave.plan.choose import choose
from tokenweave.plan.costs import STAGES
from tokenweave.plan.hardware import Tile, hardware
from tokenweave.plan.published import LLAMA, MIXTRAL, QWEN, figures
from tokenweave.plan.shape import Load, StepShape
from tokenweave.plan.simulate import simulate
from tokenweave.plan.step import StepPlan

H100 = hardware("h100")
ONE_TILE = replace(H100, tiles=(Tile(128, 256),))


@pytest.mark.parametrize(
    ("tokens", "columns", "tiles", "waves", "squeezed"),
    [
        (0, 256, 0, 0, 0),
        (1, 256, 1, 1, 1),
        (128, 132 * 256, 132, 1, 2),  # just fills the SMs: eight fewer cost a whole wave
        (129, 132 * 256, 264, 2, 3),
        (128, 124 * 256, 124, 1, 1),  # there is room for eight
        (128, 125 * 256, 125, 1, 2),
        (128, 133 * 256, 133, 2, 2),  # one tile too many pays the second wave anyway
        (577, 1, 5, 1, 1),
    ],
)
def test_waves_at_the_edges(tokens, columns, tiles, waves, squeezed):
    costs = AnalyticalCosts(LLAMA_70B, ONE_TILE, 8)
    found = costs.waves(Matmul("m", 64, columns), tokens)
    assert (found.tiles, found.waves) == (tiles, waves)
    assert costs.waves(Matmul("m", 64, columns), tokens, 8).waves == squeezed


@given(st.integers(1, 20000), st.integers(0, 100))
def test_taken_processors_never_help(tokens, taken):
    costs = AnalyticalCosts(LLAMA_70B, H100, 8)
    for stage in STAGES:
        load = StepShape.prefill(tokens).load()
        assert costs.compute(stage, load, taken) >= costs.compute(stage, load)


@given(st.sampled_from(["h100", "a100", "l40s", "b200"]), st.sampled_from([1, 2, 3, 4, 8]))
def test_no_cost_falls_with_tokens(name, size):
    costs = AnalyticalCosts(SMOLLM, hardware(name), size)
    sizes = [0, 1, 3, 13, 33, 128, 129, 577, 1024, 4096]
    curves = [costs.norm, costs.all_reduce, costs.reordered, costs.head, lambda n: costs.fused(n, 4)]
    curves += [lambda n, s=s: costs.compute(s, StepShape.prefill(n).load()) for s in STAGES]
    for curve in curves:
        seconds = [curve(n) for n in sizes]
        assert seconds[0] == 0 and seconds == sorted(seconds)


def test_large_matmuls_reach_the_stated_share_of_the_peak_and_one_row_that_of_the_memory():
    costs = AnalyticalCosts(LLAMA_70B, H100, 8)
    gate_up = costs.matmuls["mlp"][0]
    assert (gate_up.inner, gate_up.columns) == (8192, 2 * 28672 // 8)
    parts = costs.parts("mlp", Load(32768))
    flops = 2 * 32768 * 8192 * 28672 // 8 * 3
    assert 0.95 * H100.matmul_efficiency < flops / parts.matmul / H100.peak_flops <= H100.matmul_efficiency
    weights = 2 * 8192 * 28672 // 8 * 3
    assert costs.parts("mlp", Load(1)).matmul == pytest.approx(weights / (0.87 * 3.35e12) + 4e-6, rel=0.01)


def test_the_heaviest_rank_sets_the_time():
    """Three KV groups on two ranks: one has two of them."""
    qkv, output = AnalyticalCosts(SMOLLM, H100, 2).matmuls["attention"]
    assert (qkv.columns, output.inner) == ((6 + 2 * 2) * 64, 6 * 64)


@pytest.mark.parametrize(("model", "config"), [(LLAMA, LLAMA_70B), (QWEN, QWEN_72B)])
@pytest.mark.parametrize("tp", [8, 4])
def test_published_latencies_are_met(model, config, tp):
    """From 2K tokens on; below, the published system waits for its launches (eager), which graphs do not."""
    costs = AnalyticalCosts(config, H100, tp)
    for system, mode in (("nocomm", "nocomm"), ("serial_multimem", "serial")):
        for tokens, published in figures()[model.name, tp, system].items():
            if tokens >= 2048:
                seconds = simulate(costs, StepShape.prefill(tokens), StepPlan(mode)).seconds
                assert seconds == pytest.approx(published, rel=0.1), (system, tokens)


@pytest.mark.parametrize("tokens", [64, 512, 1024, 4096, 32768])
def test_published_collectives_are_met(tokens):
    costs = AnalyticalCosts(LLAMA_70B, H100, 8)
    published = {name: points.get(tokens) for (_, tp, name), points in figures().items() if tp == 8}
    for budget in (2, 4, 8, 16):
        assert costs.fused(tokens, budget) == pytest.approx(published[f"fused_ctas_{budget}"], rel=0.25)
    assert costs.all_reduce(tokens) == pytest.approx(published["multimem_all_reduce"], rel=0.1)
    reordered = sum(published[f"multimem_{name}"] for name in ("reduce_scatter", "all_gather"))
    assert costs.reordered(tokens) == pytest.approx(reordered + published["add_rms_norm_one_rank_share"], rel=0.2)


def test_without_multicast_a_rank_reads_all_but_its_own_part_twice():
    costs = AnalyticalCosts(LLAMA_70B, replace(hardware("a100"), link_latency=0.0, link_efficiency=1.0), 4)
    assert costs.all_reduce(1000) == pytest.approx(2 * 3 / 4 * 1000 * 8192 * 2 / 300e9)


def test_one_rank_has_nothing_to_communicate():
    costs = AnalyticalCosts(LLAMA_70B, H100, 1)
    assert costs.all_reduce(577) == costs.fused(577, 4) == 0.0


@pytest.mark.parametrize(("size", "dtype"), [(0, "bfloat16"), (65, "bfloat16"), (8, "int8")])
def test_what_cannot_be_is_refused(size, dtype):
    with pytest.raises(ValueError):
        AnalyticalCosts(LLAMA_70B, H100, size, dtype)


def test_attention_is_bound_by_arithmetic_in_prefill_and_by_memory_in_decode():
    costs = AnalyticalCosts(LLAMA_70B, H100, 8)
    prefill, decode = StepShape.prefill(8192).load(), StepShape.decode(64, 4096).load()
    flops = 4 * 8 * 128 * 8192 * 8193 / 2
    assert costs.parts("attention", prefill).attention == pytest.approx(flops / (0.6 * 989.4e12), rel=0.02)
    read = 2 * 128 * 64 * 4096 * 2
    assert costs.parts("attention", decode).attention == pytest.approx(read / (0.87 * 3.35e12), rel=0.2)
    assert math.isclose(costs.parts("attention", decode).total, costs.compute("attention", decode))


@given(st.integers(0, 3000), st.integers(2, 128), st.data())
def test_experts_that_tokens_need(tokens, experts, data):
    """The expected number of distinct ones if every token's are drawn evenly, with room for all rows."""
    per_token = data.draw(st.integers(1, experts))
    used, rows = Matmul("m", 1, 1, experts, per_token).groups(tokens)
    expected = experts - experts * math.prod([1 - per_token / experts] * tokens)
    assert used in range(1, experts + 1) and used - 1 - 1e-9 < expected < used + 1e-6
    assert used * rows >= tokens * per_token > used * (rows - 1) or not tokens


def test_a_mixture_of_experts_reads_nearly_all_weights_for_few_tokens():
    """8 tokens with 2 of 8 experts each need 7.2 of them, 512 all, so that half a step costs nearly a whole one."""
    costs = AnalyticalCosts(MIXTRAL_8X22B, H100, 8)
    weights = 3 * 6144 * 2048 * 2 / (H100.memory_bandwidth * H100.memory_efficiency)
    few, half, whole = (costs.compute("mlp", Load(n)) for n in (8, 512, 1024))
    assert 7.2 * weights < few < 10 * weights  # with launches and the few rows themselves
    assert half > 0.7 * whole
    choice = choose(costs, StepShape.prefill(1024))
    assert choice.plan.mode == "fused" and "each lane reads the weights again" in choice.reason
    assert choose(costs, StepShape.prefill(4096)).plan.mode == "weave"


def test_published_latencies_of_mixtral():
    """Serial, from 8K tokens on, where the published system is not bound by its experts' small matmuls."""
    for tokens, latency in figures()[MIXTRAL.name, 8, "serial_multimem"].items():
        if 8192 <= tokens <= 16384:
            costs = AnalyticalCosts(MIXTRAL_8X22B, H100, 8)
            predicted = simulate(costs, StepShape.prefill(tokens), StepPlan("serial")).seconds
            assert predicted == pytest.approx(latency, rel=0.1)


def test_layers_of_a_kind_count_by_their_share():
    """Experts in one layer of four: the mean of three dense layers and that one."""
    experts = replace(MIXTRAL_8X22B.experts, layers=(False, False, True, False) * 14)
    mixed, dense, sparse = (
        AnalyticalCosts(replace(MIXTRAL_8X22B, experts=found), H100, 8).compute("mlp", Load(300))
        for found in (experts, None, MIXTRAL_8X22B.experts)
    )
    assert mixed == pytest.approx(0.75 * dense + 0.25 * sparse)


@pytest.mark.parametrize("tokens", [33, 1024, 32768])
def test_sliding_windows_bound_attention(tokens):
    """Every token attends to so many keys at most, and all of them where the prompt is shorter."""
    width = 1024
    windowed = AnalyticalCosts(replace(LLAMA_70B, windows=(width,) * 80), H100, 8)
    alternating = AnalyticalCosts(replace(LLAMA_70B, windows=(width, None) * 40), H100, 8)
    everywhere = AnalyticalCosts(LLAMA_70B, H100, 8)
    load = StepShape.prefill(tokens).load()
    own, mixed, full = (costs.parts("attention", load).attention for costs in (windowed, alternating, everywhere))
    assert mixed == pytest.approx((own + full) / 2)
    if tokens <= width:
        assert own == full
    else:
        attended = sum(min(i + 1, width) for i in range(tokens))
        assert (own - H100.launch_seconds) / (full - H100.launch_seconds) == pytest.approx(
            attended / load.pairs, rel=0.02
        )


def test_an_mlp_without_a_gate_has_two_matrices():
    plain = AnalyticalCosts(replace(LLAMA_70B, gated_mlp=False), H100, 8)
    gated = AnalyticalCosts(LLAMA_70B, H100, 8)
    assert [m.columns for m in plain.matmuls["mlp"]] == [28672 // 8, 8192]
    assert plain.compute("mlp", Load(8192)) == pytest.approx(2 / 3 * gated.compute("mlp", Load(8192)), rel=0.06)
