"""Which tokens the next step runs: continuous batching with chunked prefill over a paged cache."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tokenweave.engine.blocks import ROOT, BlockPool, chain
from tokenweave.engine.request import Request
from tokenweave.engine.slots import Slots
from tokenweave.engine.step import Step
from tokenweave.plan.step import StepPlan

# (new tokens, context lengths with them), both [requests] -> how the step runs
PlanStep = Callable[[np.ndarray, np.ndarray], StepPlan]


@dataclass(frozen=True)
class Scheduled:
    """A step, and whose its results are: sampled_slots go with step.sampled, row by row, scored_slots with scored."""

    step: Step
    sampled_slots: np.ndarray
    scored_slots: np.ndarray
    admitted: list[int]  # slots that got their request in this step
    reused: int  # tokens that these had in the cache already
    preempted: int  # requests


@dataclass
class _Draft:
    """A step in the making."""

    budget: int
    entries: list[tuple[int, int, int]] = field(default_factory=list)  # of the block table: slot, index, block
    chunks: list[tuple[int, int]] = field(default_factory=list)  # of prefill: slot, tokens
    admitted: list[int] = field(default_factory=list)
    short: bool = False  # of blocks: somebody was preempted or has to wait
    reused: int = 0
    preempted: int = 0


class Scheduler:
    """First come, first served. A step takes the running decodes, then chunks of running prefills, then new requests,
    up to `max_tokens_per_step` tokens and `max_running_requests` requests.

    When blocks run out, the latest arrival gives its blocks up to an earlier one and is computed again later; one that
    could only take from earlier ones waits with what it has. The earliest can take from all others and the cache
    holds a whole context, so it always proceeds and nobody starves.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_tokens_per_step: int,
        max_running_requests: int,
        max_context: int,
        prefix_caching: bool = True,
    ) -> None:
        self.pool, self.block_size, self.prefix_caching = pool, block_size, prefix_caching
        self.max_tokens = max_tokens_per_step
        # a running request that gets no token in a step of decodes would only hold blocks
        self.slots = Slots(min(max_running_requests, max_tokens_per_step), max_context)
        self.waiting: OrderedDict[int, Request] = OrderedDict()

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or len(self.slots.order) > 0

    def add(self, request: Request) -> None:
        """Queue a request; its `limit` must fit the cache and the context."""
        assert 0 < len(request.token_ids) <= self.slots.tokens.shape[1]
        self.waiting[request.ident] = request

    def cancel(self, ident: int) -> bool:
        """Forget a request and free what it holds, at once. False if there is none."""
        slot = self.slots.find(ident)
        if slot is not None:
            self.finish(slot)
            return True
        return self.waiting.pop(ident, None) is not None

    def finish(self, slot: int) -> Request:
        """The request in `slot` is done: its blocks are free."""
        request = self.slots.leave(slot)
        self.pool.release(request.blocks)
        request.blocks = []
        return request

    def schedule(self, plan: PlanStep) -> Scheduled | None:
        """The next step, run as `plan` says; None if nobody has anything to run."""
        slots, draft = self.slots, _Draft(self.max_tokens)
        order = slots.order
        remaining = slots.length[order] - slots.computed[order]
        decodes = self._grow_decodes(order[remaining == 1], draft)
        draft.budget -= len(decodes)
        self._continue_prefills(order[remaining > 1], draft)
        self._admit(draft)
        return self._describe(decodes, draft, plan) if len(decodes) or draft.chunks else None

    def commit(self, scheduled: Scheduled) -> None:
        """The step has run: its tokens are cached, and blocks that it filled can be reused."""
        slots, step = self.slots, scheduled.step
        slots.computed[step.slots] += step.counts
        if not self.prefix_caching:
            return
        full = slots.computed[step.slots] // self.block_size
        for index in np.flatnonzero(full > slots.named[step.slots]).tolist():
            slot, count = int(step.slots[index]), int(full[index])
            request = slots.request(slot)
            names = self._names(request, slots.tokens[slot], count)
            for block in range(int(slots.named[slot]), count):
                self.pool.name(request.blocks[block], names[block])
            slots.named[slot] = count

    def _grow_decodes(self, decodes: np.ndarray, draft: _Draft) -> np.ndarray:
        """Room for one more token of each decode, as far as there is any; those that got it."""
        slots = self.slots
        needy = decodes[slots.computed[decodes] >= slots.held[decodes] * self.block_size].tolist()
        without = {slot for slot in needy if slots.requests[slot] is None or not self._grow(slot, 1, draft)}
        if not draft.short:
            return decodes
        kept = [s for s in decodes.tolist() if s not in without and slots.requests[s] is not None]
        return np.array(kept, dtype=np.int32)

    def _continue_prefills(self, prefills: np.ndarray, draft: _Draft) -> None:
        """The next chunk of the one under way, if any: nobody is admitted after it before its last chunk, so it is the
        latest arrival and takes blocks from nobody."""
        slots = self.slots
        for slot in prefills.tolist():
            if not draft.budget:
                return
            if slots.requests[slot] is None:  # preempted for an earlier one
                continue
            chunk = min(int(slots.length[slot] - slots.computed[slot]), draft.budget)
            if self._grow(slot, chunk, draft):
                draft.chunks.append((slot, chunk))
                draft.budget -= chunk

    def _admit(self, draft: _Draft) -> None:
        """Start waiting requests, in order, while tokens, slots and blocks are left for the whole of the first."""
        slots = self.slots
        while draft.budget and self.waiting and slots.free and not draft.short:
            request = next(iter(self.waiting.values()))
            length = len(request.token_ids)
            found = self._cached_prefix(request)
            need = self._blocks(length) - len(found) + self.pool.unowned(found)
            # one spare block for each that runs, or the newcomer would be preempted within a few steps
            if need + len(slots.order) > self.pool.available:
                return
            self.waiting.popitem(last=False)
            slot = slots.take(request)
            self.pool.share(found)
            self._attach(slot, found, draft)
            slots.named[slot] = len(found)
            slots.computed[slot] = len(found) * self.block_size
            draft.reused += len(found) * self.block_size
            chunk = min(length - int(slots.computed[slot]), draft.budget)
            self._grow(slot, chunk, draft)
            draft.chunks.append((slot, chunk))
            draft.admitted.append(slot)
            draft.budget -= chunk

    def _cached_prefix(self, request: Request) -> list[int]:
        """Blocks that hold the start of the prompt already; its last token is always computed, to have its logits."""
        if not self.prefix_caching or request.scores:
            return []
        full = (len(request.token_ids) - 1) // self.block_size
        return self.pool.find(self._names(request, request.token_ids, full)[:full])

    def _names(self, request: Request, tokens: np.ndarray, count: int) -> list[bytes]:
        """The first `count` names of the request's hash chain, or more."""
        names, size = request.block_names, self.block_size
        for block in range(len(names), count):
            names.append(chain(names[-1] if names else ROOT, tokens[block * size : (block + 1) * size]))
        return names

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _grow(self, slot: int, tokens: int, draft: _Draft) -> bool:
        """Blocks for `tokens` more of the request, from later arrivals if need be; False if even that is not enough."""
        slots = self.slots
        need = self._blocks(int(slots.computed[slot]) + tokens) - int(slots.held[slot])
        while need > self.pool.available:
            draft.short = True
            latest = int(slots.order[-1])
            if latest == slot:
                return False
            self._preempt(latest, draft)
        if need > 0:
            self._attach(slot, self.pool.allocate(need), draft)
        return True

    def _attach(self, slot: int, blocks: list[int], draft: _Draft) -> None:
        first = int(self.slots.held[slot])
        self.slots.request(slot).blocks.extend(blocks)
        draft.entries.extend((slot, first + i, block) for i, block in enumerate(blocks))
        self.slots.held[slot] += len(blocks)

    def _preempt(self, slot: int, draft: _Draft) -> None:
        """Back to the head of the queue: the latest arrival that runs came before all that wait."""
        request = self.finish(slot)
        draft.preempted += 1
        self.waiting[request.ident] = request
        self.waiting.move_to_end(request.ident, last=False)

    def _describe(self, decodes: np.ndarray, draft: _Draft, plan: PlanStep) -> Scheduled:
        slots = self.slots
        chunk_slots, chunk_counts = np.array(draft.chunks, dtype=np.int32).reshape(-1, 2).T
        scheduled = np.concatenate((decodes, chunk_slots)).astype(np.int32)
        counts = np.concatenate((np.ones(len(decodes), dtype=np.int32), chunk_counts))
        starts = slots.computed[scheduled]
        pieces = [slots.tokens[decodes, slots.computed[decodes]]]
        for (slot, count), start in zip(draft.chunks, starts[len(decodes) :].tolist(), strict=True):
            pieces.append(slots.tokens[slot, start : start + count])
        ends = np.cumsum(counts, dtype=np.int32)
        scoring = slots.scores[scheduled]
        samples = (starts + counts == slots.length[scheduled]) & ~scoring
        scored, targets, scored_slots = self._scored(scheduled, starts, ends, np.flatnonzero(scoring))
        table = np.array(draft.entries, dtype=np.int32).reshape(-1, 3).T
        step = Step(
            plan=plan(counts, starts + counts),
            slots=scheduled,
            starts=starts,
            counts=counts,
            token_ids=np.concatenate(pieces),
            sampled=ends[samples] - 1,
            scored=scored,
            targets=targets,
            table_slots=table[0],
            table_indexes=table[1],
            table_blocks=table[2],
            admitted=np.array(draft.admitted, dtype=np.int32),
            prompt_lengths=slots.prompt_length[draft.admitted],
        )
        return Scheduled(step, scheduled[samples], scored_slots, draft.admitted, draft.reused, draft.preempted)

    def _scored(
        self, scheduled: np.ndarray, starts: np.ndarray, ends: np.ndarray, scoring: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows of the step whose next token is to be scored, those tokens, and the slot of each."""
        rows, targets, owners = ([np.zeros(0, dtype=np.int32)] for _ in range(3))
        for index in scoring.tolist():
            slot, start, end = int(scheduled[index]), int(starts[index]), int(ends[index])
            first = int(ends[index - 1]) if index else 0
            count = min(end - first, int(self.slots.length[slot]) - 1 - start)  # nothing follows the last token
            rows.append(np.arange(first, first + count, dtype=np.int32))
            targets.append(self.slots.tokens[slot, start + 1 : start + 1 + count])
            owners.append(np.full(count, slot, dtype=np.int32))
        return np.concatenate(rows), np.concatenate(targets), np.concatenate(owners)
