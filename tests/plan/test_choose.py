from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from known_models import LLAMA_70B, SMOLLM

from tokenweave.plan.analytical import AnalyticalCosts
from tokenweave.plan.choose import HIDES_NOTHING, MARGIN, TIE, choose, cuts, ranked
from tokenweave.plan.costs import MeasuredCosts
from tokenweave.plan.curves import Curve
from tokenweave.plan.hardware import Tile, cpu, hardware
from tokenweave.plan.shape import StepShape
from tokenweave.plan.simulate import simulate
from tokenweave.plan.step import MODES, StepPlan

UNIT = dict.fromkeys(MODES, 1.0)
FREE = Curve.of({1: 0.0})


def measured(stage, fused, **changes):
    """Ten layers whose stages cost `stage`, reduced at `fused`."""
    costs = MeasuredCosts(
        layers=10, stages={"embed": FREE, "attention": stage, "mlp": stage}, norm_curve=FREE, all_reduce_curve=fused,
        reordered_curve=fused, fused_curves={None: fused},
    )  # fmt: skip
    return replace(costs, **changes)


@given(st.lists(st.integers(0, 700), max_size=5), st.sampled_from([1, 16, 128]))
def test_cuts_are_inside_and_whole_tiles_near_the_middle_or_borders(counts, grain):
    shape = StepShape(counts, counts)
    found = cuts(shape, grain)
    assert all(0 < cut < shape.tokens for cut in found) and bool(found) == (shape.tokens >= 2)
    for cut in found:
        whole = cut % grain == 0 or (shape.tokens - cut) % grain == 0
        assert whole or cut == shape.tokens // 2 or cut in shape.borders()


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 3000)), min_size=1, max_size=4),
    st.sampled_from(["h100", "a100", "l40s"]),
    st.sampled_from([1, 2, 8]),
)
def test_never_predicted_slower_than_the_best_of_serial_and_fused(requests, name, size):
    costs = AnalyticalCosts(SMOLLM, hardware(name), size)
    shape = StepShape([n for n, _ in requests], [n + cached for n, cached in requests])
    chosen = choose(costs, shape)
    plain = min(
        simulate(costs, shape, StepPlan(mode, budget=budget)).seconds
        for mode, budget in [("serial", None)] + [("fused", b) for b in costs.budgets]
    )
    assert simulate(costs, shape, chosen.plan).seconds == chosen.prediction.seconds <= plain


def test_the_cut_does_not_add_a_wave():
    """A block of 128 rows is 132 tiles, one wave; halves that are not whole blocks would pay one more."""
    one_tile = replace(hardware("h100"), tiles=(Tile(128, 256),), contention=0.0)
    config = replace(LLAMA_70B, intermediate_size=132 * 128 * 8)
    costs = AnalyticalCosts(config, one_tile, 8)
    shape = StepShape.prefill(63 * 128)
    chosen = choose(costs, shape)
    assert chosen.plan.mode == "weave" and chosen.plan.cut % 128 == 0 and chosen.plan.cut != 63 * 64
    middle = simulate(costs, shape, replace(chosen.plan, cut=63 * 64))
    assert chosen.prediction.compute < middle.compute


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 13])
def test_small_steps_have_a_plan(tokens):
    """Lanes of [0, n] and [n, n] and a single token are no special case."""
    for shape in (StepShape.prefill(tokens), StepShape.decode(tokens, 33)):
        chosen = choose(AnalyticalCosts(LLAMA_70B, hardware("h100"), 8), shape)
        assert chosen.plan.mode in ("fused", "serial") and chosen.reason


def test_judged_on_the_size_of_the_lanes():
    """A collective that takes another algorithm for small messages, and as long for half of them as for all: at the
    step's own size weaving would pay, at the lanes' it does not."""
    stage = Curve.of({0: 0.0, 1000: 1e-3})
    slow_below = Curve.of({1: 1e-3, 1000: 1e-3})
    assert choose(measured(stage, slow_below), StepShape.prefill(1000)).plan.mode == "fused"
    proportional = Curve.of({0: 0.0, 1000: 1e-3})
    assert choose(measured(stage, proportional), StepShape.prefill(1000)).plan.mode == "weave"


