"""All ranks make the same calls on the collective, of the same shapes, however unequal their parts of the model are.

Ranks run one after another here, against a collective that writes down what they ask for.
"""

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from tokenweave.config import ModelConfig, shard
from tokenweave.config.model import ExpertsConfig
from tokenweave.engine.runner import SCORED_ROWS, RankRunner
from tokenweave.engine.step import Step
from tokenweave.engine.tables import BlockTables
from tokenweave.execute import Executor
from tokenweave.layers.cache import KVCache
from tokenweave.models.decoder import Decoder
from tokenweave.plan import StepPlan

MOST, HIDDEN = 600, 48


def config(heads: int, kv_heads: int, **changes: Any) -> ModelConfig:
    facts = dict(
        architecture="LlamaForCausalLM", vocab_size=61, hidden_size=HIDDEN, intermediate_size=29, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=8, max_position_embeddings=1024,
    )  # fmt: skip
    return ModelConfig(**(facts | changes))


def experts(columns: int, layers: tuple[bool, bool] = (True, True)) -> ExpertsConfig:
    return ExpertsConfig(count=4, per_token=2, intermediate_size=columns, normalised=True, layers=layers)


MODELS = [
    config(5, 5), config(9, 3), config(8, 2, qk_norm=True),
    config(5, 1, qkv_bias=True, output_bias=True, mlp_bias=True), config(6, 2, experts=experts(31)),
    config(5, 5, experts=experts(100, (False, True))), config(7, 7, experts=experts(8)),
]  # fmt: skip


class Written:
    """A collective's calls. Sums are this rank's own partials."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.calls = rank, size, []
        self._buffers = torch.zeros(2, MOST, HIDDEN)

    def buffer(self, lane: int, tokens: int) -> torch.Tensor:
        return self._buffers[lane, :tokens]

    def _own(self, tokens: int) -> slice:
        return slice(self.rank * tokens // self.size, (self.rank + 1) * tokens // self.size)

    def _note(self, *call: Any) -> None:
        self.calls.append(call)

    def all_reduce(self, partial: torch.Tensor, *, lane: int = 0) -> torch.Tensor:
        self._note("all_reduce", lane, partial.shape)
        return partial

    def all_reduce_add_rms_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, *_: Any, lane: int = 0, budget: int | None = None
    ) -> torch.Tensor:
        assert len(residual) == len(partial[self._own(len(partial))])
        self._note("fused", lane, partial.shape)
        return partial

    def reduce_scatter(self, partial: torch.Tensor, *, lane: int = 0) -> torch.Tensor:
        self._note("reduce_scatter", lane, partial.shape)
        return partial[self._own(len(partial))].clone()

    def all_gather(self, rows: torch.Tensor, tokens: int, *, lane: int = 0) -> torch.Tensor:
        self._note("all_gather", lane, tokens, rows.shape[1])
        return self.buffer(lane, tokens)

    def gather(self, columns: torch.Tensor, widths: list[int], *, lane: int = 0) -> torch.Tensor | None:
        assert columns.shape[1] == widths[self.rank]
        self._note("gather", lane, len(columns), tuple(widths), columns.dtype)
        return columns.new_zeros(len(columns), sum(widths)) if self.rank == 0 else None


def step(counts: list[int], plan: StepPlan, *, best_only: bool, scored: int) -> Step:
    tokens, requests = sum(counts), len(counts)
    numbers = [np.arange(n, dtype=np.int32) for n in range(tokens + 1)]
    blocks = np.repeat(np.arange(requests), 2).astype(np.int32)
    return Step(
        plan, numbers[requests], np.zeros(requests, np.int32), np.array(counts, np.int32), numbers[tokens] % 61,
        sampled=(np.cumsum(counts) - 1).astype(np.int32), scored=numbers[scored], targets=numbers[scored] % 61,
        table_slots=blocks, table_indexes=np.tile(np.arange(2), requests).astype(np.int32),
        table_blocks=np.arange(2 * requests, dtype=np.int32), admitted=numbers[requests],
        prompt_lengths=np.array(counts, np.int32), best_only=best_only,
    )  # fmt: skip


def steps() -> list[Step]:
    found = []
    for counts in ([1], [1] * 7, [13, 1, 33], [577]):
        tokens = sum(counts)
        plans = [StepPlan(mode) for mode in ("serial", "reordered", "fused")]
        plans += [StepPlan("weave", cut) for cut in (0, 1, tokens // 3, tokens)]
        scored = min(tokens, SCORED_ROWS + 1)
        found += [
            step(counts, plan, best_only=i % 2 == 0, scored=scored * (i % 3 == 0)) for i, plan in enumerate(plans)
        ]
    return found


def calls(model_config: ModelConfig, size: int, rank: int) -> list[Any]:
    torch.manual_seed(rank)
    model = Decoder(model_config, shard(model_config, size, rank), dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.normal_()
    cache = KVCache.zeros(2, 16, 512, model.shard.num_kv_heads, 8, torch.float32, "cpu")
    written: Any = Written(rank, size)
    with closing(Executor(model, written, max_tokens=MOST)) as executor:
        runner = RankRunner(executor, written, BlockTables(slots=8, max_context=1024, cache=cache))
        for each in steps():
            runner.run(each)
    return written.calls


@pytest.mark.parametrize("number", range(len(MODELS)))
def test_calls_do_not_depend_on_a_ranks_own_part(number: int) -> None:
    for size in (2, 3, 5):
        first, *others = (calls(MODELS[number], size, rank) for rank in range(size))
        assert len({call[0] for call in first}) == 5, "every operation is there"
        for rank, other in enumerate(others, 1):
            assert other == first, f"rank {rank} of {size}"


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_whether_steps_are_captured_does_not_either(dtype: torch.dtype) -> None:
    """A step that is captured is padded, so ranks that disagree come with unlike numbers of rows."""
    for columns in (8, 29, 31, 40, 64, 72, 96, 100, 768):
        facts = config(8, 2, experts=experts(columns, (True, False)), hidden_size=64)
        for size in range(2, 9):
            ranks = [Decoder(facts, shard(facts, size, rank), dtype=dtype, device="meta") for rank in range(size)]
            for stages in zip(*(rank.stages for rank in ranks), strict=True):
                said = {getattr(stage.compute, "capturable", True) for stage in stages}
                assert len(said) == 1, f"{stages[0].name} of {columns} columns on {size} ranks"
