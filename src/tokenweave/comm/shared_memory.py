"""The collective of CPU ranks on one host: one kernel over memory that all of them map."""

import ctypes
import mmap
import weakref
from collections.abc import Callable

import numpy as np
import torch
from numba import types

from tokenweave.comm.collective import CommunicationError
from tokenweave.comm.control import CONTROL_BYTES, MAX_RANKS, Control
from tokenweave.comm.kernels.exchange import exchange, meet
from tokenweave.comm.kernels.sync import LANE_WORDS, LINE_BYTES, LaneWord
from tokenweave.comm.kernels.vector import ELEMENTS
from tokenweave.comm.operations import Operation, dtype_code, explain
from tokenweave.comm.shape import CollectiveShape, check_columns, check_root
from tokenweave.config import partition

_HUGE_PAGE = 1 << 21
_COMPILE_SECONDS = 120.0  # what opening may take beyond the deadline, as ranks may be compiling the kernels
_STAGING_BYTES = 1 << 18  # per rank and lane, for gather and broadcast; touched only as far as they need
_libc = ctypes.CDLL(None)


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


class SharedMemory:
    """Opens collectives in the memory handed down to this rank. Every rank opens the same ones in the same order, so
    that each finds the next segment without asking."""

    def __init__(self, control: Control, rank: int, size: int) -> None:
        if size > MAX_RANKS:
            raise ValueError(f"the shared_memory collective has room for {MAX_RANKS} ranks, got {size}")
        self.control, self.rank, self.size = control, rank, size
        self._next = _up(CONTROL_BYTES, _HUGE_PAGE)

    def open(self, shape: CollectiveShape) -> "SharedMemoryCollective":
        segment = Segment(self.control.arena, self._next, shape, self.size)
        self._next += _up(segment.bytes, _HUGE_PAGE)
        return SharedMemoryCollective(self, segment, shape)

    def close(self) -> None:
        pass  # memory goes with the collectives, the rest with the process


class Segment:
    """One collective's part of the arena: a line per lane and rank, then staging, then buffers, in that order."""

    def __init__(self, arena: int, offset: int, shape: CollectiveShape, size: int) -> None:
        self.shape, self.size = shape, size
        self._row_bytes = shape.hidden_size * shape.dtype.itemsize
        self._buffer_bytes = _up(shape.max_tokens * self._row_bytes, mmap.PAGESIZE)
        channels = shape.lanes * size
        self._staging = _up(channels * LINE_BYTES, mmap.PAGESIZE)
        self._buffers = self._staging + channels * _STAGING_BYTES
        if self._buffer_bytes >= _HUGE_PAGE:
            self._buffers = _up(self._buffers, _HUGE_PAGE)
        self.bytes = self._buffers + channels * self._buffer_bytes
        self._arena, self._offset = arena, offset
        self._map = mmap.mmap(arena, self.bytes, offset=offset)
        if self._buffer_bytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE, self._buffers, self.bytes - self._buffers)
            except OSError:
                pass  # a kernel without them
        self.address = torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()

    def line(self, lane: int) -> int:
        """Address of the lane's first line."""
        return self.address + lane * self.size * LINE_BYTES

    def staging(self, lane: int, rank: int) -> torch.Tensor:
        start = self._staging + (lane * self.size + rank) * _STAGING_BYTES
        return torch.frombuffer(self._map, dtype=torch.uint8, count=_STAGING_BYTES, offset=start)

    def buffer(self, lane: int, rank: int) -> torch.Tensor:
        """[max_tokens, hidden_size]"""
        start, shape = self._buffer_at(lane, rank), self.shape
        flat = torch.frombuffer(self._map, dtype=shape.dtype, count=shape.max_tokens * shape.hidden_size, offset=start)
        return flat.view(shape.max_tokens, shape.hidden_size)

    def free_with_views(self, rank: int) -> None:
        """Give the memory of this rank's buffers back to the system once no tensor shows it any more."""
        spans = [(self._offset + self._buffer_at(lane, rank), self._buffer_bytes) for lane in range(self.shape.lanes)]
        weakref.finalize(self._map, _punch, self._arena, spans)

    def _buffer_at(self, lane: int, rank: int) -> int:
        return self._buffers + (lane * self.size + rank) * self._buffer_bytes


