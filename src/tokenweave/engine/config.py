"""Every setting of an engine, checked where it is built."""

import operator
from dataclasses import dataclass
from math import inf
from typing import Any

from tokenweave.plan import MODES

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
COLLECTIVES = ("auto", "shared_memory", "distributed", "symmetric", "emulated")
WEIGHTS = ("checkpoint", "random")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How a model is run. The command line's defaults are these.

    mode: one of MODES, or "auto", which chooses for each step. dtype: of weights, activations and cache; "auto" is the
    checkpoint's own. device: "auto" is the GPUs where each rank has one. collective: how the ranks reach each
    other; "auto" is the fastest that works here.
    block_size: tokens in a block of the cache; None is 16, and 256 on a GPU, as its attention reads them.
    kv_cache_memory: bytes of keys and values a rank may hold; None sizes it from free memory. max_tokens_per_step:
    longer prompts go in chunks. max_running_requests: in one step; others wait. max_model_len: positions a request may
    have, prompt and answer; None is the model's own context.
    enable_prefix_caching: reuse what is cached of an earlier prompt that began the same.
    threads: of torch, per rank; None shares out the usable cores. pin: give each rank cores of its own.
    timeout: seconds that any wait between ranks may take.
    weights: "random" fills a model of which only config.json is there, for benchmarks. emulation: a
    comm.emulated.Emulation, for one GPU that stands in for rank 0, with the collective "emulated".
    """

    tensor_parallel_size: int = 1
    mode: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    collective: str = "auto"
    block_size: int | None = None
    kv_cache_memory: int | None = None
    max_tokens_per_step: int = 2048
    max_running_requests: int = 256
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    threads: int | None = None
    pin: bool = False
    timeout: float = 60.0
    weights: str = "checkpoint"
    emulation: Any = None

    def __post_init__(self) -> None:
        for name, allowed in (
            ("mode", ("auto", *MODES)), ("dtype", DTYPES), ("device", DEVICES), ("collective", COLLECTIVES),
            ("weights", WEIGHTS),
        ):  # fmt: skip
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name in (
            "tensor_parallel_size", "block_size", "kv_cache_memory", "max_tokens_per_step", "max_running_requests",
            "max_model_len", "threads",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is None and EngineConfig.__dataclass_fields__[name].default is None:
                continue
            try:
                count = operator.index(value)
            except TypeError:
                raise ValueError(f"{name} must be a whole number, got {value!r}") from None
            if count < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 < self.timeout < inf:
            raise ValueError(f"timeout must be more than 0 seconds and have an end, got {self.timeout}")
