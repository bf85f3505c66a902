"""What the ranks of the weaving tests run: many cases in one start."""

import functools
import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import torch
from execute.stage_ranks import HIDDEN, linear_stage, model_of

from tokenweave.comm import Collective, Group
from tokenweave.config import ModelConfig, shard
from tokenweave.execute import Executor
from tokenweave.layers.batch import Batch
from tokenweave.layers.cache import KVCache
from tokenweave.models.decoder import Decoder
from tokenweave.models.stage import Stage
from tokenweave.plan import StepPlan

BLOCK, MOST = 8, 1024

COMMON: dict[str, Any] = dict(
    architecture="LlamaForCausalLM", vocab_size=97, hidden_size=48, intermediate_size=70, num_hidden_layers=3,
    num_key_value_heads=3, head_dim=8, max_position_embeddings=128,
)  # fmt: skip
MODELS = [
    ModelConfig(**COMMON, num_attention_heads=6, qkv_bias=True, output_bias=True),
    ModelConfig(**COMMON, num_attention_heads=9, qk_norm=True, tie_word_embeddings=True),
]

# Steps: (new tokens, tokens in the cache) of each request.
MIXED = [(5, 0), (1, 24), (9, 3)]
STEPS = [
    MIXED,
    [(1, 7), (1, 0), (1, 24), (1, 40), (20, 0)],  # decodes, then a prefill
    [(20, 11), (1, 8)],
    [(16, 0)],
    [(2, 0)],
    [(1, 9), (1, 30), (1, 1)],  # fewer tokens than 4 ranks
    [(1, 5)],
]


def build(config: ModelConfig, group: Group) -> Decoder:
    """Weights that depend on names alone."""
    model = Decoder(config, shard(config, group.size, group.rank), dtype=torch.float32)
    for piece in model.pieces():
        seed = sum(ord(c) * (i + 1) for i, c in enumerate(piece.name))
        whole = torch.randn(piece.shape, generator=torch.Generator().manual_seed(seed)) * 0.2
        part = slice(None) if piece.part is None else piece.part
        piece.target.copy_(whole.transpose(0, piece.dim)[part].transpose(0, piece.dim))
    return model