def test_a_gain_within_the_margin_is_not_taken():
    stage = Curve.of({0: 0.0, 1000: 1e-3})
    for share, mode in ((MARGIN / 2, "fused"), (0.1, "weave")):
        costs = measured(stage, Curve.of({0: 0.0, 1000: share * 1e-3}))
        assert choose(costs, StepShape.prefill(1000)).plan.mode == mode


def test_corrections_turn_the_choice():
    stage = Curve.of({0: 0.0, 1000: 1e-3})
    costs, shape = measured(stage, stage), StepShape.prefill(1000)
    assert choose(costs, shape).plan.mode == "weave"
    assert choose(costs, shape, UNIT | {"weave": 2.0}).plan.mode == "fused"
    assert choose(costs, shape, UNIT | {"weave": 2.0, "fused": 1.1}).plan.mode == "serial"


def test_a_core_that_must_communicate_is_never_woven_and_a_slow_link_is():
    shared = AnalyticalCosts(SMOLLM, cpu(1, shared_memory=True), 2, "float32")
    gigabit = cpu(1, shared_memory=False).with_link(latency=1e-4, bandwidth=1.25e8)
    linked = AnalyticalCosts(SMOLLM, gigabit, 2, "float32")
    for tokens in (1, 16, 128, 512, 2048):
        assert choose(shared, StepShape.prefill(tokens)).plan.mode != "weave"
    assert choose(linked, StepShape.prefill(1024)).plan.mode == "weave"


@pytest.mark.parametrize(
    ("tokens", "words"),
    [(1, "too few tokens"), (64, "reads the weights again"), (8192, "hides")],
)
def test_the_reason_is_said(tokens, words):
    chosen = choose(AnalyticalCosts(LLAMA_70B, hardware("h100"), 8), StepShape.prefill(tokens))
    assert words in chosen.reason and chosen.reason.startswith(chosen.plan.mode)
    assert "nothing to communicate" in choose(AnalyticalCosts(SMOLLM, hardware("h100"), 1), StepShape.prefill(9)).reason


def test_nothing_is_woven_where_nothing_can_be_hidden():
    """Not even if it is said to be fast: measurements of a busy machine say all kinds of things."""
    stage = Curve.of({0: 0.0, 1000: 1e-3})
    costs, shape = measured(stage, stage, contention=HIDES_NOTHING), StepShape.prefill(1000)
    chosen = choose(costs, shape, UNIT | {"weave": 0.1})
    assert chosen.plan.mode == "fused" and "weave" not in chosen.by_mode and "cannot communicate" in chosen.reason
    assert "weave" in choose(replace(costs, contention=0.9 * HIDES_NOTHING), shape).by_mode


def test_serial_is_taken_only_if_it_wins_more_than_two_measurements_differ():
    stage = Curve.of({0: 0.0, 1000: 1e-3})
    costs, shape = measured(stage, stage, contention=HIDES_NOTHING), StepShape.prefill(1000)
    for factor, mode in ((1.0, "fused"), (1 - TIE / 2, "fused"), (1 - 2 * TIE, "serial")):
        assert choose(costs, shape, UNIT | {"serial": factor}).plan.mode == mode


def test_ranked_is_every_candidate_the_fastest_first():
    costs = AnalyticalCosts(LLAMA_70B, hardware("h100"), 8)
    shape = StepShape([1000, 600], [1000, 900])
    found = ranked(costs, shape)
    times = [simulate(costs, shape, plan).seconds for plan, _ in found]
    assert times == sorted(times) == [prediction.seconds for _, prediction in found]
    assert {plan.mode for plan, _ in found} == set(MODES) - {"nocomm"}
    assert found[0][0] == choose(costs, shape).plan
