"""What the ranks of the model tests run: many cases in one start."""

from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from tokenweave.comm import Group
from tokenweave.execute import Executor
from tokenweave.layers.batch import Batch
from tokenweave.layers.cache import KVCache
from tokenweave.models.decoder import Decoder
from tokenweave.models.loading import load_model
from tokenweave.plan import StepPlan

MAX_TOKENS = 128
DECODE_MODES = {"weave": "fused"}  # one token cannot be cut


@dataclass(frozen=True)
class Case:
    directory: Path
    prompt: list[int]
    mode: str = "fused"
    dtype: torch.dtype = torch.float32
    greedy: int = 0  # tokens to generate after the prompt
    cut: int = 6  # of the prompt's tokens, into lanes, when woven
    chunks: tuple[int, ...] = ()  # where the prompt is cut into steps
    fault: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


def run_cases(group: Group, cases: list[Case]) -> list[tuple[torch.Tensor, list[int]]]:
    """Rank 0's (logits of every prompt token, greedy tokens) of each case."""
    return [run_case(group, case) for case in cases]


def run_case(group: Group, case: Case) -> tuple[torch.Tensor, list[int]]:
    model = load_model(case.directory, rank=group.rank, size=group.size, dtype=case.dtype)
    config = model.config
    with ExitStack() as stack:
        collective = stack.enter_context(group.open_collective(config.hidden_size, MAX_TOKENS, case.dtype, 2))
        if case.fault:
            plant(case, model, collective, group)
        executor = stack.enter_context(closing(Executor(model, collective, max_tokens=MAX_TOKENS)))
        prompt_length = torch.tensor([len(case.prompt)], dtype=torch.int32)
        blocks = -(-(len(case.prompt) + case.greedy) // 16)
        cache = KVCache.zeros(
            config.num_hidden_layers, blocks, 16, model.shard.num_kv_heads, config.head_dim, case.dtype
        )

        def logits(tokens: list[int], past: int) -> torch.Tensor:
            positions = torch.arange(past, past + len(tokens))
            batch = Batch(
                token_ids=torch.tensor(tokens),
                positions=positions,
                query_offsets=torch.tensor([0, len(tokens)], dtype=torch.int32),
                context_lengths=torch.tensor([past + len(tokens)], dtype=torch.int32),
                slot_mapping=positions.clone(),
                block_tables=torch.arange(blocks, dtype=torch.int32).unsqueeze(0),
                cache=cache,
                prompt_lengths=prompt_length,
            )
            plan = StepPlan(case.mode, cut=case.cut if case.mode == "weave" else 0)
            rows = executor.forward(batch, plan if past == 0 else StepPlan(DECODE_MODES.get(case.mode, case.mode)))
            vocab = config.vocab_size
            widths = [(r + 1) * vocab // group.size - r * vocab // group.size for r in range(group.size)]
            full = collective.gather(model.head(rows), widths)
            full = full.float() if group.rank == 0 else torch.empty(len(tokens), vocab)
            return collective.broadcast(full)

        prompt_logits = torch.cat([logits(case.prompt[i:j], i) for i, j in pairwise((0, *case.chunks, None))])
        tokens: list[int] = []
        row = prompt_logits[-1]
        for step in range(case.greedy):
            top = row.topk(2).values
            assert float(top[0] - top[1]) > 1e-3, (
                f"{case.directory.name}, step {step}: the top two logits are too close to compare tokens"
            )
            tokens.append(int(row.argmax()))
            row = logits([tokens[-1]], len(case.prompt) + step)[-1]
        return prompt_logits, tokens


def plant(case: Case, model: Decoder, collective: Any, group: Group) -> None:
    """Put one fault in, to show that the comparison sees it."""
    if case.fault == "rope off":
        rope = model.layers[0].self_attn.rope
        rope.cos.fill_(1.0)
        rope.sin.fill_(0.0)
    elif case.fault == "one reduction skipped":
        calls, reduce = [0], collective.all_reduce

        def skip_third(partial: torch.Tensor, *, lane: int = 0) -> torch.Tensor:
            calls[0] += 1
            return partial if calls[0] == 3 else reduce(partial, lane=lane)

        collective.all_reduce = skip_third
    elif case.fault == "bias on every rank":
        for index, block in enumerate(model.layers):
            bias = case.extra[f"model.layers.{index}.self_attn.o_proj.bias"]
            block.self_attn.output.bias = torch.nn.Parameter(bias.clone(), requires_grad=False)
    else:
        raise AssertionError(case.fault)