def step_of(cache: KVCache, requests: list[tuple[int, int]], rng: random.Random, slots: list[int]) -> Batch:
    """Requests in the given slots, each with blocks of its own, dealt out in no order."""
    per_slot = cache.num_blocks // 6
    order = list(range(cache.num_blocks))
    random.Random(5).shuffle(order)
    tables = torch.tensor(order[: 6 * per_slot], dtype=torch.int32).view(6, per_slot)[slots]
    positions, mapping = [], []
    for row, (new, past) in zip(tables.tolist(), requests, strict=True):
        positions += range(past, past + new)
        mapping += [row[p // BLOCK] * BLOCK + p % BLOCK for p in range(past, past + new)]
    offsets = [0]
    for new, _ in requests:
        offsets.append(offsets[-1] + new)
    return Batch(
        token_ids=torch.tensor([rng.randrange(97) for _ in positions]),
        positions=torch.tensor(positions),
        query_offsets=torch.tensor(offsets, dtype=torch.int32),
        context_lengths=torch.tensor([sum(r) for r in requests], dtype=torch.int32),
        slot_mapping=torch.tensor(mapping),
        block_tables=tables,
        cache=cache,
    )


def new_cache(model: Decoder) -> KVCache:
    config = model.config
    return KVCache.zeros(config.num_hidden_layers, 6 * 8, BLOCK, model.shard.num_kv_heads, config.head_dim, model.dtype)


class Bench:
    """A model and its executor over a collective with two lanes."""

    def __init__(self, group: Group, model: Decoder, collective: Collective) -> None:
        self.group, self.model, self.collective = group, model, collective
        self.executor = Executor(model, collective, max_tokens=MOST)

    def logits(self, batch: Batch, plan: StepPlan) -> torch.Tensor | None:
        rows = self.executor.forward(batch, plan)
        vocab, size = self.model.config.vocab_size, self.group.size
        widths = [(r + 1) * vocab // size - r * vocab // size for r in range(size)]
        return self.collective.gather(self.model.head(rows), widths)


def every_cut(group: Group) -> list[tuple[str, float]]:
    """Rank 0: the largest difference of any logit from the unwoven one, for every cut of every step and model."""
    found = []
    for number, config in enumerate(MODELS):
        model = build(config, group)
        with group.open_collective(config.hidden_size, MOST, lanes=2) as collective:
            bench = Bench(group, model, collective)
            with closing(bench.executor):
                for requests in STEPS:
                    found += _cuts(bench, requests, f"model {number} {requests}")
    return found if group.rank == 0 else []


def _cuts(bench: Bench, requests: list[tuple[int, int]], what: str) -> list[tuple[str, float]]:
    cache, slots = new_cache(bench.model), list(range(len(requests)))
    past = [(old, 0) for _, old in requests if old]
    if past:
        held = [slot for slot, (_, old) in enumerate(requests) if old]
        bench.executor.forward(step_of(cache, past, random.Random(1), held), StepPlan("serial"))
    batch = step_of(cache, requests, random.Random(2), slots)
    whole = bench.logits(batch, StepPlan("serial"))
    found = []
    for cut in range(batch.num_tokens + 1):
        # what this step writes is poison until it has written it
        for memory in (cache.keys, cache.values):
            memory.flatten(1, 2)[:, batch.slot_mapping] = torch.nan
        woven = bench.logits(batch, StepPlan("weave", cut))
        if whole is not None and woven is not None:
            found.append((f"{what} cut at {cut}", float((woven - whole).abs().max().nan_to_num(torch.inf))))
    return found


def rows_by_lane(group: Group) -> list[str]:
    """The fused operation, called directly: both lanes at once give the bits of the whole, at every cut."""
    wrong = []
    for dtype in (torch.float32, torch.bfloat16):
        draw = torch.Generator().manual_seed(3)
        for tokens, hidden in ((15, 48), (3, 577), (1, 33), (0, 8)):
            partials = torch.randn(group.size, tokens, hidden, generator=draw).to(dtype)
            residual = torch.randn(tokens, hidden, generator=draw).to(dtype)
            weight = torch.rand(hidden, generator=draw) + 0.5
            with group.open_collective(hidden, 16, dtype, lanes=2) as collective:
                own = residual[group.rows(tokens)].clone()
                buffer = collective.buffer(0, tokens).copy_(partials[group.rank])
                whole = collective.all_reduce_add_rms_norm(buffer, own, weight, 1e-5).clone()
                for cut in range(tokens + 1):
                    lanes = (slice(0, cut), slice(cut, tokens))
                    parts = [(partials[group.rank][lane], residual[lane]) for lane in lanes]
                    run = functools.partial(fused_part, group, collective, weight)
                    found = at_once(run, parts)
                    if not torch.equal(torch.cat(found), whole):
                        wrong.append(f"{dtype} [{tokens}, {hidden}] cut at {cut}")
    return wrong


def fused_part(
    group: Group, collective: Collective, weight: torch.Tensor, lane: int, partial: torch.Tensor, residual: torch.Tensor
) -> torch.Tensor:
    buffer = collective.buffer(lane, len(partial)).copy_(partial)
    rows = residual[group.rows(len(partial))].clone()
    return collective.all_reduce_add_rms_norm(buffer, rows, weight, 1e-5, lane=lane).clone()


def at_once(run: Callable[..., torch.Tensor], parts: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """run(lane, *part) of every lane, a thread each."""
    with ThreadPoolExecutor(len(parts)) as pool:
        return [found.result() for found in [pool.submit(run, lane, *part) for lane, part in enumerate(parts)]]


def random_steps(group: Group, count: int) -> float:
    """Requests that come, grow and go, woven at random cuts over one cache and fused over another. Rank 0: the largest
    difference of any logit."""
    rng, worst = random.Random(7), 0.0
    model = build(MODELS[0], group)
    with group.open_collective(model.config.hidden_size, MOST, lanes=2) as collective:
        bench = Bench(group, model, collective)
        with closing(bench.executor):
            fused_cache, woven_cache = new_cache(model), new_cache(model)
            lengths = [0] * 6
            for step in range(count):
                slots = sorted(rng.sample(range(6), rng.randint(1, 6)), key=lambda _: rng.random())
                for slot in slots:
                    if lengths[slot] > 40:
                        lengths[slot] = 0  # another request gets the slot
                requests = [(rng.choice((1, 1, 1, 2, 5, 13, 20)), lengths[slot]) for slot in slots]
                for slot, (new, _) in zip(slots, requests, strict=True):
                    lengths[slot] += new
                tokens = sum(new for new, _ in requests)
                fused = step_of(fused_cache, requests, random.Random(step), slots)
                woven = step_of(woven_cache, requests, random.Random(step), slots)
                whole = bench.logits(fused, StepPlan("fused"))
                parts = bench.logits(woven, StepPlan("weave", rng.randint(0, tokens)))
                if whole is not None and parts is not None:
                    worst = max(worst, float((parts - whole).abs().max().nan_to_num(torch.inf)))
    return worst


def with_sleeps(group: Group, rounds: int) -> list[str]:
    """Random sleeps, unlike on every rank, before and after stages and operations: the same bits as without."""
    model = build(MODELS[0], group)
    draw = random.Random(group.rank)

    def late(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: Any, **options: Any) -> torch.Tensor:
            time.sleep(draw.random() * draw.choice((0, 0, 0.002)))
            result = function(*args, **options)
            time.sleep(draw.random() * draw.choice((0, 0, 0.002)))
            return result

        return run

    wrong = []
    with group.open_collective(model.config.hidden_size, MOST, lanes=2) as collective:
        bench = Bench(group, model, collective)
        with closing(bench.executor):
            prompt, stages = Batch.prompts([[(i * 7) % 97 for i in range(9)], [5, 3, 96]]), model.stages
            expected = {cut: bench.executor.forward(prompt, StepPlan("weave", cut)).clone() for cut in (9, 12)}
            for number in range(rounds):
                compute, communicate = number % 3 != 1, number % 3 != 0
                model.stages = [Stage(s.name, late(s.compute), s.norm) for s in stages] if compute else stages
                with slowed(collective, late if communicate else None):
                    for cut, rows in expected.items():
                        if not torch.equal(bench.executor.forward(prompt, StepPlan("weave", cut)), rows):
                            wrong.append(f"round {number} cut at {cut}")
    return wrong


class slowed:
    """The collective's fused operation through `late` for a while."""

    def __init__(self, collective: Any, late: Callable[[Callable], Callable] | None) -> None:
        self.collective, self.late = collective, late

    def __enter__(self) -> None:
        if self.late:
            self.collective.all_reduce_add_rms_norm = self.late(self.collective.all_reduce_add_rms_norm)

    def __exit__(self, *exc: object) -> None:
        if self.late:
            del self.collective.all_reduce_add_rms_norm


def linear_counts(group: Group, counts: list[int]) -> list[dict[int, torch.Tensor]]:
    """Stages that read their rows at once, with the lanes' buffers poisoned before every step: {cut: rows} by count."""
    stages = [linear_stage(f"s{i}", i, group.rank)[0] for i in range(4)]
    found = []
    with group.open_collective(HIDDEN, MOST, lanes=2) as collective:
        executor = Executor(model_of(stages, group.rank, group.size), collective, max_tokens=MOST)  # type: ignore[arg-type]
        with closing(executor):
            for count in counts:
                batch = Batch.prompts([[token] for token in range(count)])
                rows = {}
                for cut in sorted({0, 1, count // 3, count // 2, count - 1, count} & set(range(count + 1))):
                    for lane in (0, 1):
                        collective.buffer(lane, MOST).fill_(torch.nan)
                    rows[cut] = executor.forward(batch, StepPlan("weave", cut)).clone()
                found.append(rows)
    return found


def fails_woven(group: Group, how: str, directory: str) -> None:
    """Rank 1 fails in the middle of a woven step. Writes what it was told."""
    stages = [linear_stage(f"s{i}", i, group.rank)[0] for i in range(8)]

    def failing(normed: torch.Tensor | None, batch: Batch, out: torch.Tensor | None) -> torch.Tensor:
        if group.rank == 1 and int(batch.token_ids[0]) > 0:  # the second lane
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a stage that cannot go on")
        return stages[5].compute(normed, batch, out)

    model = model_of([*stages[:5], Stage("failing", failing, stages[5].norm), *stages[6:]], group.rank, group.size)
    with group.open_collective(HIDDEN, MOST, lanes=2) as collective:
        executor = Executor(model, collective, max_tokens=MOST)  # type: ignore[arg-type]
        try:
            with closing(executor):
                executor.forward(Batch.prompts([[token] for token in range(33)]), StepPlan("weave", 16))
        except Exception as error:
            with open(f"{directory}/told-{group.rank}", "w") as file:
                file.write(f"{type(error).__name__}: {error}")
            raise


COUNTS = [*range(17), 1024]


def all_checks(group: Group) -> dict[str, Any]:
    found: dict[str, Any] = {"every_cut": every_cut(group), "rows_by_lane": rows_by_lane(group)}
    found["random_steps"] = random_steps(group, 200)
    if group.size == 2:
        found["with_sleeps"] = with_sleeps(group, 50)
    if group.size in (2, 4):
        found["linear_counts"] = linear_counts(group, COUNTS)
    return found
