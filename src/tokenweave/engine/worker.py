"""What each rank process of an engine runs."""

from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import torch

from tokenweave.comm.group import Group
from tokenweave.comm.links import Links
from tokenweave.engine.allocator import keep_freed_memory
from tokenweave.engine.blocks import BlockPool
from tokenweave.engine.channel import LinkChannel, StepChannel
from tokenweave.engine.config import EngineConfig
from tokenweave.engine.core import EngineCore, StepOutput
from tokenweave.engine.events import Ready
from tokenweave.engine.memory import block_bytes, cache_blocks, default_gpu_memory, default_memory
from tokenweave.engine.request import Request
from tokenweave.engine.runner import RankRunner
from tokenweave.engine.scheduler import Scheduler
from tokenweave.engine.step import Step
from tokenweave.engine.tables import BlockTables
from tokenweave.engine.warmup import prepare_kernels, run_once
from tokenweave.execute import Executor
from tokenweave.execute.machine import hardware_here, tune_key
from tokenweave.layers.cache import KVCache
from tokenweave.models.decoder import Decoder
from tokenweave.models.loading import load_model
from tokenweave.models.random_weights import random_model
from tokenweave.plan import Planner


class Caller(Protocol):
    """Who asks rank 0: a Link, or something of the same kind in its own process."""

    def poll(self) -> bool: ...

    def recv(self) -> Any: ...

    def send(self, value: Any) -> None: ...


def main(group: Group, links: Links, directory: Path, config: EngineConfig) -> None:
    """`run` in a rank process of its own."""
    run(group, links.parent, LinkChannel(links), directory, config)


def run(group: Group, caller: Caller, channel: StepChannel, directory: Path, config: EngineConfig) -> None:
    """Load this rank's part and run steps until the caller or rank 0 ends. `config` has its "auto" values resolved.
    The caller matters on rank 0 only."""
    dtype = getattr(torch, config.dtype)
    make = random_model if config.weights == "random" else load_model
    model = make(directory, rank=group.rank, size=group.size, dtype=dtype, device=str(group.device))
    cache = _open_cache(model, config, group, channel)
    keep_freed_memory()
    on_gpu = group.device.type == "cuda"
    if not on_gpu:
        prepare_kernels(dtype, group.rank)
    tokens, lanes = config.max_tokens_per_step, 2 if config.mode in ("auto", "weave") else 1
    with (
        group.open_collective(model.config.hidden_size, tokens, dtype, lanes) as collective,
        closing(Executor(model, collective, max_tokens=tokens, graphs=on_gpu)) as executor,
    ):
        if on_gpu:
            run_once(executor, cache, config.mode)
        runner = RankRunner(executor, collective, _make_tables(model, cache, config))
        key = tune_key(group, collective, model, max_tokens=tokens)
        if group.rank == 0:
            planner = Planner.open(config.mode, model.config, key, hardware_here(group))
            planner.plan([1], [1])  # 10 ms the first time
            core = _make_core(model, _Lead(channel, runner), cache, config, planner)
            caller.send(Ready(group.collective, cache.num_blocks, planner.source))
            serve(caller, core)
        else:
            _follow(channel, runner)


def _open_cache(model: Decoder, config: EngineConfig, group: Group, channel: StepChannel) -> KVCache:
    """A cache of the same number of blocks on every rank: what the rank with the least room can hold."""
    model_config, context, block_size = model.config, config.max_model_len, config.block_size
    assert context is not None and block_size is not None
    blocks = cache_blocks(
        block_bytes(model_config, model.shard, block_size, model.dtype.itemsize),
        config.kv_cache_memory,
        block_size=block_size,
        context=context,
        requests=config.max_running_requests,
        free=_room(model, config, group),
    )
    return KVCache.zeros(
        model_config.num_hidden_layers,
        channel.least(blocks),
        block_size,
        model.shard.num_kv_heads,
        model_config.head_dim,
        model.dtype,
        model.device,
    )


def _room(model: Decoder, config: EngineConfig, group: Group) -> int:
    ranks = 1 if config.emulation is not None else model.shard.size
    if group.device.type == "cuda":
        # over NCCL each has a GPU of its own, on whichever host
        return default_gpu_memory(1 if group.collective == "distributed" else ranks, group.device)
    return default_memory(ranks)


def _make_tables(model: Decoder, cache: KVCache, config: EngineConfig) -> BlockTables:
    assert config.max_model_len is not None
    slots = min(config.max_running_requests, config.max_tokens_per_step)
    dynamic = model.config.rope.kind == "dynamic"
    return BlockTables(slots=slots, max_context=config.max_model_len, cache=cache, tells_prompts=dynamic)


def _make_core(model: Decoder, runner: "_Lead", cache: KVCache, config: EngineConfig, planner: Planner) -> EngineCore:
    assert config.max_model_len is not None and config.block_size is not None
    scheduler = Scheduler(
        BlockPool(cache.num_blocks),
        block_size=config.block_size,
        max_tokens_per_step=config.max_tokens_per_step,
        max_running_requests=config.max_running_requests,
        max_context=config.max_model_len,
        # with the dynamic rope a block's keys depend on the length of the prompt that it was made for
        prefix_caching=config.enable_prefix_caching and model.config.rope.kind != "dynamic",
    )
    return EngineCore(scheduler, runner, planner.plan, eos_token_ids=model.config.eos_token_ids)


class _Lead:
    """Rank 0's runner: the others get each step before it begins its own part."""

    def __init__(self, channel: StepChannel, runner: RankRunner) -> None:
        self._channel, self._runner = channel, runner

    def run(self, step: Step) -> StepOutput:
        self._channel.send(step.encode())
        return self._runner.run(step)


def serve(caller: Caller, core: EngineCore) -> None:
    """Rank 0: take requests (Request) and cancellations (the ident) between steps, and send what each step brought.
    With nothing to do it sleeps in recv. None, or the caller's end of the pipe closed, ends it."""
    try:
        while True:
            while not core.busy or caller.poll():
                message = caller.recv()
                if message is None:
                    return
                if isinstance(message, Request):
                    core.add(message)
                else:
                    core.cancel(message)
            caller.send(core.step())
    except (EOFError, BrokenPipeError):
        return


def _follow(channel: StepChannel, runner: RankRunner) -> None:
    """Any other rank: run what rank 0 sends."""
    while (message := channel.receive()) is not None:
        runner.run(Step.decode(message))
