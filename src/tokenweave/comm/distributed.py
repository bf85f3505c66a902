"""The collective over torch.distributed: the fallback that runs anywhere, and the reference."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from tokenweave.comm.collective import CommunicationError
from tokenweave.comm.control import DEAD, LATE, MAX_RANKS, MISMATCH
from tokenweave.comm.kernels.sync import LANE_WORDS, LaneWord
from tokenweave.comm.local import compiled_combine
from tokenweave.comm.operations import Operation, dtype_code, explain
from tokenweave.comm.shape import CollectiveShape, check_columns, check_root
from tokenweave.comm.streams import StreamError, Streams
from tokenweave.comm.world import World
from tokenweave.config import partition

Words = tuple[int, int, int]  # what a rank is doing: operation, rows, columns


class Distributed:
    """Opens collectives over a world."""

    def __init__(self, world: World) -> None:
        if world.size > MAX_RANKS:
            raise ValueError(f"the distributed collective has room for {MAX_RANKS} ranks, got {world.size}")
        self._world = world

    def open(self, shape: CollectiveShape) -> "DistributedCollective":
        return DistributedCollective(self._world, shape)

    def close(self) -> None:
        self._world.close()


class _Lane:
    """One lane as this rank holds it. Nothing in it is shared with another lane."""

    def __init__(self, shape: CollectiveShape, world: World, number: int, streams: Streams) -> None:
        self.number, self.streams = number, streams
        rank, size = world.rank, world.size
        self.buffer = torch.empty(shape.max_tokens, shape.hidden_size, dtype=shape.dtype)
        most = -(-shape.max_tokens // size)
        self.received = {
            peer: torch.empty(most, shape.hidden_size, dtype=shape.dtype) for peer in range(size) if peer != rank
        }
        self.peer_words = {peer: np.empty(3, dtype=np.int64) for peer in self.received}
        self.kernel_words = np.zeros(LANE_WORDS, dtype=np.int64)
        self.kernel_words[LaneWord.SIZE] = size
        self.kernel_words[LaneWord.RANK] = rank
        self.kernel_words[LaneWord.HIDDEN] = shape.hidden_size
        self.kernel_words[LaneWord.ROW_BYTES] = shape.row_bytes
        self.kernel_words[LaneWord.TARGETS] = self.buffer.data_ptr()


class DistributedCollective:
    """See `Collective`. Its sums and norms are those of the shared_memory kernel, bit for bit.

    A rank sends every peer the rows that peer owns, sums its own in rank order and sends the results back: as many
    bytes as a ring all-reduce. Before that ranks tell each other what they are doing, so that a rank that comes late or
    with another shape is named. Partials are sent from where they lie, so none are copied.
    """

    def __init__(self, world: World, shape: CollectiveShape) -> None:
        self.copies = 0
        self.shape, self.rank, self.size = shape, world.rank, world.size
        self._world = world
        self._element = dtype_code(shape.dtype) << 8
        self._combine = compiled_combine(shape.dtype_name)
        self._streams = world.open_lanes(shape.lanes, shape.timeout)
        self._lanes = [_Lane(shape, world, lane, streams) for lane, streams in enumerate(self._streams)]
        code = Operation.OPEN_COLLECTIVE | self._element | shape.lanes << 16
        self._transfer(self._lanes[0], (code, shape.max_tokens, shape.hidden_size), {}, {})

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
        tokens = partial.shape[0]
        self.shape.check_rows("residual", residual, self.shape.rows_of(tokens, self.rank, self.size))
        self.shape.check_weight(weight)
        words = self._words(Operation.ALL_REDUCE_ADD_RMS_NORM, tokens)
        self._scatter(own, words, partial)
        self._run(own, words, residual, tokens, weight, eps)
        rows = self._spread(own, words, tokens)
        return partial if partial.data_ptr() == own.buffer.data_ptr() else rows

    def all_reduce(self, partial: torch.Tensor, *, lane: int = 0) -> torch.Tensor:
        own = self._lane(lane)
        self.shape.check_rows("partial", partial)
        words = self._words(Operation.ALL_REDUCE, partial.shape[0])
        self._scatter(own, words, partial)
        self._run(own, words, partial, partial.shape[0])
        return self._spread(own, words, partial.shape[0])

    def reduce_scatter(self, partial: torch.Tensor, *, lane: int = 0) -> torch.Tensor:
        own = self._lane(lane)
        self.shape.check_rows("partial", partial)
        tokens = partial.shape[0]
        rows = partial.new_empty(self.shape.rows_of(tokens, self.rank, self.size), self.shape.hidden_size)
        words = self._words(Operation.REDUCE_SCATTER, tokens)
        self._scatter(own, words, partial)
        self._run(own, words, rows, tokens)
        return rows

    def all_gather(self, rows: torch.Tensor, tokens: int, *, lane: int = 0) -> torch.Tensor:
        own = self._lane(lane)
        self.shape.check_tokens(tokens)
        self.shape.check_rows("rows", rows, self.shape.rows_of(tokens, self.rank, self.size))
        words = self._words(Operation.ALL_GATHER, tokens)
        self._transfer(own, words, {}, {})
        self._run(own, words, rows, tokens)
        return self._spread(own, words, tokens)

    def gather(self, columns: torch.Tensor, widths: list[int], *, lane: int = 0) -> torch.Tensor | None:
        own = self._lane(lane)
        check_columns(columns, widths, self.rank, self.size)
        count, total = columns.shape[0], sum(widths)
        words = (Operation.GATHER | dtype_code(columns.dtype) << 8, count, total)
        if self.rank != 0:
            self._transfer(own, words, {0: columns.contiguous()}, {})
            return None
        parts = {rank: columns.new_empty(count, width) for rank, width in enumerate(widths)}
        parts[0] = columns
        self._transfer(own, words, {}, {rank: part for rank, part in parts.items() if rank != 0})
        return torch.cat(list(parts.values()), dim=1)

    def broadcast(self, tensor: torch.Tensor, root: int = 0, *, lane: int = 0) -> torch.Tensor:
        own = self._lane(lane)
        check_root(root, self.size)
        if not tensor.is_contiguous():
            return tensor.copy_(self.broadcast(tensor.contiguous(), root, lane=lane))
        flat = tensor.detach().view(-1).view(torch.uint8)
        words = (Operation.BROADCAST | dtype_code(tensor.dtype) << 8 | root << 16, flat.numel(), 1)
        peers = own.received if self.rank == root else {}
        self._transfer(own, words, dict.fromkeys(peers, flat), {} if self.rank == root else {root: flat})
        return tensor

    def barrier(self, *, lane: int = 0) -> None:
        self._transfer(self._lane(lane), (Operation.BARRIER, 0, 0), {}, {})

    def check(self) -> None:
        if self._world.ended is not None:
            raise CommunicationError(self._world.ended)

    def close(self) -> None:
        """End the connections. A peer that still waits for this rank sees that."""
        self._lanes = []
        for streams in self._streams:
            streams.close()
        self._streams = []

    def __enter__(self) -> "DistributedCollective":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _lane(self, lane: int) -> _Lane:
        self.check()
        if not self._lanes:
            raise RuntimeError("the collective is closed")
        self.shape.check_lane(lane)
        return self._lanes[lane]

    def _words(self, operation: Operation, tokens: int) -> Words:
        return operation | self._element, tokens, self.shape.hidden_size

    def _scatter(self, own: _Lane, words: Words, partial: torch.Tensor) -> None:
        """Send every peer the rows it owns of the partial, and point the kernel to what came."""
        tokens, mine = words[1], partition(words[1], self.size, self.rank)
        received = {peer: rows[: mine.stop - mine.start] for peer, rows in own.received.items()}
        self._transfer(
            own, words, {peer: partial[partition(tokens, self.size, peer)] for peer in own.received}, received
        )
        own.kernel_words[LaneWord.SOURCES + self.rank] = partial.data_ptr()
        for peer, rows in own.received.items():  # the kernel counts rows from the lane's first
            own.kernel_words[LaneWord.SOURCES + peer] = rows.data_ptr() - mine.start * self.shape.row_bytes

    def _run(
        self,
        own: _Lane,
        words: Words,
        rows: torch.Tensor,
        tokens: int,
        weight: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        wide = weight is not None and weight.dtype == torch.float32
        address = 0 if weight is None else weight.data_ptr()
        operation = words[0] & 0xFF
        self._combine(own.kernel_words.ctypes.data, operation, rows.data_ptr(), address, wide, tokens, eps)

    def _spread(self, own: _Lane, words: Words, tokens: int) -> torch.Tensor:
        """Send this rank's rows of the buffer to every peer, and receive theirs."""
        rows = {peer: own.buffer[partition(tokens, self.size, peer)] for peer in range(self.size)}
        mine = rows.pop(self.rank)
        with self._told(own, words) as deadline:
            for peer in rows:
                own.streams.post(peer, _bytes(mine))
            own.streams.receive({peer: _bytes(part) for peer, part in rows.items()}, deadline)
            own.streams.flush(deadline)
        return own.buffer[:tokens]

    def _transfer(
        self, own: _Lane, words: Words, sent: dict[int, torch.Tensor], received: dict[int, torch.Tensor]
    ) -> None:
        """Once every rank is here with the same operation and shape: send tensors to peers, receive others."""
        mine = np.array(words, dtype=np.int64).data.cast("B")
        with self._told(own, words) as deadline:
            for peer in own.received:  # the data follow at once: a peer that came with something else ends the group
                own.streams.post(peer, mine, *([_bytes(sent[peer])] if peer in sent else []))
            words_of = {peer: theirs.data.cast("B") for peer, theirs in own.peer_words.items()}
            own.streams.receive(words_of, deadline)
            for peer, theirs in own.peer_words.items():
                if (brought := theirs.tolist()) != list(words):
                    raise self._failure(own, [MISMATCH, peer, own.number, *words, *brought])
            own.streams.receive({peer: _bytes(tensor) for peer, tensor in received.items()}, deadline)
            own.streams.flush(deadline)

    @contextmanager
    def _told(self, own: _Lane, words: Words) -> Iterator[float]:
        """The deadline of what is sent and received within; a failure of that ends the group."""
        try:
            yield time.monotonic() + self.shape.timeout
        except StreamError as error:
            reason = LATE if error.late else DEAD
            raise self._failure(own, [reason, error.peer, own.number, *words, 0, 0, 0]) from error

    def _failure(self, own: _Lane, finding: list[int]) -> CommunicationError:
        """End the group: peers that wait for this rank see its connections close, and look up the account."""
        account = explain([self.rank, *finding], self.shape.timeout)
        error = CommunicationError(self._world.end(account, wait=finding[0] == DEAD))
        self.close()
        return error


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data
