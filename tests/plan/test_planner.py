from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from known_models import LLAMA_70B
from test_table import COSTS, KEY, TABLE

from tokenweave.plan.analytical import AnalyticalCosts
from tokenweave.plan.choose import choose
from tokenweave.plan.hardware import cpu, hardware
from tokenweave.plan.planner import Planner, plan_step
from tokenweave.plan.scan import ALL_NARROW
from tokenweave.plan.shape import StepShape
from tokenweave.plan.step import MODES, StepPlan
from tokenweave.plan.table import TunedTable

CALCULATED = AnalyticalCosts(LLAMA_70B, hardware("h100"), 8)


@pytest.mark.parametrize("tokens", [0, 1, 3, 13, 33, 577])
def test_a_named_mode_is_taken_as_it_is(tokens):
    for mode in MODES:
        assert plan_step(mode, tokens) == StepPlan(mode=mode, cut=tokens // 2 if mode == "weave" else 0)
    assert plan_step("auto", tokens) == StepPlan(mode="fused")


@pytest.mark.parametrize(("mode", "tokens"), [("fast", 1), ("", 1), ("fused", -1)])
def test_bad_input_is_refused(mode, tokens):
    with pytest.raises(ValueError):
        plan_step(mode, tokens)


def test_a_planner_refuses_an_unknown_mode():
    with pytest.raises(ValueError, match="fast"):
        Planner("fast", CALCULATED)


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 900)), max_size=5), st.sampled_from(["auto", *MODES]))
def test_every_step_gets_a_plan_that_fits_it(requests, mode):
    counts = np.array([n for n, _ in requests], dtype=np.int32)
    contexts = counts + np.array([c for _, c in requests], dtype=np.int32)
    plan = Planner(mode, CALCULATED).plan(counts, contexts)
    assert plan.mode == mode or mode == "auto"
    assert 0 <= plan.cut <= counts.sum() and (plan.mode == "weave" or plan.cut == 0)


def test_auto_is_the_choice_and_is_remembered(monkeypatch):
    planner = Planner("auto", CALCULATED)
    chosen = choose(CALCULATED, StepShape.prefill(2176)).plan
    assert planner.plan([2176], [2176]) == replace(chosen, budget=max(chosen.budget, 8), narrow=ALL_NARROW)
    assert planner.plan([2176], [2176]).mode == "weave"
    monkeypatch.setattr("tokenweave.plan.planner.choose", None)
    for tokens in (2100, 2140, 2176):  # steps that differ little need no new choice
        assert planner.plan([tokens], [2177]).mode == "weave"
    with pytest.raises(TypeError):
        planner.plan([2177], [2177])


def test_a_remembered_cut_never_leaves_the_step():
    """A step that shares a plan may be a little shorter than the one it was made for."""
    planner, counts = Planner("weave", CALCULATED), np.array([2000, 1])
    planner._known[planner._like(counts, counts, 2001)] = StepPlan("weave", 2001)
    assert 0 < planner.plan(counts, counts).cut < 2001


def test_memory_of_plans_is_bounded(monkeypatch):
    monkeypatch.setattr("tokenweave.plan.planner.REMEMBERED", 3)
    planner = Planner("auto", CALCULATED)
    for tokens in (1, 2, 4, 8, 16, 33):
        planner.plan([tokens], [tokens])
    assert len(planner._known) == 3


def test_a_tuned_table_decides_where_it_holds(tmp_path):
    facts = hardware("h200")
    without = Planner.open("auto", LLAMA_70B, KEY, facts, directory=tmp_path)
    assert "not tuned" in without.source and "h200" in without.source
    assert without.costs == AnalyticalCosts(
        LLAMA_70B, facts.with_link(latency=KEY.link_latency, bandwidth=KEY.link_bandwidth), 8
    )
    TABLE.save(tmp_path)
    tuned = Planner.open("auto", LLAMA_70B, KEY, facts, directory=tmp_path)
    assert tuned.costs == COSTS and "tuned" in tuned.source
    elsewhere = Planner.open("auto", LLAMA_70B, replace(KEY, link_latency=1.0), facts, directory=tmp_path)
    assert "link_latency" in elsewhere.source and isinstance(elsewhere.costs, AnalyticalCosts)


def test_measured_costs_are_squeezed_by_the_waves_of_the_hardware(tmp_path):
    TABLE.save(tmp_path)
    costs = Planner.open("auto", LLAMA_70B, KEY, hardware("h200"), directory=tmp_path).costs
    load = StepShape.prefill(1024).load()
    ratio = costs.compute("mlp", load, 8) / costs.compute("mlp", load)
    calculated = AnalyticalCosts(LLAMA_70B, hardware("h200"), 8)
    assert ratio == pytest.approx(calculated.compute("mlp", load, 8) / calculated.compute("mlp", load)) and ratio > 1


def test_measured_steps_overrule_the_simulator():
    """The same curves; in the second table woven steps ran four times as long as simulated."""
    key = replace(KEY, threads=2)  # not a GPU, where only what was run counts
    assert Planner("auto", TunedTable(key, COSTS)).plan([2048], [2048]).mode == "weave"
    slow = tuple(replace(c, seconds=3 * c.seconds) if c.plan.mode == "weave" else c for c in TABLE.checks)
    assert Planner("auto", TunedTable(key, COSTS, slow)).plan([2048], [2048]).mode != "weave"


@pytest.mark.parametrize("requests", [1, 16, 256])
def test_growing_contexts_need_few_choices(requests):
    planner, counts = Planner("auto", CALCULATED), np.ones(requests, dtype=np.int32)
    for context in range(1, 2000):
        planner.plan(counts, np.full(requests, context, dtype=np.int32))
    assert len(planner._known) <= (1 if requests == 1 else 16)


def test_what_cannot_be_woven_is_planned_by_its_size_alone():
    for mode, costs in (("fused", CALCULATED), ("auto", AnalyticalCosts(LLAMA_70B, cpu(1, shared_memory=True), 8))):
        planner = Planner(mode, costs)
        for context in (500, 5000, 50000):
            planner.plan([300, 200], [500, context])
        assert len(planner._known) == 1


def test_work_of_long_contexts_does_not_overflow():
    counts = np.array([8192, 1], dtype=np.int32)
    assert Planner("auto", CALCULATED).plan(counts, np.array([1 << 20, 1 << 20], dtype=np.int32)).cut < 8193
