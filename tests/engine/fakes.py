"""A model whose answer depends on every token it reads back through the cache, so that a mistake in scheduling or
paging changes it."""

import hashlib

import numpy as np
import torch

from tokenweave.engine.blocks import BlockPool
from tokenweave.engine.core import EngineCore, StepOutput
from tokenweave.engine.events import REASONS
from tokenweave.engine.params import SamplingParams
from tokenweave.engine.request import Request
from tokenweave.engine.scheduler import Scheduler
from tokenweave.engine.step import Step
from tokenweave.engine.tables import BlockTables
from tokenweave.layers.cache import KVCache
from tokenweave.plan.step import StepPlan

VOCAB = 97


def next_logits(context: list[int]) -> np.ndarray:
    """[VOCAB] logits after `context`."""
    digest = hashlib.sha256(np.array(context, dtype=np.int64).tobytes()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little")).normal(size=VOCAB).astype(np.float32) * 2


def next_token(context: list[int]) -> int:
    return int(next_logits(context).argmax())


def answer_alone(prompt: list[int], count: int) -> list[int]:
    """`count` greedy tokens after `prompt`, by nothing but next_token."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeRunner:
    """Stores each token at its slot of a "cache" of ids, and reads contexts back through the batch's block tables."""

    def __init__(self, *, blocks: int, block_size: int, slots: int, max_context: int) -> None:
        self.tables = BlockTables(
            slots=slots, max_context=max_context, cache=KVCache.zeros(1, blocks, block_size, 1, 1, torch.float32)
        )
        self.cache = np.full(blocks * block_size, -1, dtype=np.int64)
        self.block_size = block_size
        self.steps: list[Step] = []

    def run(self, step: Step) -> StepOutput:
        step = Step.decode(step.encode())
        self.steps.append(step)
        batch = self.tables.batch(step)
        assert batch.slot_mapping is not None and batch.block_tables is not None
        assert len(set(batch.slot_mapping.tolist())) == batch.num_tokens, "two tokens written to one place"
        self.cache[batch.slot_mapping.numpy()] = batch.token_ids.numpy()
        contexts: list[list[int]] = []
        offsets = batch.query_offsets_host
        for request, length in enumerate(batch.context_lengths_host):
            slots = batch.block_tables[request].long().unsqueeze(1) * self.block_size + torch.arange(self.block_size)
            whole = self.cache[slots.flatten().numpy()][:length].tolist()
            new = offsets[request + 1] - offsets[request]
            positions = batch.positions[offsets[request] : offsets[request + 1]]
            assert positions.tolist() == list(range(length - new, length))
            contexts += [whole[: length - new + i + 1] for i in range(new)]
        logits = np.array([next_logits(contexts[row]) for row in step.sampled.tolist()]).reshape(-1, VOCAB)
        scores = np.array(
            [
                torch.from_numpy(next_logits(contexts[row])).log_softmax(0)[target].item()
                for row, target in zip(step.scored.tolist(), step.targets.tolist(), strict=True)
            ],
            dtype=np.float32,
        )
        if step.best_only:
            return StepOutput(None, logits.argmax(-1).astype(np.int32), scores)
        return StepOutput(torch.from_numpy(logits), None, scores)


def make_core(
    *,
    blocks: int = 64,
    block_size: int = 4,
    max_tokens: int = 32,
    max_running: int = 8,
    max_context: int = 64,
    prefix_caching: bool = True,
    eos: tuple[int, ...] = (),
) -> EngineCore:
    scheduler = Scheduler(
        BlockPool(blocks),
        block_size=block_size,
        max_tokens_per_step=max_tokens,
        max_running_requests=max_running,
        max_context=max_context,
        prefix_caching=prefix_caching,
    )
    runner = FakeRunner(
        blocks=blocks, block_size=block_size, slots=len(scheduler.slots.requests), max_context=max_context
    )
    return EngineCore(scheduler, runner, lambda counts, contexts: StepPlan("fused"), eos_token_ids=eos)


def make_request(ident: int, prompt: list[int], params: SamplingParams | None, *, context: int = 64) -> Request:
    count = 0 if params is None else params.max_tokens
    limit = min(len(prompt) + count, context)
    return Request(ident, np.array(prompt, dtype=np.int32), params, limit, seed=(params and params.seed) or ident)


def check_blocks(core: EngineCore) -> None:
    """Nobody's block is another's unless shared, none is lost."""
    pool, slots = core.scheduler.pool, core.scheduler.slots
    owned: dict[int, int] = {}
    for slot in slots.order.tolist():
        request = slots.request(slot)
        assert len(set(request.blocks)) == len(request.blocks) == slots.held[slot]
        assert len(request.blocks) * core.scheduler.block_size >= slots.computed[slot]
        for block in request.blocks:
            owned[block] = owned.get(block, 0) + 1
    assert [pool.owners(b) for b in range(pool.num_blocks)] == [owned.get(b, 0) for b in range(pool.num_blocks)]
    assert pool.available == pool.num_blocks - len(owned)


def run_all(core: EngineCore, *, limit: int = 10_000) -> tuple[dict[int, list[int]], dict[int, str | None]]:
    """Tokens and finish reasons by ident, once nobody is left."""
    tokens: dict[int, list[int]] = {}
    reasons: dict[int, str | None] = {}
    for _ in range(limit):
        if not core.busy:
            return tokens, reasons
        events = core.step()
        check_blocks(core)
        for ident, token, reason in zip(events.idents, events.token_ids, events.reasons, strict=True):
            tokens.setdefault(ident, []).append(token)
            reasons[ident] = REASONS[reason]
    raise AssertionError(f"still busy after {limit} steps")
