"""Has the kernels ready before a request waits for them, and says so where that takes long."""

import sys
import threading

import torch

from tokenweave.execute import Executor
from tokenweave.execute.steps import made_up_step
from tokenweave.layers.cache import KVCache
from tokenweave.layers.kernels.warm_up import warm_up
from tokenweave.plan.step import StepPlan

NOTICE_SECONDS = 2.0  # reading kept kernels takes a quarter of a second


def prepare_kernels(dtype: torch.dtype, rank: int) -> None:
    """Compile or read the layers' kernels. Nothing is communicated, so ranks may take unlike long without a deadline.

    Rank 0 tells the user on stderr if it takes long, which it does once on a machine and dtype.
    """
    text = ["compiling the CPU kernels, once on this machine ..."]
    notice = threading.Timer(NOTICE_SECONDS, print, text, {"file": sys.stderr, "flush": True})
    if rank == 0:
        notice.start()
    try:
        warm_up(dtype)
    finally:
        notice.cancel()


def run_once(executor: Executor, cache: KVCache, mode: str) -> None:
    """Run small steps on a GPU, with and without a past, so that its kernels are compiled and its libraries loaded.

    All ranks call it together. The cache is empty yet: what it writes there is overwritten.
    """
    modes = ("serial", "fused") if mode == "auto" else ("fused" if mode == "weave" else mode,)
    room = cache.num_blocks * cache.block_size - 1  # beside the past
    several = max(min(3, executor.max_tokens, room), 0)
    for counts, starts in (([1], [0]), ([several], [1]))[: 1 + bool(several)]:
        for name in modes:
            step = made_up_step(cache, counts, starts, vocab_size=executor.model.config.vocab_size)
            executor.model.head(executor.forward(step, StepPlan(name))[-1:])
    torch.cuda.synchronize()
