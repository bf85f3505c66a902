"""The collective of GPUs that cannot read each other's memory, on one host or several: rows go by NCCL."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from tokenweave.comm import nccl
from tokenweave.comm.collective import CommunicationError
from tokenweave.comm.gpu_collective import GpuCollective, GpuLane, refuse_in_capture
from tokenweave.comm.gpu_rows import GpuRows, PackedLane
from tokenweave.comm.operations import Operation, describe, dtype_code
from tokenweave.comm.shape import CollectiveShape, check_columns, check_root
from tokenweave.comm.streams import StreamError, Streams
from tokenweave.comm.vigil import Vigil
from tokenweave.comm.world import World

_PATIENCE_SECONDS = 120.0  # beyond the deadline, until torch writes to its log that an operation is late
_FAREWELL_SECONDS = 1.0  # how long a rank that closes waits for those that have not come to that


@dataclass(frozen=True)
class ExchangeLane(GpuLane):
    """group: the lane's own process group; None where there is one rank."""

    number: int
    packed: PackedLane
    group: dist.ProcessGroup | None


class DistributedOnGpus:
    """Opens collectives over a world whose ranks have a GPU each. Every rank opens and closes the same ones in the same
    order: process groups, which take some seconds to make, go from those that are closed to those that are opened."""

    def __init__(self, world: World, device: torch.device) -> None:
        self._world, self._device, self._opened = world, device, 0
        self._free: list[dist.ProcessGroup] = []

    def open(self, shape: CollectiveShape) -> "DistributedGpuCollective":
        refuse_in_capture()
        self._opened += 1
        self._world.meet(shape.timeout)
        mine = json.dumps({**asdict(shape), "dtype": shape.dtype_name})
        self._world.agree(f"distributed/{self._opened}", "open_collective", mine)
        local = GpuRows(shape, self._world.size, self._device)
        groups: list[dist.ProcessGroup] = []
        if self._world.size > 1:
            patience = shape.timeout + _PATIENCE_SECONDS
            groups = [
                self._free.pop() if self._free else nccl.connected(self._device, patience) for _ in range(shape.lanes)
            ]
        return DistributedGpuCollective(shape, self._world, self._device, local, groups, self._release)

    def _release(self, groups: list[dist.ProcessGroup]) -> None:
        self._free.extend(groups)

    def close(self) -> None:
        """Leaves the world, unless process groups cannot be destroyed, for which that would wait."""
        free, self._free = self._free, []
        if self._world.ended is None and (not free or nccl.destroyed(free)):
            self._world.close()