def _punch(fd: int, spans: list[tuple[int, int]]) -> None:
    for start, length in spans:
        _libc.fallocate(fd, 0x03, ctypes.c_long(start), ctypes.c_long(length))  # FALLOC_FL_PUNCH_HOLE | KEEP_SIZE


class _Lane:
    """One lane as this rank holds it: the kernels' private words, and the buffers as tensors."""

    def __init__(self, space: SharedMemory, segment: Segment, lane: int) -> None:
        shape = segment.shape
        self.buffer = segment.buffer(lane, space.rank)
        self.staging = [segment.staging(lane, rank) for rank in range(space.size)]
        self.views: dict[int, torch.Tensor] = {}
        self.words = np.zeros(LANE_WORDS, dtype=np.int64)
        self.address: int = self.words.ctypes.data
        self.buffer_address: int = self.buffer.data_ptr()
        self.words[LaneWord.SIZE] = space.size
        self.words[LaneWord.RANK] = space.rank
        self.words[LaneWord.LINES] = segment.line(lane)
        self.words[LaneWord.CONTROL] = space.control.address
        self.words[LaneWord.TIMEOUT] = int(shape.timeout * 1e9)
        self.words[LaneWord.HIDDEN] = shape.hidden_size
        self.words[LaneWord.LANE] = lane
        for rank in range(space.size):
            address = segment.buffer(lane, rank).data_ptr()
            self.words[LaneWord.SOURCES + rank] = self.words[LaneWord.TARGETS + rank] = address


