"""The collective of CPU ranks on one host: one kernel over memory that all of them map."""

import functools
from collections.abc import Callable

import torch
from numba import types

from tokenweave.comm import staging
from tokenweave.comm.collective import CommunicationError
from tokenweave.comm.control import CONTROL_BYTES, Control
from tokenweave.comm.kernels.exchange import exchange, meet
from tokenweave.comm.kernels.vector import ELEMENTS
from tokenweave.comm.operations import Operation, dtype_code, explain
from tokenweave.comm.segment import Lane, Segment
from tokenweave.comm.shape import CollectiveShape

_COMPILE_SECONDS = 120.0  # what opening may take beyond the deadline, as ranks may be compiling the kernels


class SharedMemory:
    """Opens collectives in the memory handed down to this rank. Every rank opens the same ones in the same order, so
    that each finds the next segment without asking."""

    def __init__(self, control: Control, rank: int, size: int) -> None:
        self._control, self._rank, self._size = control, rank, size
        self._next = CONTROL_BYTES

    def open(self, shape: CollectiveShape) -> "SharedMemoryCollective":
        segment = Segment(self._control, self._next, shape, self._rank, self._size)
        self._next += segment.bytes
        return SharedMemoryCollective(segment)

    def close(self) -> None:
        """Nothing to do: memory goes with the collectives, the rest with the process."""


