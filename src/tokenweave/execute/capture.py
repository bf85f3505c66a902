"""CUDA graphs that share one pool of memory."""

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

Result = TypeVar("Result")


class GraphPool:
    """Captures what is launched into graphs. Their memory is one pool, so only one of them may run at a time, and what
    one has left there the next may overwrite."""

    def __init__(self, device: torch.device) -> None:
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        # a pool whose last graph has gone cannot be captured into again
        self._anchor = self.capture(lambda: torch.zeros(1, device=device))

    def capture(self, run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """The graph of `run`, and what it returned: tensors that a replay writes. Nothing is computed here.

        torch.cuda.graph would also collect garbage and empty the allocator's cache: 50 ms and more, each time. A graph
        does not keep tensors that it reads: the caller does.
        """
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = run()
            except BaseException:
                with suppress(RuntimeError):  # which says that streams are not joined, not what has happened
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph, result

    @property
    def bytes(self) -> int:
        """GPU memory of the pool."""
        return sum(
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == tuple(self._pool)
        )
