"""What the ranks of the model tests on GPUs run: every case in one start."""

from contextlib import closing
from pathlib import Path

import torch

from tokenweave.comm import Group
from tokenweave.config import ModelConfig
from tokenweave.execute import Executor
from tokenweave.execute.steps import made_up_step
from tokenweave.layers.cache import KVCache
from tokenweave.models.decoder import Decoder
from tokenweave.models.loading import load_model
from tokenweave.plan import StepPlan

MOST, BLOCK_SIZE = 64, 16
CHUNK = 23  # tokens of the prompt's first step, the rest but one of its second; the last is decoded
TURNS = ("as it is", "captured", "replayed")  # of steps of a size in graphs


def run_models(group: Group, cases: list[tuple[Path, list[int]]], dtypes: list[torch.dtype]) -> list[dict]:
    """Of each model and its prompt {(dtype, mode): logits of every token of the prompt, on the CPU}, on rank 0."""
    found = []
    for directory, prompt in cases:
        logits = {}
        for dtype in dtypes:
            model = load_model(directory, rank=group.rank, size=group.size, dtype=dtype, device=str(group.device))
            logits |= {(dtype, mode): rows for mode, rows in run_model(group, model, prompt, dtype).items()}
        found.append(logits)
    return found


def run_model(group: Group, model: Decoder, prompt: list[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    config, found = model.config, {}
    parts = [(r + 1) * config.vocab_size // group.size - r * config.vocab_size // group.size for r in range(group.size)]
    with (
        group.open_collective(config.hidden_size, MOST, dtype, 2) as collective,
        closing(Executor(model, collective, max_tokens=MOST, graphs=True)) as executor,
    ):
        shape = (config.num_hidden_layers, 4, BLOCK_SIZE, model.shard.num_kv_heads, config.head_dim)
        cache = KVCache.zeros(*shape, dtype, str(group.device))  # one, as an engine has: graphs hold its address
        for mode in ("serial", "reordered", "fused", "weave"):
            for turn in TURNS if dtype != torch.float32 else TURNS[:1]:
                cache.keys.zero_()
                cache.values.zero_()
                rows = []
                for start, stop in chunks(config, len(prompt)):
                    step = made_up_step(cache, [stop - start], [start], vocab_size=config.vocab_size)
                    step.token_ids.copy_(torch.tensor(prompt[start:stop]))
                    plan = StepPlan(mode, (stop - start) // 2 if mode == "weave" else 0)
                    own = model.head(executor.forward(step, plan))
                    every = collective.gather(own.clone(), parts)
                    rows.append(own if every is None else every.float().cpu())
                torch.cuda.synchronize()
                collective.check()
                found[f"{mode}, {turn}"] = torch.cat([part.cpu() for part in rows])
    return found if group.rank == 0 else {}


def chunks(config: ModelConfig, length: int) -> list[tuple[int, int]]:
    """[start, stop) of the steps. A dynamic rope turns by the length that there is at each, so all is in one."""
    if config.rope.kind == "dynamic":
        return [(0, length)]
    return [(0, CHUNK), (CHUNK, length - 1), (length - 1, length)]