class SharedMemoryCollective:
    """See `Collective`. gather and broadcast leave the lanes' buffers alone; the other operations may write there."""

    def __init__(self, segment: Segment) -> None:
        self.copies = 0
        self.shape, self.rank, self.size = segment.shape, segment.rank, segment.size
        self._control = segment.control
        self._lanes = [Lane(segment, lane) for lane in range(self.shape.lanes)]
        self._dtype = self.shape.dtype
        self._element = dtype_code(self._dtype) << 8
        self._fused = int(Operation.ALL_REDUCE_ADD_RMS_NORM | self._element)
        self._hidden = self.shape.hidden_size
        self._weight_shape = torch.Size([self._hidden])
        self._exchange, self._meet = _compiled(self.shape.dtype_name)
        self._meet_others()

    def _meet_others(self) -> None:
        shape, first = self.shape, self._lanes[0]
        first.set_timeout(shape.timeout + _COMPILE_SECONDS)
        code = Operation.OPEN_COLLECTIVE | self._element | shape.lanes << 16
        self._barrier(first, code, shape.max_tokens, shape.hidden_size)
        first.set_timeout(shape.timeout)

    def buffer(self, lane: int, tokens: int) -> torch.Tensor:
        own = self._lane(lane)
        view = own.views.get(tokens)
        if view is None:
            self.shape.check_tokens(tokens)
            view = own.views[tokens] = own.buffer[:tokens]
        return view

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
        # A decode step calls this with one row, which takes 1 us; so the checks are written out: 2 us less than calls.
        own = self._lane(lane)
        shape = partial.shape
        tokens = shape[0] if shape else 0
        view = own.views.get(tokens)
        if view is None:
            view = self.buffer(lane, tokens)
        if partial is not view and (
            shape != (tokens, self._hidden)
            or partial.dtype is not self._dtype
            or not (partial.is_contiguous() and partial.is_cpu)
        ):
            self.shape.check_rows("partial", partial)
        count = (self.rank + 1) * tokens // self.size - self.rank * tokens // self.size
        if (
            residual.shape != (count, self._hidden)
            or residual.dtype is not self._dtype
            or not (residual.is_contiguous() and residual.is_cpu)
        ):
            self.shape.check_rows("residual", residual, count)
        wide = weight.dtype is torch.float32
        if (
            weight.shape != self._weight_shape
            or not (wide or weight.dtype is self._dtype)
            or not (weight.is_contiguous() and weight.is_cpu)
        ):
            self.shape.check_weight(weight)
        address = partial.data_ptr()
        if address != own.buffer_address:
            self._count_copy(own, address, tokens)
        if not self._exchange(
            own.address, self._fused, address, residual.data_ptr(), weight.data_ptr(), wide, tokens, eps
        ):
            raise self._error()
        return view

    def all_reduce(self, partial: torch.Tensor, *, lane: int = 0) -> torch.Tensor:
        own = self._lane(lane)
        return self._run(own, Operation.ALL_REDUCE, self._offered(own, partial), 0, partial.shape[0])

    def reduce_scatter(self, partial: torch.Tensor, *, lane: int = 0) -> torch.Tensor:
        own = self._lane(lane)
        address, tokens = self._offered(own, partial), partial.shape[0]
        rows = partial.new_empty(self.shape.rows_of(tokens, self.rank, self.size), self.shape.hidden_size)
        self._run(own, Operation.REDUCE_SCATTER, address, rows.data_ptr(), tokens)
        return rows

    def all_gather(self, rows: torch.Tensor, tokens: int, *, lane: int = 0) -> torch.Tensor:
        own = self._lane(lane)
        self.shape.check_tokens(tokens)
        self.shape.check_rows("rows", rows, self.shape.rows_of(tokens, self.rank, self.size))
        return self._run(own, Operation.ALL_GATHER, 0, rows.data_ptr(), tokens)

    def gather(self, columns: torch.Tensor, widths: list[int], *, lane: int = 0) -> torch.Tensor | None:
        own = self._lane(lane)
        meet = functools.partial(self._barrier, own)
        return staging.gather(columns, widths, rank=self.rank, size=self.size, staging=own.staging, meet=meet)

    def broadcast(self, tensor: torch.Tensor, root: int = 0, *, lane: int = 0) -> torch.Tensor:
        own = self._lane(lane)
        meet = functools.partial(self._barrier, own)
        return staging.broadcast(tensor, root, rank=self.rank, size=self.size, staging=own.staging, meet=meet)

    def barrier(self, *, lane: int = 0) -> None:
        self._barrier(self._lane(lane), Operation.BARRIER, 0, 0)

    def check(self) -> None:
        if self._control.ended:
            raise self._error()

    def close(self) -> None:
        self._lanes = []

    def __enter__(self) -> "SharedMemoryCollective":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _lane(self, lane: int) -> Lane:
        try:
            return self._lanes[lane if lane >= 0 else self.shape.lanes]
        except IndexError:
            if not self._lanes:
                raise RuntimeError("the collective is closed") from None
            self.shape.check_lane(lane)
            raise

    def _offered(self, own: Lane, partial: torch.Tensor) -> int:
        """Address of the partial, checked; one outside the lane's buffer is counted, and copied there by the kernel."""
        self.shape.check_rows("partial", partial)
        address = partial.data_ptr()
        if address != own.buffer_address:
            self._count_copy(own, address, partial.shape[0])
        return address

    def _count_copy(self, own: Lane, address: int, tokens: int) -> None:
        if 0 < address - own.buffer_address < own.buffer.nbytes:
            raise ValueError("partial must be the lane's buffer from its first row on, or memory outside it")
        self.copies += tokens > 0

    def _run(self, own: Lane, operation: Operation, partial: int, rows: int, tokens: int) -> torch.Tensor:
        if not self._exchange(own.address, operation | self._element, partial, rows, 0, False, tokens, 0.0):
            raise self._error()
        return own.buffer[:tokens]

    def _barrier(self, own: Lane, code: int, rows: int, columns: int) -> None:
        if not self._meet(own.address, code, rows, columns):
            raise self._error()

    def _error(self) -> CommunicationError:
        """Why the group has ended, as the rank that ended it found."""
        return CommunicationError(explain(self._control.finding, self.shape.timeout))


def _compiled(dtype: str) -> tuple[Callable[..., bool], Callable[..., bool]]:
    """The kernels as plain calls; entering through Numba's dispatcher would cost half a microsecond more."""
    elements = ELEMENTS[dtype]
    word, flag = types.int64, types.boolean
    meeting = (word, word, word, word)
    exchanging = (word, word, elements, elements, word, flag, word, types.float64)
    for kernel, signature in ((meet, meeting), (exchange, exchanging)):
        kernel.compile(signature)
    return exchange.get_overload(exchanging), meet.get_overload(meeting)
