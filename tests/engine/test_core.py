import numpy as np
import pytest
import torch
from engine.fakes import VOCAB, answer_alone, check_blocks, make_core, make_request, next_logits, run_all
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenweave.engine.core import EngineCore
from tokenweave.engine.params import SamplingParams
from tokenweave.plan import Planner, StepPlan
from tokenweave.plan.costs import MeasuredCosts
from tokenweave.plan.curves import Curve


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


def computed(core: EngineCore) -> int:
    """Tokens of all steps so far; more than the requests have if some were computed again."""
    return sum(len(step.token_ids) for step in core.runner.steps)  # type: ignore[attr-defined]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 13, 33, 60])
def test_one_request_of_any_length(length: int) -> None:
    core = make_core()
    prompt = [i % VOCAB for i in range(length)]
    core.add(make_request(1, prompt, greedy(5)))
    tokens, reasons = run_all(core)
    expected = answer_alone(prompt, min(5, 64 - length))
    assert tokens == {1: expected} and reasons == {1: "length"}
    assert core.scheduler.pool.available == 64


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_mix_answers_as_each_alone(data: st.DataObject) -> None:
    """Random lengths, shared prefixes, arrivals, cancellations and caches small enough to preempt."""
    draw = data.draw
    block_size = draw(st.sampled_from([1, 3, 4, 16]))
    core = make_core(
        blocks=-(-64 // block_size) + draw(st.integers(0, 12)),
        block_size=block_size,
        max_tokens=draw(st.integers(1, 40)),
        max_running=draw(st.integers(1, 9)),
        prefix_caching=draw(st.booleans()),
    )
    prefixes = [[(7 * k + i) % VOCAB for i in range(32)] for k in range(2)]
    tokens: dict[int, list[int]] = {}
    expected: dict[int, list[int]] = {}
    cancelled: set[int] = set()
    for ident in range(draw(st.integers(1, 12))):
        shared = draw(st.sampled_from(prefixes))[: draw(st.integers(0, 32))]
        prompt = shared + draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12))
        count = draw(st.integers(1, 18))
        core.add(make_request(ident, prompt, greedy(count)))
        expected[ident] = answer_alone(prompt, min(count, 64 - len(prompt)))
        for _ in range(draw(st.integers(0, 3))):
            if core.busy:
                events = core.step()
                check_blocks(core)
                for who, token in zip(events.idents, events.token_ids, strict=True):
                    tokens.setdefault(who, []).append(token)
        if draw(st.integers(0, 5)) == 0:
            victim = draw(st.integers(0, ident))
            core.cancel(victim)
            check_blocks(core)
            cancelled.add(victim)
    rest, _ = run_all(core)
    for ident, more in rest.items():
        tokens.setdefault(ident, []).extend(more)
    for ident, answer in expected.items():
        got = tokens.get(ident, [])
        assert got == (answer[: len(got)] if ident in cancelled else answer)
    assert core.scheduler.pool.available == core.scheduler.pool.num_blocks
    assert max((len(s.token_ids) for s in core.runner.steps), default=0) <= core.scheduler.max_tokens  # type: ignore[attr-defined]
    assert max((len(s.slots) for s in core.runner.steps), default=0) <= len(core.scheduler.slots.requests)  # type: ignore[attr-defined]


def test_preemption_happens_and_changes_nothing() -> None:
    core = make_core(blocks=16, block_size=4, max_tokens=64)
    prompts = {i: [i, i + 1, i + 2, 5] for i in range(6)}
    for ident, prompt in prompts.items():
        core.add(make_request(ident, prompt, greedy(40)))
    tokens, _ = run_all(core)
    assert computed(core) > 6 * (4 + 39), "nothing was preempted"
    assert tokens == {ident: answer_alone(prompt, 40) for ident, prompt in prompts.items()}


def test_seeded_draws_do_not_depend_on_the_batch_or_on_preemption() -> None:
    params = {i: SamplingParams(max_tokens=40, temperature=0.9, top_p=0.9, seed=i, ignore_eos=True) for i in range(6)}
    alone = {}
    for ident, wanted in params.items():
        core = make_core()
        core.add(make_request(ident, [ident, 3], wanted))
        alone[ident] = run_all(core)[0][ident]
    core = make_core(blocks=16, block_size=4, max_tokens=16)
    for ident, wanted in params.items():
        core.add(make_request(ident, [ident, 3], wanted))
    together, _ = run_all(core)
    assert computed(core) > 6 * (2 + 39), "nothing was preempted"
    assert together == alone
    assert len({tuple(tokens) for tokens in alone.values()}) == 6


