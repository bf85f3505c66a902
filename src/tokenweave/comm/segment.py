"""One collective's part of the memory that the ranks of a host share."""

import ctypes
import mmap
import weakref

import numpy as np
import torch

from tokenweave.comm.control import ARENA_BYTES, MAX_RANKS, Control
from tokenweave.comm.kernels.sync import LANE_WORDS, LINE_BYTES, LaneWord
from tokenweave.comm.shape import CollectiveShape

STAGING_BYTES = 1 << 18  # per rank and lane, for gather and broadcast; touched only as far as they need
_libc = ctypes.CDLL(None)


def _pages(count: int) -> int:
    return -(-count // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


class Segment:
    """A line per lane and rank, then staging memory, then buffers, each in that order. Mapped by every rank."""

    def __init__(self, control: Control, offset: int, shape: CollectiveShape, rank: int, size: int) -> None:
        if size > MAX_RANKS:
            raise ValueError(f"the shared_memory collective has room for {MAX_RANKS} ranks, got {size}")
        self.control, self.shape, self.rank, self.size = control, shape, rank, size
        self._buffer_bytes = _pages(shape.max_tokens * shape.row_bytes)
        channels = shape.lanes * size
        self._staging = _pages(channels * LINE_BYTES)
        self._buffers = self._staging + channels * STAGING_BYTES
        self.bytes = self._buffers + channels * self._buffer_bytes
        if offset + self.bytes > ARENA_BYTES:
            raise ValueError(
                f"{channels} buffers of {shape.max_tokens} x {shape.hidden_size} take {self.bytes / 1e9:.0f} GB, "
                f"of at most {ARENA_BYTES / 1e9:.0f}; take fewer tokens a step"
            )
        self._map = mmap.mmap(control.arena, self.bytes, offset=offset)
        self._address = torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()
        # The system gets this rank's buffers back once no tensor shows them any more.
        spans = [(offset + self._buffer_at(lane, rank), self._buffer_bytes) for lane in range(shape.lanes)]
        weakref.finalize(self._map, _punch, control.arena, spans)

    def line(self, lane: int) -> int:
        """Address of the lane's first line."""
        return self._address + lane * self.size * LINE_BYTES

    def staging(self, lane: int, rank: int) -> torch.Tensor:
        """uint8 [STAGING_BYTES]"""
        start = self._staging + (lane * self.size + rank) * STAGING_BYTES
        return torch.frombuffer(self._map, dtype=torch.uint8, count=STAGING_BYTES, offset=start)

    def buffer(self, lane: int) -> torch.Tensor:
        """This rank's, [max_tokens, hidden_size]."""
        shape = self.shape
        count = shape.max_tokens * shape.hidden_size
        flat = torch.frombuffer(self._map, dtype=shape.dtype, count=count, offset=self._buffer_at(lane, self.rank))
        return flat.view(shape.max_tokens, shape.hidden_size)

    def buffer_address(self, lane: int, rank: int) -> int:
        return self._address + self._buffer_at(lane, rank)

    def _buffer_at(self, lane: int, rank: int) -> int:
        return self._buffers + (lane * self.size + rank) * self._buffer_bytes


def _punch(fd: int, spans: list[tuple[int, int]]) -> None:
    for start, length in spans:
        _libc.fallocate(fd, 0x03, ctypes.c_long(start), ctypes.c_long(length))  # FALLOC_FL_PUNCH_HOLE | KEEP_SIZE


class Lane:
    """One lane as this rank holds it: the kernels' private words, and the memory as tensors."""

    def __init__(self, segment: Segment, lane: int) -> None:
        shape = segment.shape
        self.buffer = segment.buffer(lane)
        self.staging = [segment.staging(lane, rank) for rank in range(segment.size)]
        self.views: dict[int, torch.Tensor] = {}
        self.buffer_address = segment.buffer_address(lane, segment.rank)
        self.words = np.zeros(LANE_WORDS, dtype=np.int64)
        self.address: int = self.words.ctypes.data
        self.words[LaneWord.SIZE] = segment.size
        self.words[LaneWord.RANK] = segment.rank
        self.words[LaneWord.LANE] = lane
        self.words[LaneWord.LINES] = segment.line(lane)
        self.words[LaneWord.CONTROL] = segment.control.address
        self.words[LaneWord.HIDDEN] = shape.hidden_size
        self.words[LaneWord.ROW_BYTES] = shape.row_bytes
        self.set_timeout(shape.timeout)
        for rank in range(segment.size):
            self.words[LaneWord.SOURCES + rank] = segment.buffer_address(lane, rank)
            self.words[LaneWord.TARGETS + rank] = segment.buffer_address(lane, rank)

    def set_timeout(self, seconds: float) -> None:
        self.words[LaneWord.TIMEOUT] = int(seconds * 1e9)