class DistributedGpuCollective(GpuCollective[ExchangeLane]):
    """See `Collective` and `GpuCollective`. Sums are in rank order.

    Every rank gets from all the rows it owns, sums and norms them in a kernel of its own, and sends the results to all:
    as many bytes as a ring all-reduce. budget: the thread blocks of that kernel; how many NCCL takes is its own choice
    (NCCL_MAX_CTAS). barrier and what brings CPU tensors wait for the stream.

    A rank that is late or has died is found by `vigil`, and so are ranks that come with other shapes or operations, a
    fifth of a second later: until then NCCL makes of them wrong rows, or waits.
    """

    default_budget = 1 << 10  # nothing else waits for the processors that this short kernel takes

    def __init__(
        self, shape: CollectiveShape, world: World, device: torch.device, local: GpuRows,
        groups: list[dist.ProcessGroup], release: Callable[[list[dist.ProcessGroup]], object],
    ) -> None:  # fmt: skip
        """release: what is to become of the groups when this is closed and nobody uses them any more."""
        self._world, self._local, self._groups, self._release = world, local, groups, release
        self._element = dtype_code(shape.dtype) << 8
        lanes = [_lane(shape, world.size, device, number, groups) for number in range(shape.lanes)]
        super().__init__(shape, world.rank, world.size, device, lanes)
        self._farewell: Streams | None = None
        self._vigil: Vigil | None = None
        if world.size > 1:
            watched, self._farewell = world.open_lanes(2, shape.timeout)
            progress = local.progress.numpy()
            self._vigil = Vigil(world, watched, progress, shape.timeout, lambda: nccl.abort(groups))

    def check(self) -> None:
        if self._world.ended is not None:
            raise CommunicationError(self._world.ended)

    def gather(self, columns: torch.Tensor, widths: list[int], *, lane: int = 0) -> torch.Tensor | None:
        own = self._lane(lane)
        check_columns(columns, widths, self.rank, self.size)
        count, total = columns.shape[0], sum(widths)
        sent = _bytes(columns.to(self.device).contiguous())
        sent_sizes = [len(sent), *[0] * (self.size - 1)]
        sizes = [count * width * columns.itemsize if self.rank == 0 else 0 for width in widths]
        received = sent.new_empty(sum(sizes))
        with self._under_way(own, Operation.GATHER | dtype_code(columns.dtype) << 8, count, total):
            self._exchange(own, received, sent, sizes, sent_sizes)
        if self.rank != 0:
            return None
        gathered = columns.new_empty(count, total, device=self.device)
        for part, place in zip(received.split(sizes), gathered.split(widths, dim=1), strict=True):
            place.copy_(part.view(columns.dtype).view(place.shape))
        if columns.device.type != self.device.type:
            gathered = gathered.to(columns.device)
            self._settle()
        return gathered

    def broadcast(self, tensor: torch.Tensor, root: int = 0, *, lane: int = 0) -> torch.Tensor:
        own = self._lane(lane)
        check_root(root, self.size)
        if not tensor.is_contiguous():
            return tensor.copy_(self.broadcast(tensor.contiguous(), root, lane=lane))
        flat = _bytes(tensor)
        moved = flat.to(self.device)
        with self._under_way(own, Operation.BROADCAST | dtype_code(tensor.dtype) << 8 | root << 16, len(flat), 1):
            if own.group is not None and len(flat):
                dist.broadcast(moved, root, group=own.group)
        if moved is not flat:
            flat.copy_(moved)
            self._settle()
        return tensor

    def barrier(self, *, lane: int = 0) -> None:
        own = self._lane(lane)
        each = torch.zeros(self.size, dtype=torch.uint8, device=self.device)
        with self._under_way(own, Operation.BARRIER, 0, 0):
            self._exchange(own, torch.empty_like(each), each, [1] * self.size, [1] * self.size)
        self._settle()

    def close(self) -> None:
        """Waits until every rank has come to this, for a short time: what it has sent may still be on its way."""
        if not self._lanes:
            return
        super().close()
        if self._vigil is None or self._farewell is None:
            return
        if self._world.ended is None:
            self._local.synchronize()
            self._part(self._farewell)
        self._vigil.stop()
        self._farewell.close()
        if self._world.ended is None:
            self._release(self._groups)

    def _part(self, streams: Streams) -> None:
        peers = [rank for rank in range(self.size) if rank != self.rank]
        with suppress(StreamError):  # it has failed, or is not about to close
            for peer in peers:
                streams.post(peer, memoryview(b"."))
            wanted = {peer: memoryview(bytearray(1)) for peer in peers}
            streams.receive(wanted, time.monotonic() + _FAREWELL_SECONDS)

    def _launch(
        self, own: ExchangeLane, operation: Operation, tokens: int, rows: torch.Tensor, weight: torch.Tensor, *,
        eps: float, blocks: int,
    ) -> None:  # fmt: skip
        mine = self.own_rows(tokens)
        every = [self.shape.rows_of(tokens, rank, self.size) for rank in range(self.size)]
        whole, packed = own.buffer[:tokens], own.packed.rows[: self.size * mine]
        with self._under_way(own, operation | self._element, tokens, self.shape.hidden_size):
            if operation != Operation.ALL_GATHER:
                self._exchange(own, packed, whole, [mine] * self.size, every)
            if mine:
                self._local.combine(operation, own.packed, rows, weight, own=mine, eps=eps, blocks=blocks)
            if operation != Operation.REDUCE_SCATTER:
                self._exchange(own, whole, packed, every, [mine] * self.size)

    def _exchange(
        self, own: ExchangeLane, received: torch.Tensor, sent: torch.Tensor, received_sizes: list[int],
        sent_sizes: list[int],
    ) -> None:  # fmt: skip
        """Send every rank its part of `sent`, one behind the other, and receive from every rank."""
        if own.group is None:
            received.copy_(sent)
        else:
            dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=own.group)

    @contextmanager
    def _under_way(self, own: ExchangeLane, code: int, rows: int, columns: int) -> Iterator[None]:
        """What is launched within is one operation."""
        words = (int(code), rows, columns)
        if self._vigil is not None:
            self._vigil.launched(own.number, words)
        self._local.begin(own.number, words)
        try:
            yield
        except dist.DistError as error:  # what NCCL finds while it launches: a peer that has gone, often
            what = f"{describe(words)} on lane {own.number}: {str(error).splitlines()[0]}"
            raise CommunicationError(self._world.end(f"rank {self.rank}: {what}", wait=True)) from error
        self._local.finish(own.number)

    def _settle(self) -> None:
        if self._local.settle():
            self.check()


def _lane(
    shape: CollectiveShape, size: int, device: torch.device, number: int, groups: list[dist.ProcessGroup]
) -> ExchangeLane:
    buffer = torch.empty(shape.max_tokens, shape.hidden_size, dtype=shape.dtype, device=device)
    return ExchangeLane(buffer, buffer, number, PackedLane.of(shape, size, device), groups[number] if groups else None)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor."""
    return tensor.detach().view(-1).view(torch.uint8)
