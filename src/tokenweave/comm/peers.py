"""Memory of every rank that every rank's kernels reach: torch's symmetric memory, laid out for a collective."""

from dataclasses import dataclass
from typing import Any

import torch

from tokenweave.comm.kernels.lane_words import FLAG_WORDS
from tokenweave.comm.shape import CollectiveShape
from tokenweave.comm.world import World

STAGING_BYTES = 1 << 18  # per lane, for gather and broadcast
_ALIGNMENT = 512
_FLAG_BYTES = 8


@dataclass(frozen=True)
class PeerLane:
    """One lane. Addresses are by rank, as this process's GPU sees them; multicast: of the buffer on all ranks, or 0."""

    buffer: torch.Tensor
    staging: list[torch.Tensor]
    buffers: list[int]
    flags: list[int]
    multicast: int


class PeerMemory:
    """A collective's buffers, staging memory and flags on all ranks. Every rank makes it at the same time."""

    def __init__(self, shape: CollectiveShape, world: World, device: torch.device) -> None:
        self.shape, self.size, self._rank = shape, world.size, world.rank
        self._buffer_bytes = -(-shape.max_tokens * shape.row_bytes // _ALIGNMENT) * _ALIGNMENT
        count = shape.lanes * (self._buffer_bytes + STAGING_BYTES)
        flag_bytes = shape.lanes * FLAG_WORDS * self.size * _FLAG_BYTES
        self._handle: Any = None
        if self.size == 1:
            self._memory = torch.empty(count, dtype=torch.uint8, device=device)
            self._flags = torch.zeros(flag_bytes, dtype=torch.uint8, device=device)
            return
        import torch.distributed._symmetric_memory as symmetric

        self._memory = symmetric.empty(count, dtype=torch.uint8, device=device)
        self._handle = symmetric.rendezvous(self._memory, world.group.group_name)
        if flag_bytes > self._handle.signal_pad_size:
            raise ValueError(
                f"the symmetric collective has flags for {self._handle.signal_pad_size // (flag_bytes // self.size)} "
                f"ranks, got {self.size}"
            )
        # Memory may have served another collective before, whose last flags would let this one's first waits through.
        self._handle.get_signal_pad(self._rank, dtype=torch.uint8).zero_()
        torch.cuda.synchronize(device)

    @property
    def multicast(self) -> bool:
        """Whether this rank can reach all ranks' memory at one address."""
        return self._handle is not None and self._handle.multicast_ptr != 0

    def lane(self, number: int) -> PeerLane:
        shape = self.shape
        start = number * self._buffer_bytes
        staging = shape.lanes * self._buffer_bytes + number * STAGING_BYTES
        own = self._memory[start : start + shape.max_tokens * shape.row_bytes]
        if self._handle is None:
            memories, flags, multicast = [self._memory], [self._flags.data_ptr()], 0
        else:
            memories = [self._handle.get_buffer(rank, self._memory.shape, torch.uint8) for rank in range(self.size)]
            flags, multicast = list(self._handle.signal_pad_ptrs), self._handle.multicast_ptr
        return PeerLane(
            buffer=own.view(shape.dtype).view(shape.max_tokens, shape.hidden_size),
            staging=[memory[staging : staging + STAGING_BYTES] for memory in memories],
            buffers=[memory.data_ptr() + start for memory in memories],
            flags=[address + number * FLAG_WORDS * self.size * _FLAG_BYTES for address in flags],
            multicast=multicast and multicast + start,
        )
