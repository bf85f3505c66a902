"""The plan of vLLM's steps: by the same tuned tables and costs as the project's own engine, agreed on by all ranks.

Every worker plans each step by itself, so all must plan from the same: rank 0 looks for the table and takes the link's
fingerprint, and sends both to the others.
"""

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import GroupCoordinator

from tokenweave.comm.collective import Collective
from tokenweave.config import ModelConfig
from tokenweave.config.foreign import model_config
from tokenweave.execute.machine import device_name, gpu_processors, hardware_here, link_fingerprint
from tokenweave.integrations.vllm.join import Joined, broadcast
from tokenweave.plan.hardware import Hardware, cpu
from tokenweave.plan.planner import Planner, plan_step
from tokenweave.plan.step import StepPlan
from tokenweave.plan.table import TunedTable, TuneKey, cache_directory, find, model_dimensions

Plan = Callable[[np.ndarray, np.ndarray], StepPlan]  # of a step: counts and contexts of its requests, see `Planner`


@dataclass(frozen=True)
class Planning:
    """source: where the costs come from that `plan` goes by, in words."""

    plan: Plan
    source: str


def agree(
    ranks: GroupCoordinator, joined: Joined, collective: Collective, mode: str, hf_config: Any, dtype: torch.dtype,
    max_tokens: int,
) -> Planning:  # fmt: skip
    """All ranks call it together; `collective` is idle. Where no costs are known "auto" is "fused"."""
    try:
        config = model_config(hf_config.to_dict())
    except ValueError as error:
        return Planning(lambda counts, contexts: plan_step(mode, int(counts.sum())), f"no costs known: {error}")
    found: dict[str, Any] = {}
    latency, bandwidth = link_fingerprint(joined.group, collective, config.hidden_size, dtype, max_tokens)
    key = _key(joined, config, dtype, latency, bandwidth)
    if ranks.rank_in_group == 0:
        table, source = find(key, cache_directory())
        found = {"key": dataclasses.asdict(key), "table": table and table.to_json(), "source": source}
    found = json.loads(broadcast(ranks, json.dumps(found)))
    key = TuneKey(**found["key"] | {"model": tuple(found["key"]["model"])})
    table = TunedTable.from_json(found["table"]) if found["table"] else None
    planner = Planner.of(mode, config, key, _hardware(joined, key), table, found["source"])
    return Planning(planner.plan, planner.source)


def _key(joined: Joined, config: ModelConfig, dtype: torch.dtype, latency: float, bandwidth: float) -> TuneKey:
    device = joined.group.device
    on_gpu = device.type == "cuda"
    return TuneKey(
        device=torch.cuda.get_device_name(device) if on_gpu else device_name(),
        # A worker may be bound to some cores, which its parent is not, nor are the ranks of `tokenweave tune`.
        processors=gpu_processors(device) if on_gpu else len(os.sched_getaffinity(os.getppid())),
        threads=0 if on_gpu else torch.get_num_threads(),
        hosts=joined.hosts,
        model=model_dimensions(config),
        tensor_parallel_size=joined.group.size,
        dtype=str(dtype).removeprefix("torch."),
        collective=joined.group.collective,
        version=version("tokenweave"),
        link_latency=latency,
        link_bandwidth=bandwidth,
    )


def _hardware(joined: Joined, key: TuneKey) -> Hardware:
    if joined.group.device.type == "cuda":
        return hardware_here(joined.group)
    return cpu(key.threads, shared_memory=joined.group.collective == "shared_memory")
