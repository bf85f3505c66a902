"""Where a lane's communication runs while the other lane computes."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Pending:
    """An operation under way. Times are of time.perf_counter: when it began and ended on its stream."""

    future: Future[torch.Tensor] = field(repr=False)
    began: float = 0.0
    ended: float = 0.0

    def wait(self) -> torch.Tensor:
        """Its result. Raises what the operation raised."""
        return self.future.result()


class CommunicationThread:
    """Runs operations one after another, in the order they were submitted, beside the thread that computes.

    Torch, gloo and the kernels release the interpreter lock while they work or wait.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenweave-communication")

    def submit(self, operation: Callable[..., torch.Tensor], *args: Any, **options: Any) -> Pending:
        pending = Pending(Future())

        @torch.inference_mode()  # the mode is a thread's own, and the partials were made in it
        def run() -> torch.Tensor:
            pending.began = time.perf_counter()
            try:
                return operation(*args, **options)
            finally:
                pending.ended = time.perf_counter()

        pending.future = self._pool.submit(run)
        return pending

    def close(self) -> None:
        """Wait for what was submitted; every operation in it has a deadline of its own."""
        self._pool.shutdown()
