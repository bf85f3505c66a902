"""The operations of a collective for ranks on GPUs: their checks, and what is launched for each."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import torch

from tokenweave.comm.kernels.lane_words import LANE_WORDS, LaneWord
from tokenweave.comm.operations import Operation
from tokenweave.comm.shape import CollectiveShape

DEFAULT_BUDGET = 16  # thread blocks; with more, the published kernel gains nothing at any size


class RowKernels(Protocol):
    """What moves the rows. See `kernels.loaded`."""

    def launch(
        self, operation: Operation, lane: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, *, tokens: int,
        own: int, eps: float, pace: float, blocks: int, stream: int,
    ) -> None: ...  # fmt: skip

    def barrier(self, lane: torch.Tensor, stream: int) -> None: ...


@dataclass(frozen=True)
class GpuLane:
    """One lane as this rank holds it. result: where an operation leaves its rows, [max_tokens, hidden]; the buffer, but
    for emulated multicast."""

    buffer: torch.Tensor
    result: torch.Tensor


@dataclass(frozen=True)
class KernelLane(GpuLane):
    """words: see `LaneWord`."""

    words: torch.Tensor


Lane = TypeVar("Lane", bound=GpuLane)


def lane_words(facts: dict[LaneWord, int], tables: dict[LaneWord, list[int]], device: torch.device) -> torch.Tensor:
    """A lane's words in GPU memory."""
    words = torch.zeros(LANE_WORDS, dtype=torch.int64)
    for word, value in facts.items():
        words[word] = value
    for word, values in tables.items():
        words[word : word + len(values)] = torch.tensor(values, dtype=torch.int64)
    return words.to(device)


class GpuCollective(ABC, Generic[Lane]):
    """See `Collective`. Every operation is put on the current CUDA stream and returns at once; it can be captured in a
    graph. budget: the number of thread blocks. What is found wrong there is raised by the next call, or by `check`.
    """

    default_budget = DEFAULT_BUDGET

    def __init__(self, shape: CollectiveShape, rank: int, size: int, device: torch.device, lanes: list[Lane]) -> None:
        self.copies = 0
        self.shape, self.rank, self.size, self.device = shape, rank, size, device
        self._lanes = lanes

    def buffer(self, lane: int, tokens: int) -> torch.Tensor:
        self.shape.check_tokens(tokens)
        return self._lane(lane).buffer[:tokens]

    def all_reduce_add_rms_norm(
        self,
        partial: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        lane: int = 0,
        budget: int | None = None,
    ) -> torch.Tensor:
        own = self._lane(lane)
        self.shape.check_rows("partial", partial)
        self.shape.check_rows("residual", residual, self.own_rows(partial.shape[0]))
        self.shape.check_weight(weight)
        self._offer(own, partial)
        operation = Operation.ALL_REDUCE_ADD_RMS_NORM
        return self._run(own, operation, partial.shape[0], residual, weight, eps=eps, budget=budget)

    def all_reduce(self, partial: torch.Tensor, *, lane: int = 0) -> torch.Tensor:
        own = self._lane(lane)
        self.shape.check_rows("partial", partial)
        self._offer(own, partial)
        return self._run(own, Operation.ALL_REDUCE, partial.shape[0])

    def reduce_scatter(self, partial: torch.Tensor, *, lane: int = 0) -> torch.Tensor:
        own = self._lane(lane)
        self.shape.check_rows("partial", partial)
        self._offer(own, partial)
        rows = partial.new_empty(self.own_rows(partial.shape[0]), self.shape.hidden_size)
        self._run(own, Operation.REDUCE_SCATTER, partial.shape[0], rows)
        return rows

    def all_gather(self, rows: torch.Tensor, tokens: int, *, lane: int = 0) -> torch.Tensor:
        own = self._lane(lane)
        self.shape.check_tokens(tokens)
        self.shape.check_rows("rows", rows, self.own_rows(tokens))
        return self._run(own, Operation.ALL_GATHER, tokens, rows)

    def own_rows(self, tokens: int) -> int:
        return self.shape.rows_of(tokens, self.rank, self.size)

    def check(self) -> None:
        """Raise CommunicationError if a kernel has found something wrong. Reads the host's memory only: what runs on
        the GPU now may still find something, so call it after waiting for that."""

    def close(self) -> None:
        self._lanes = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _lane(self, lane: int) -> Lane:
        self.check()
        if not self._lanes:
            raise RuntimeError("the collective is closed")
        self.shape.check_lane(lane)
        return self._lanes[lane]

    def _offer(self, own: Lane, partial: torch.Tensor) -> None:
        """Have the partial in the lane's buffer: a copy, which is counted, unless it is there."""
        distance = partial.data_ptr() - own.buffer.data_ptr()
        if distance == 0 or partial.shape[0] == 0:
            return
        if 0 < distance < own.buffer.nbytes:
            raise ValueError("partial must be the lane's buffer from its first row on, or memory outside it")
        own.buffer[: partial.shape[0]].copy_(partial)
        self.copies += 1

    def _run(
        self, own: Lane, operation: Operation, tokens: int, rows: torch.Tensor | None = None,
        weight: torch.Tensor | None = None, *, eps: float = 0.0, budget: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        rows = own.buffer if rows is None else rows
        weight = rows if weight is None else weight
        blocks = self.default_budget if budget is None else budget
        if blocks < 1:
            raise ValueError(f"budget must be at least 1 thread block, got {budget}")
        if tokens:
            self._launch(own, operation, tokens, rows, weight, eps=eps, blocks=blocks)
        return own.result[:tokens]

    @abstractmethod
    def _launch(
        self, own: Lane, operation: Operation, tokens: int, rows: torch.Tensor, weight: torch.Tensor, *, eps: float,
        blocks: int,
    ) -> None:  # fmt: skip
        """Put the operation on the current stream. The partial lies in the lane's buffer. tokens: at least 1."""


class KernelCollective(GpuCollective[KernelLane]):
    """A kernel for each operation, which reaches all ranks' rows."""

    def __init__(
        self, shape: CollectiveShape, rank: int, size: int, device: torch.device, kernels: RowKernels,
        lanes: list[KernelLane],
    ) -> None:  # fmt: skip
        super().__init__(shape, rank, size, device, lanes)
        self._kernels = kernels

    def pace(self, operation: Operation, tokens: int, budget: int) -> float:
        """Seconds that an operation must take at least."""
        return 0.0

    def _launch(
        self, own: KernelLane, operation: Operation, tokens: int, rows: torch.Tensor, weight: torch.Tensor, *,
        eps: float, blocks: int,
    ) -> None:  # fmt: skip
        self._kernels.launch(
            operation, own.words, rows, weight, tokens=tokens, own=self.own_rows(tokens), eps=eps,
            pace=self.pace(operation, tokens, blocks), blocks=blocks, stream=self._stream,
        )  # fmt: skip

    @property
    def _stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream


def refuse_in_capture() -> None:
    """Opening compiles, allocates and waits for the other ranks: not while a graph is captured."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a collective must be opened before a CUDA graph is captured")