def test_stops_at_end_of_text_and_at_stop_ids() -> None:
    answer = answer_alone([1, 2, 3], 20)
    eos, stop = answer[7], answer[4]
    first = {token: answer.index(token) for token in (eos, stop)}
    for params, ends in (
        (SamplingParams(max_tokens=20, temperature=0.0), first[eos] + 1),
        (SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True), 20),
        (SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, stop_token_ids=[stop]), first[stop] + 1),
    ):
        core = make_core(eos=(eos,))
        core.add(make_request(1, [1, 2, 3], params))
        tokens, reasons = run_all(core)
        assert tokens[1] == answer[:ends]
        assert reasons[1] == ("length" if ends == 20 else "stop")


@pytest.mark.parametrize("max_tokens", [1, 5, 32])
def test_scores_every_next_token(max_tokens: int) -> None:
    core = make_core(max_tokens=max_tokens, blocks=16)
    prompts = {i: [(3 * i + j * j) % VOCAB for j in range(length)] for i, length in enumerate((2, 4, 5, 17, 40))}
    for ident, prompt in prompts.items():
        core.add(make_request(ident, prompt, None))
    core.add(make_request(99, [4, 2], greedy(30)))
    scores: dict[int, np.ndarray] = {}
    while core.busy:
        scores.update(core.step().scores)
        check_blocks(core)
    for ident, prompt in prompts.items():
        logits = [torch.from_numpy(next_logits(prompt[:i])).double() for i in range(1, len(prompt))]
        expected = [row.log_softmax(0)[token].item() for row, token in zip(logits, prompt[1:], strict=True)]
        np.testing.assert_allclose(scores[ident], expected, atol=1e-5)
    assert core.scheduler.pool.available == 16 and not core._scores


def test_a_preempted_score_is_told_once() -> None:
    core = make_core(max_tokens=3, blocks=16)
    for ident in (1, 2):
        core.add(make_request(ident, [ident], greedy(50)))
    core.step()
    prompt = [(j * j) % VOCAB for j in range(40)]
    core.add(make_request(9, prompt, None))
    preempted, scores = 0, {}
    while core.busy:
        events = core.step()
        preempted += events.stats.preempted
        scores.update(events.scores)
    assert preempted and len(scores[9]) == 39
    expected = torch.from_numpy(next_logits(prompt[:5])).double().log_softmax(0)[prompt[5]].item()
    assert scores[9][4] == pytest.approx(expected, abs=1e-5)


def test_a_repeated_prompt_is_computed_once() -> None:
    core = make_core()
    prompt = list(range(33))
    for ident in (1, 2):
        core.add(make_request(ident, prompt, greedy(1)))
        tokens, _ = run_all(core)
        assert tokens == {ident: answer_alone(prompt, 1)}
    assert computed(core) == 33 + 1


def test_step_stats() -> None:
    core = make_core()
    core.add(make_request(1, [1, 2, 3], greedy(2)))
    first = core.step().stats
    assert (first.tokens, first.requests, first.mode, first.cut, first.budget) == (3, 1, "fused", 0, None)
    assert first.host > 0 and first.free_blocks == 63
    assert core.step().stats.tokens == 1


def test_every_step_runs_as_planned_for_its_new_tokens_and_contexts() -> None:
    core = make_core(max_tokens=8)
    asked: list[tuple[list[int], list[int]]] = []

    def plan(counts: np.ndarray, contexts: np.ndarray) -> StepPlan:
        asked.append((counts.tolist(), contexts.tolist()))
        return StepPlan("weave", int(counts.sum()) // 2) if counts.sum() > 1 else StepPlan("serial")

    core.plan = plan
    core.add(make_request(1, [1, 2, 3], greedy(4)))
    core.step()
    core.add(make_request(2, list(range(10)), greedy(2)))
    run_all(core)
    assert asked == [([3], [3]), ([1, 7], [4, 7]), ([1, 3], [5, 10]), ([1, 1], [6, 11])]
    ran = [(step.plan.mode, step.plan.cut) for step in core.runner.steps]  # type: ignore[attr-defined]
    assert ran == [("weave", 1), ("weave", 4), ("weave", 2), ("weave", 1)]


def test_a_planner_plans_the_steps_of_an_engine() -> None:
    """Costs of a link so slow that a step of two tokens is woven."""
    stage, slow = Curve.of({0: 0.0, 100: 1e-2}), Curve.of({0: 0.0, 100: 5e-3})
    costs = MeasuredCosts(
        layers=4, stages={"embed": stage, "attention": stage, "mlp": stage}, norm_curve=slow, all_reduce_curve=slow,
        reordered_curve=slow, fused_curves={None: slow},
    )  # fmt: skip
    core = make_core()
    core.plan = Planner("auto", costs).plan
    core.add(make_request(1, list(range(20)), greedy(3)))
    stats = [core.step().stats for _ in range(3)]
    assert [s.mode for s in stats] == ["weave", "fused", "fused"] and 7 < stats[0].cut < 13
