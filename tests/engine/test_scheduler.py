"""The scheduler beside a plain record of what it was given: any arrivals, lengths and cancellations."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tokenweave.engine.blocks import BlockPool
from tokenweave.engine.params import SamplingParams
from tokenweave.engine.request import Request
from tokenweave.engine.scheduler import Scheduled, Scheduler
from tokenweave.plan.step import StepPlan

CONTEXT = 24


def make(
    *, blocks: int = 64, block_size: int = 4, tokens: int = 16, running: int = 4, prefix_caching: bool = True
) -> Scheduler:
    return Scheduler(
        BlockPool(blocks),
        block_size=block_size,
        max_tokens_per_step=tokens,
        max_running_requests=running,
        max_context=CONTEXT,
        prefix_caching=prefix_caching,
    )


def request(ident: int, length: int, new: int = 4, first: int = 0) -> Request:
    prompt = np.arange(first, first + length, dtype=np.int32)
    return Request(ident, prompt, SamplingParams(max_tokens=new), min(length + new, CONTEXT))


def run(scheduler: Scheduler) -> Scheduled:
    """One step, after which each sampled request has one more token, always 7, or is finished."""
    scheduled = scheduler.schedule(lambda counts, contexts: StepPlan("fused"))
    assert scheduled is not None
    scheduler.commit(scheduled)
    slots = scheduler.slots
    slots.append(scheduled.sampled_slots, np.full(len(scheduled.sampled_slots), 7, dtype=np.int32))
    for slot in scheduled.sampled_slots.tolist():
        if slots.length[slot] >= slots.request(slot).limit:
            scheduler.finish(slot)
    return scheduled


def counts(scheduled: Scheduled) -> list[int]:
    return scheduled.step.counts.tolist()


def test_a_long_prompt_goes_in_chunks_behind_the_decodes() -> None:
    scheduler = make(tokens=8)
    scheduler.add(request(1, 3))
    assert counts(run(scheduler)) == [3]
    scheduler.add(request(2, 19, first=50))
    seen = [counts(run(scheduler)) for _ in range(4)]
    assert seen == [[1, 7], [1, 7], [1, 5], [1]]


def test_first_come_first_served_within_the_limits() -> None:
    scheduler = make(tokens=10, running=2)
    for ident in range(4):
        scheduler.add(request(ident, 6, new=2, first=100 * ident))
    assert counts(run(scheduler)) == [6, 4]
    assert counts(run(scheduler)) == [1, 2]
    assert [scheduler.slots.request(s).ident for s in scheduler.slots.order.tolist()] == [1]
    assert counts(run(scheduler)) == [1, 6]


def test_no_more_running_requests_than_tokens_in_a_step() -> None:
    assert len(make(tokens=3, running=8).slots.requests) == 3


def test_the_latest_arrival_is_preempted_and_comes_back_first() -> None:
    scheduler = make(blocks=6, block_size=4)
    scheduler.add(request(1, 7, new=17))
    run(scheduler)
    scheduler.add(request(2, 7, new=12, first=50))
    scheduler.add(request(3, 7, new=2, first=90))
    order = []
    preempted = 0
    while scheduler.busy:
        preempted += run(scheduler).preempted
        order.append([scheduler.slots.request(s).ident for s in scheduler.slots.order.tolist()])
    assert preempted > 0
    first_alone = order.index([1])
    assert [1, 2] in order[:first_alone] and all(ids in ([1], [2], [2, 3], [3], []) for ids in order[first_alone:])
    assert scheduler.pool.available == 6


def test_a_cached_prefix_is_not_computed_but_the_last_token_is() -> None:
    scheduler = make()
    for length, expected in ((8, [8]), (8, [4]), (9, [1]), (12, [4]), (3, [3])):
        scheduler.add(request(1, length, new=1))
        assert counts(run(scheduler)) == expected
    assert scheduler.pool.available == 64


def test_requests_that_run_share_their_prefix() -> None:
    scheduler = make()
    scheduler.add(request(1, 9))
    run(scheduler)
    scheduler.add(request(2, 9))
    assert counts(run(scheduler)) == [1, 1]
    first, second = (scheduler.slots.request(s).blocks for s in scheduler.slots.order.tolist())
    assert first[:2] == second[:2] and first[2] != second[2]
    assert scheduler.cancel(1) and not scheduler.cancel(1)
    assert scheduler.pool.available == 64 - 3


def test_an_answer_is_a_prefix_too() -> None:
    scheduler = make()
    scheduler.add(request(1, 6, new=8))
    while scheduler.busy:
        run(scheduler)
    longer = Request(2, np.array([*range(6), *[7] * 8], dtype=np.int32), SamplingParams(), 20)
    scheduler.add(longer)
    assert counts(run(scheduler)) == [2]


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_nothing_to_do(prefix_caching: bool) -> None:
    scheduler = make(prefix_caching=prefix_caching)
    assert not scheduler.busy and scheduler.schedule(lambda counts, contexts: StepPlan("fused")) is None


class AnyTraffic(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 3, 4, 8]),
        spare=st.integers(0, 8),
        tokens=st.integers(1, 30),
        running=st.integers(1, 6),
        prefix_caching=st.booleans(),
    )
    def start(self, block_size: int, spare: int, tokens: int, running: int, prefix_caching: bool) -> None:
        self.scheduler = make(
            blocks=-(-CONTEXT // block_size) + spare,
            block_size=block_size,
            tokens=tokens,
            running=running,
            prefix_caching=prefix_caching,
        )
        self.tokens, self.running = tokens, running
        self.live: list[int] = []  # by arrival
        self.arrived = 0

    @rule(
        length=st.integers(1, CONTEXT - 1),
        new=st.integers(1, 20),
        first=st.sampled_from([0, 0, 50, 90]),
        score=st.booleans(),
    )
    def add(self, length: int, new: int, first: int, score: bool) -> None:
        made = request(self.arrived, length, new, first)
        if score:
            made.params = None
        self.scheduler.add(made)
        self.live.append(self.arrived)
        self.arrived += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        ident = data.draw(st.sampled_from(self.live))
        assert self.scheduler.cancel(ident)
        self.live.remove(ident)

    @precondition(lambda self: self.live)
    @rule()
    def step(self) -> None:
        scheduler, slots = self.scheduler, self.scheduler.slots
        under_way = slots.order[slots.length[slots.order] - slots.computed[slots.order] > 1]
        assert under_way.tolist() in ([], slots.order[-1:].tolist()), "a prefill under way is the latest arrival"
        scheduled = scheduler.schedule(lambda counts, contexts: StepPlan("fused"))
        assert scheduled is not None, "somebody waits and nobody runs"
        step = scheduled.step
        assert 0 < step.counts.sum() == len(step.token_ids) <= self.tokens
        assert len(set(step.slots.tolist())) == len(step.slots) <= self.running
        idents = [slots.request(s).ident for s in step.slots.tolist()]
        assert self.live[0] in idents, "the earliest did not proceed"
        for slot, start, count in zip(step.slots.tolist(), step.starts.tolist(), step.counts.tolist(), strict=True):
            assert slots.computed[slot] == start and start + count <= slots.length[slot]
            assert len(slots.request(slot).blocks) * scheduler.block_size >= start + count
        scheduler.commit(scheduled)
        sampled = scheduled.sampled_slots
        slots.append(sampled, np.full(len(sampled), 7, dtype=np.int32))
        for slot in step.slots.tolist():
            through = slots.computed[slot] == slots.length[slot] if slots.scores[slot] else (
                slots.length[slot] >= slots.request(slot).limit
            )  # fmt: skip
            if through:
                self.live.remove(scheduler.finish(slot).ident)

    @invariant()
    def blocks_are_owned_by_those_who_run(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        pool, slots = self.scheduler.pool, self.scheduler.slots
        held = [b for s in slots.order.tolist() for b in slots.request(s).blocks]
        assert [pool.owners(b) for b in range(pool.num_blocks)] == [held.count(b) for b in range(pool.num_blocks)]
        assert pool.available == pool.num_blocks - len(set(held))
        running = [slots.request(s).ident for s in slots.order.tolist()]
        assert running + list(self.scheduler.waiting) == self.live, "by arrival: those that run, then those that wait"

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(100 * CONTEXT):
            if not self.live:
                break
            self.step()
        assert not self.live and not self.scheduler.busy
        assert self.scheduler.pool.available == self.scheduler.pool.num_blocks


TestAnyTraffic = AnyTraffic.TestCase
TestAnyTraffic.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
