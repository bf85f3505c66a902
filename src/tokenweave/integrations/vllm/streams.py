"""Where a lane's reduction runs while the other lane computes: a thread on the CPU, a stream on a GPU."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from tokenweave.execute.streams import CommunicationThread


class Pending(Protocol):
    def wait(self) -> torch.Tensor: ...


class Stream(Protocol):
    def submit(self, operation: Callable[..., torch.Tensor], *args: Any, **options: Any) -> Pending: ...

    def close(self) -> None: ...


def stream_of(device: torch.device) -> Stream:
    return SideStream(device) if device.type == "cuda" else CommunicationThread()


class SideStream:
    """A CUDA stream beside the one that computes. Nothing here waits on the host."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def submit(self, operation: Callable[..., torch.Tensor], *args: Any, **options: Any) -> Pending:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = operation(*args, **options)
            for tensor in args:
                if isinstance(tensor, torch.Tensor):  # not reused for something else before this stream is done
                    tensor.record_stream(self._stream)
            return _Recorded(result, self._stream.record_event())

    def close(self) -> None:
        self._stream.synchronize()


class _Recorded:
    def __init__(self, result: torch.Tensor, done: torch.cuda.Event) -> None:
        self._result, self._done = result, done

    def wait(self) -> torch.Tensor:
        """The result, ordered before what the current stream does next."""
        torch.cuda.current_stream().wait_event(self._done)
        return self._result
