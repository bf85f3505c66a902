"""What the ranks of the executor tests run."""

import random
import time
from types import SimpleNamespace

import torch

from tokenweave.comm import Group
from tokenweave.config import ModelConfig, shard
from tokenweave.execute import Executor
from tokenweave.layers.batch import Batch
from tokenweave.layers.norm import RMSNorm
from tokenweave.models.decoder import Decoder
from tokenweave.models.stage import Stage
from tokenweave.plan import StepPlan

HIDDEN, MAX_TOKENS = 24, 64
EPS = 0.5  # a norm with a small one hides sums that are all twice as large
MODES = ("serial", "reordered", "fused")


def linear_stage(name: str, seed: int, rank: int) -> tuple[Stage, torch.Tensor]:
    """A stage y = x @ w whose weight differs by rank, and that weight."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    weight = torch.randn(HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5

    def compute(normed: torch.Tensor | None, batch: Batch, out: torch.Tensor | None) -> torch.Tensor:
        x = inputs(batch) if normed is None else normed
        y = x @ weight  # private first: out may be the memory of normed
        return y if out is None else out.copy_(y)

    return Stage(name, compute, norm(seed)), weight


def norm(seed: int) -> RMSNorm:
    made = RMSNorm(HIDDEN, EPS, dtype=torch.float32)
    made.weight.data.copy_(torch.rand(HIDDEN, generator=torch.Generator().manual_seed(seed)) + 0.5)
    return made


def inputs(batch: Batch) -> torch.Tensor:
    return torch.stack(
        [torch.sin(torch.arange(HIDDEN) * 0.3 + float(t)) for t in batch.token_ids] or [torch.zeros(HIDDEN)]
    )[: batch.num_tokens]


def model_of(stages: list[Stage], rank: int, size: int) -> SimpleNamespace:
    return SimpleNamespace(
        stages=stages, config=SimpleNamespace(hidden_size=HIDDEN), shard=SimpleNamespace(rank=rank, size=size),
        dtype=torch.float32, device="cpu",
    )  # fmt: skip


def run_linear(group: Group, counts: list[int], sleeps: bool = False) -> list[dict]:
    """Every mode at every token count: the final rows, and the copies the collective counted."""
    stages = [linear_stage(f"s{i}", i, group.rank)[0] for i in range(4)]
    if sleeps:
        stages = [Stage(s.name, _late(s.compute, group.rank), s.norm) for s in stages]
    found = []
    with group.open_collective(hidden_size=HIDDEN, max_tokens=MAX_TOKENS, dtype=torch.float32) as collective:
        executor = Executor(model_of(stages, group.rank, group.size), collective, max_tokens=MAX_TOKENS)  # type: ignore[arg-type]
        for count in counts:
            batch = Batch.prompts([list(range(count))])
            rows = {mode: executor.forward(batch, StepPlan(mode)).clone() for mode in MODES}
            found.append(rows | {"copies": collective.copies})
    return found


def _late(compute, rank):  # noqa: ANN001, ANN202
    draw = random.Random(rank)

    def late(*args):  # noqa: ANN002, ANN202
        time.sleep(draw.random() * 0.003)
        return compute(*args)

    return late


def run_scattering_expert(group: Group, tokens: int) -> dict:
    """A stage that cannot write `out` early: its experts scatter rows while others still read them."""

    def experts(normed: torch.Tensor | None, batch: Batch, out: torch.Tensor | None) -> torch.Tensor:
        assert normed is not None
        private = torch.zeros_like(normed)
        for expert in range(3):
            rows = (batch.token_ids % 3 == expert).nonzero().squeeze(1)
            private.index_add_(0, rows, normed[rows.flip(0)] * (expert + 1 + group.rank))
        return private if out is None else out.copy_(private)

    first, _ = linear_stage("first", 0, group.rank)
    stages = [first, Stage("experts", experts, norm(1))]
    with group.open_collective(hidden_size=HIDDEN, max_tokens=MAX_TOKENS, dtype=torch.float32) as collective:
        executor = Executor(model_of(stages, group.rank, group.size), collective, max_tokens=MAX_TOKENS)  # type: ignore[arg-type]
        batch = Batch.prompts([list(range(tokens))])
        return {mode: executor.forward(batch, StepPlan(mode)).clone() for mode in MODES} | {"copies": collective.copies}


def run_outside_partial(group: Group, tokens: int) -> dict:
    """A stage that ignores `out` and returns memory of its own: right results, and every copy counted."""
    stage, weight = linear_stage("private", 0, group.rank)
    private = Stage("private", lambda normed, batch, out: stage.compute(normed, batch, None), stage.norm)
    with group.open_collective(hidden_size=HIDDEN, max_tokens=MAX_TOKENS, dtype=torch.float32) as collective:
        executor = Executor(model_of([private], group.rank, group.size), collective, max_tokens=MAX_TOKENS)  # type: ignore[arg-type]
        rows = executor.forward(Batch.prompts([list(range(tokens))]), StepPlan("fused")).clone()
        return {"rows": rows, "copies": collective.copies}


def run_layers(group: Group, config: ModelConfig, prompt: list[int], mode: str) -> dict:
    """A decoder with weights that depend on names alone: every stage's input, and the copies counted."""
    model = Decoder(config, shard(config, group.size, group.rank), dtype=torch.float32)
    for piece in model.pieces():
        seed = sum(ord(c) * (i + 1) for i, c in enumerate(piece.name))
        whole = torch.randn(piece.shape, generator=torch.Generator().manual_seed(seed)) * 0.2
        piece.target.copy_(
            whole if piece.part is None else whole.transpose(0, piece.dim)[piece.part].transpose(0, piece.dim)
        )
    seen: list[torch.Tensor] = []

    def recorded(stage: Stage) -> Stage:
        def compute(normed: torch.Tensor | None, batch: Batch, out: torch.Tensor | None) -> torch.Tensor:
            if normed is not None:
                seen.append(normed.clone())
            return stage.compute(normed, batch, out)

        return Stage(stage.name, compute, stage.norm)

    model.stages = [recorded(stage) for stage in model.stages]
    with group.open_collective(
        hidden_size=config.hidden_size, max_tokens=MAX_TOKENS, dtype=torch.float32
    ) as collective:
        executor = Executor(model, collective, max_tokens=MAX_TOKENS)
        seen.append(executor.forward(Batch.prompts([prompt]), StepPlan(mode)).clone())
        return {"seen": seen, "copies": collective.copies}