class SharedMemoryCollective:
    """See `Collective`. gather and broadcast leave the lanes' buffers alone; the other operations may write there."""

    def __init__(self, space: SharedMemory, segment: Segment, shape: CollectiveShape) -> None:
        self.copies = 0
        self.shape, self.rank, self.size = shape, space.rank, space.size
        self._control = space.control
        self._lanes = [_Lane(space, segment, lane) for lane in range(shape.lanes)]
        segment.free_with_views(self.rank)
        self._exchange, self._meet = _compiled(shape.name)
        self._code = dtype_code(shape.dtype) << 8
        self._open(segment)

    def _open(self, segment: Segment) -> None:
        """Meet the other ranks, which may be compiling still."""
        first = self._lanes[0].words
        first[LaneWord.TIMEOUT] += int(_COMPILE_SECONDS * 1e9)
        shape = self.shape
        self._barrier(
            0, Operation.OPEN_COLLECTIVE | self._code | shape.lanes << 16, shape.max_tokens, shape.hidden_size
        )
        first[LaneWord.TIMEOUT] -= int(_COMPILE_SECONDS * 1e9)

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
        own = self._lane(lane)
        self.shape.check_rows("partial", partial)
        tokens = partial.shape[0]
        self.shape.check_rows("residual", residual, self._own(tokens))
        self.shape.check_weight(weight)
        operation = Operation.ALL_REDUCE_ADD_RMS_NORM | self._code
        wide = weight.dtype == torch.float32
        if not self._exchange(
            own.address,
            operation,
            self._source(own, partial),
            residual.data_ptr(),
            weight.data_ptr(),
            wide,
            tokens,
            eps,
        ):
            raise self._error()
        return self.buffer(lane, tokens)

    def all_reduce(self, partial: torch.Tensor, *, lane: int = 0) -> torch.Tensor:
        own = self._lane(lane)
        self.shape.check_rows("partial", partial)
        return self._run(own, Operation.ALL_REDUCE, self._source(own, partial), 0, partial.shape[0])

    def reduce_scatter(self, partial: torch.Tensor, *, lane: int = 0) -> torch.Tensor:
        own = self._lane(lane)
        self.shape.check_rows("partial", partial)
        tokens = partial.shape[0]
        rows = partial.new_empty(self._own(tokens), self.shape.hidden_size)
        self._run(own, Operation.REDUCE_SCATTER, self._source(own, partial), rows.data_ptr(), tokens)
        return rows

    def all_gather(self, rows: torch.Tensor, tokens: int, *, lane: int = 0) -> torch.Tensor:
        own = self._lane(lane)
        self.shape.check_tokens(tokens)
        self.shape.check_rows("rows", rows, self._own(tokens))
        return self._run(own, Operation.ALL_GATHER, 0, rows.data_ptr(), tokens)

    def gather(self, columns: torch.Tensor, widths: list[int], *, lane: int = 0) -> torch.Tensor | None:
        own = self._lane(lane)
        check_columns(columns, widths, self.rank, self.size)
        count, total = columns.shape[0], sum(widths)
        operation = Operation.GATHER | dtype_code(columns.dtype) << 8
        gathered = columns.new_empty(count, total) if self.rank == 0 else None
        staging = [memory.view(columns.dtype) for memory in own.staging]
        # Pieces of `rows` x `width`, the same on every rank, that fit the staging memory.
        width = max(1, min(max(widths), staging[0].numel()))
        rows = max(1, min(count, staging[0].numel() // width))
        starts = [sum(widths[:rank]) for rank in range(self.size)]
        for top in range(0, count, rows):
            for left in range(0, max(widths), width):
                mine = columns[top : top + rows, left : left + width]
                if self.rank != 0:
                    staging[self.rank][: mine.numel()].view(mine.shape).copy_(mine)
                self._barrier(lane, operation, count, total)
                if gathered is not None:
                    for rank in range(self.size):
                        last = starts[rank] + min(widths[rank], left + width)
                        part = gathered[top : top + rows, starts[rank] + left : max(last, starts[rank] + left)]
                        part.copy_(mine if rank == 0 else staging[rank][: part.numel()].view(part.shape))
                self._barrier(lane, operation, count, total)
        return gathered

    def broadcast(self, tensor: torch.Tensor, root: int = 0, *, lane: int = 0) -> torch.Tensor:
        own = self._lane(lane)
        check_root(root, self.size)
        if not tensor.is_contiguous():
            return tensor.copy_(self.broadcast(tensor.contiguous(), root, lane=lane))
        flat = tensor.detach().view(-1).view(torch.uint8)
        staging = own.staging[root]
        operation = Operation.BROADCAST | dtype_code(tensor.dtype) << 8 | root << 16
        for piece in flat.split(staging.numel()) if flat.numel() else [flat]:
            if self.rank == root:
                staging[: piece.numel()].copy_(piece)
            self._barrier(lane, operation, flat.numel(), 1)
            if self.rank != root:
                piece.copy_(staging[: piece.numel()])
            self._barrier(lane, operation, flat.numel(), 1)
        return tensor

    def barrier(self, *, lane: int = 0) -> None:
        self._lane(lane)
        self._barrier(lane, Operation.BARRIER, 0, 0)

    def close(self) -> None:
        self._lanes = []

    def __enter__(self) -> "SharedMemoryCollective":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _lane(self, lane: int) -> _Lane:
        if not self._lanes:
            raise RuntimeError("the collective is closed")
        self.shape.check_lane(lane)
        return self._lanes[lane]

    def _own(self, tokens: int) -> int:
        own = partition(tokens, self.size, self.rank)
        return own.stop - own.start

    def _source(self, own: _Lane, partial: torch.Tensor) -> int:
        """Address of the partial; one outside the lane's buffer is counted, and copied by the kernel."""
        address = partial.data_ptr()
        self.copies += address != own.buffer_address and partial.shape[0] > 0
        return address

    def _run(self, own: _Lane, operation: int, partial: int, rows: int, tokens: int) -> torch.Tensor:
        if not self._exchange(own.address, operation | self._code, partial, rows, 0, False, tokens, 0.0):
            raise self._error()
        return own.buffer[:tokens]

    def _barrier(self, lane: int, operation: int, rows: int, columns: int) -> None:
        if not self._meet(self._lanes[lane].address, operation, rows, columns):
            raise self._error()

    def _error(self) -> CommunicationError:
        """Why the group has ended, as the rank that ended it found."""
        return CommunicationError(explain(self._control.finding, self.shape.timeout))


def _compiled(dtype: str) -> tuple[Callable[..., bool], Callable[..., bool]]:
    """The kernels as plain calls: entering through Numba's dispatcher would cost half a microsecond more."""
    elements = ELEMENTS[dtype]
    word, flag = types.int64, types.boolean
    meeting = (word, word, word, word)
    exchanging = (word, word, elements, elements, word, flag, word, types.float64)
    for kernel, signature in ((meet, meeting), (exchange, exchanging)):
        kernel.compile(signature)
    return exchange.get_overload(exchanging), meet.get_overload(meeting)
