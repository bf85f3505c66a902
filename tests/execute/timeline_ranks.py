"""What the ranks of the timeline tests run."""

import time
from contextlib import closing
from typing import Any

import torch
from execute.stage_ranks import HIDDEN, linear_stage, model_of
from execute.weave_ranks import MODELS, build

from tokenweave.comm import Group
from tokenweave.execute import Executor
from tokenweave.execute.timeline import RecordedStep, record_step, record_trial
from tokenweave.layers.batch import Batch
from tokenweave.layers.cache import KVCache
from tokenweave.plan import StepPlan
from tokenweave.plan.trial import Trial

STAGES, ROUNDS, DELAY = 6, 21, 0.005
DELAYED = ("s3", 1)  # of lane B


def delayed(group: Group) -> dict[str, list[RecordedStep]]:
    """Woven steps as they are, and with a delay in one lane's operation after one stage."""
    stages = [linear_stage(f"s{i}", i, group.rank)[0] for i in range(STAGES)]
    found = {}
    with group.open_collective(HIDDEN, 64, lanes=2) as collective:
        executor = Executor(model_of(stages, group.rank, group.size), collective, max_tokens=64)  # type: ignore[arg-type]
        plain: Any = collective.all_reduce_add_rms_norm

        def late(partial: Any, residual: Any, weight: Any, *rest: Any, **options: Any) -> Any:
            if options["lane"] == DELAYED[1] and weight is stages[int(DELAYED[0][1:])].norm.weight:
                time.sleep(DELAY)
            return plain(partial, residual, weight, *rest, **options)

        with closing(executor):
            batch = Batch.prompts([[token] for token in range(33)])
            for name, operation in (("plain", plain), ("late", late)):
                collective.all_reduce_add_rms_norm = operation
                found[name] = [record_step(executor, batch, StepPlan("weave", 16)) for _ in range(ROUNDS)]
    return found


def every_mode(group: Group) -> list[RecordedStep]:
    """A step of each mode, and whether recording left the executor as it was."""
    model = build(MODELS[0], group)
    config = model.config
    modes = ("serial", "reordered", "fused", "weave", "nocomm")
    trial = Trial(counts=(9, 4), contexts=(9, 24), plans=tuple(StepPlan(m, 6) for m in modes), rounds=2)
    with group.open_collective(config.hidden_size, 64, lanes=2) as collective:
        with closing(Executor(model, collective, max_tokens=64)) as executor:
            heads = model.shard.num_kv_heads
            cache = KVCache.zeros(config.num_hidden_layers, 8, 8, heads, config.head_dim, torch.float32)
            stages = model.stages
            steps = record_trial(executor, cache, trial)
            assert model.stages is stages and executor.collective is collective
    return steps[1]
