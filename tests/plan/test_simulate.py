import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenweave.plan.costs import LAYER, MeasuredCosts
from tokenweave.plan.curves import Curve
from tokenweave.plan.shape import StepShape
from tokenweave.plan.simulate import schedule, simulate
from tokenweave.plan.step import StepPlan


def line(fixed, per_token):
    return Curve.of({0: fixed, 1: fixed + per_token})


lines = st.builds(line, st.floats(0, 5), st.floats(0, 0.1))
costs = st.builds(
    lambda layers, embed, attention, mlp, norm, reduce, fused, pair, contention: MeasuredCosts(
        layers=layers,
        stages={"embed": embed, "attention": attention, "mlp": mlp},
        norm_curve=norm,
        all_reduce_curve=reduce,
        reordered_curve=reduce,
        fused_curves={None: fused},
        pair_seconds=pair,
        contention=contention,
    ),
    st.integers(1, 12), lines, lines, lines, lines, lines, lines, st.floats(0, 1e-3), st.floats(0, 2),
)  # fmt: skip
tokens = st.sampled_from([1, 2, 3, 13, 33, 577])


def woven_slowly(costs, shape, cut):
    """Oracle: the schedule as events of two machines, no shortcut for layers that repeat.

    Every job is written down first: what it needs and what it takes; then each is started when it may.
    """
    loads = shape.loads(cut)
    stages = ["embed", *LAYER * costs.layers]
    ends_compute, ends_reduction, running = [], {}, []
    compute_free = link_free = 0.0
    for index, stage in enumerate(stages):
        for lane in (0, 1):
            start = max(compute_free, ends_reduction.get((index - 1, lane), 0.0))
            alone = costs.compute(stage, loads[lane])
            shared = sum(max(0.0, end - max(begin, start)) for begin, end in running if end > start)
            compute_free = start + alone + min(costs.contention * alone, shared)
            ends_compute.append(compute_free)
            begin = max(compute_free, link_free)
            link_free = begin + costs.fused(loads[lane].tokens, None)
            running.append((begin, link_free))
            ends_reduction[index, lane] = link_free
    return max(compute_free, link_free)


@given(costs, tokens, st.data())
def test_weave_is_the_schedule_of_events(costs, n, data):
    if n < 2:
        return
    shape = StepShape.prefill(n)
    cut = data.draw(st.integers(1, n - 1))
    assert simulate(costs, shape, StepPlan("weave", cut)).seconds == pytest.approx(woven_slowly(costs, shape, cut))


@given(costs, tokens, st.data())
def test_between_the_longer_of_both_and_their_sum(costs, n, data):
    cut = data.draw(st.integers(0, n))
    woven = simulate(costs, StepShape.prefill(n), StepPlan("weave", cut))
    assert max(woven.compute, woven.communication) <= woven.seconds * (1 + 1e-9)
    assert woven.seconds <= (woven.compute + woven.communication) * (1 + 1e-9)
    assert woven.exposed + woven.hidden == pytest.approx(woven.communication)


@given(costs, tokens)
def test_an_empty_lane_is_a_fused_step(costs, n):
    for shape in (StepShape.prefill(n), StepShape.decode(n, 40), StepShape([], [])):
        fused = simulate(costs, shape, StepPlan("fused"))
        assert simulate(costs, shape, StepPlan("weave", 0)) == fused
        assert simulate(costs, shape, StepPlan("weave", shape.tokens)) == fused


@given(costs, tokens, st.floats(1, 3), st.data())
def test_dearer_costs_take_no_less(costs, n, factor, data):
    shape, plan = StepShape.prefill(n), StepPlan("weave", data.draw(st.integers(0, n)))

    def dearer(curve):
        return Curve(curve.sizes, tuple(factor * s for s in curve.seconds))

    base = simulate(costs, shape, plan).seconds * (1 - 1e-9)
    others = [replace(costs, stages=costs.stages | {s: dearer(costs.stages[s])}) for s in costs.stages]
    others.append(replace(costs, fused_curves={None: dearer(costs.fused_curves[None])}))
    others.append(replace(costs, contention=costs.contention * factor))
    assert all(simulate(other, shape, plan).seconds >= base for other in others)


@given(costs, st.sampled_from(["serial", "reordered", "fused", "nocomm"]), st.integers(1, 600))
def test_more_tokens_take_no_less(costs, mode, n):
    few, more = (simulate(costs, StepShape.prefill(k), StepPlan(mode)).seconds for k in (n, n + 1))
    assert more >= few * (1 - 1e-9)


@given(costs, tokens)
def test_one_lane_modes_are_sums(costs, n):
    load, stages = StepShape.prefill(n).load(), 2 * costs.layers + 1
    work = costs.compute("embed", load) + costs.layers * (costs.compute("attention", load) + costs.compute("mlp", load))
    expected = {
        "nocomm": work + stages * costs.norm(n),
        "serial": work + stages * (costs.norm(n) + costs.all_reduce(n)),
        "reordered": work + stages * costs.reordered(n),
        "fused": work + stages * costs.fused(n, None),
    }
    for mode, seconds in expected.items():
        assert simulate(costs, StepShape.prefill(n), StepPlan(mode)).seconds == pytest.approx(seconds)


def test_contention_of_a_core_that_cannot_do_both_hides_nothing():
    costs = MeasuredCosts(
        layers=4,
        stages={"embed": line(0, 0.01), "attention": line(0, 0.1), "mlp": line(0, 0.2)},
        norm_curve=line(0, 0), all_reduce_curve=line(0, 0.1), reordered_curve=line(0, 0.1),
        fused_curves={None: line(0, 0.1)}, contention=math.inf,
    )  # fmt: skip
    shape = StepShape.prefill(64)
    fused, woven = (simulate(costs, shape, StepPlan(mode, 32)).seconds for mode in ("fused", "weave"))
    assert woven == pytest.approx(fused)
    assert simulate(replace(costs, contention=0.0), shape, StepPlan("weave", 32)).seconds < 0.8 * fused


def test_bars_of_the_picture_do_not_overlap_on_a_stream():
    costs = MeasuredCosts(
        layers=4,
        stages={"embed": line(0, 0.01), "attention": line(1, 0.1), "mlp": line(1, 0.2)},
        norm_curve=line(0, 0), all_reduce_curve=line(0, 0.1), reordered_curve=line(0, 0.1),
        fused_curves={None: line(0.3, 0.1)}, contention=0.1,
    )  # fmt: skip
    bars = list(schedule(costs, StepShape.prefill(33), StepPlan("weave", 16), 3))
    assert len(bars) == 2 * 2 * 7
    for kind in ("compute", "communication"):
        stream = [bar for bar in bars if bar.kind == kind]
        assert all(a.end <= b.start + 1e-12 for a, b in zip(stream, stream[1:], strict=False))


def test_a_cut_beyond_the_step_is_refused():
    costs = MeasuredCosts(
        layers=1, stages=dict.fromkeys(("embed", "attention", "mlp"), line(0, 1)), norm_curve=line(0, 0),
        all_reduce_curve=line(0, 0), reordered_curve=line(0, 0), fused_curves={None: line(0, 0)},
    )  # fmt: skip
    with pytest.raises(ValueError, match="cut"):
        simulate(costs, StepShape.prefill(3), StepPlan("weave", 4))
