"""The collective of GPUs that cannot read each other's memory, on one host or several: rows go by NCCL."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from tokenweave.comm import nccl
from tokenweave.comm.collective import CommunicationError
from tokenweave.comm.gpu_collective import GpuCollective, GpuLane, refuse_in_capture
from tokenweave.comm.gpu_rows import GpuRows, PackedLane
from tokenweave.comm.operations import Operation, describe, dtype_code
from tokenweave.comm.shape import CollectiveShape, check_columns, check_root
from tokenweave.comm.streams import Streams
from tokenweave.comm.vigil import Vigil
from tokenweave.comm.within import within
from tokenweave.comm.world import World

_PATIENCE_SECONDS = 120.0  # beyond the deadline: to connect, and until torch writes to its log that a rank is late
_RAISED_SECONDS = 1.0  # how long a rank that has raised an error waits for what it has launched


@dataclass(frozen=True)
class ExchangeLane(GpuLane):
    number: int
    packed: PackedLane


class DistributedOnGpus:
    """Opens collectives over a world whose ranks have a GPU each. Every rank opens and closes the same ones in the same
    order: process groups, which take some seconds to make, go from those that are closed to those that are opened."""

    def __init__(self, world: World, device: torch.device) -> None:
        self._world, self._device, self._opened = world, device, 0
        self._free: list[dist.ProcessGroup] = []
        self._closed = False

    def open(self, shape: CollectiveShape) -> "DistributedGpuCollective":
        refuse_in_capture()
        if self._world.ended is not None:
            raise CommunicationError(self._world.ended)
        self._opened += 1
        # What can fail on this rank alone comes before the ranks meet: after that the others wait for it in NCCL.
        local = GpuRows(shape, self._world.size, self._device)
        lanes = [_lane(shape, self._world.size, self._device, number) for number in range(shape.lanes)]
        self._world.meet(shape.timeout)
        mine = json.dumps({**asdict(shape), "dtype": shape.dtype_name})
        self._world.agree(f"distributed/{self._opened}", "open_collective", mine)
        [streams] = self._world.open_lanes(1, shape.timeout)
        try:
            groups = self._take(shape.lanes, shape.timeout + _PATIENCE_SECONDS)
        except BaseException:
            streams.close()
            raise
        return DistributedGpuCollective(shape, self._world, self._device, local, lanes, groups, streams, self._release)

    def _take(self, lanes: int, patience: float) -> list[dist.ProcessGroup]:
        """A process group for each lane; none where there is one rank."""
        if self._world.size == 1:
            return []
        try:
            while len(self._free) < lanes:
                self._free.append(nccl.connected(self._device, patience))
        except CommunicationError as error:
            raise CommunicationError(self._world.end(f"rank {self._world.rank}: {error}", wait=True)) from error
        taken, self._free = self._free[:lanes], self._free[lanes:]
        return taken

    def _release(self, groups: list[dist.ProcessGroup]) -> None:
        self._free.extend(groups)

    def close(self) -> None:
        """Leaves the world, unless process groups cannot be destroyed, for which that would wait."""
        if self._closed:
            return
        self._closed = True
        if self._world.ended is None and (not self._free or nccl.destroyed(self._free)):
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
        self, shape: CollectiveShape, world: World, device: torch.device, local: GpuRows, lanes: list[ExchangeLane],
        groups: list[dist.ProcessGroup], streams: Streams, release: Callable[[list[dist.ProcessGroup]], object],
    ) -> None:  # fmt: skip
        """groups: one a lane. release: what becomes of them when this is closed and nobody uses them any more."""
        super().__init__(shape, world.rank, world.size, device, lanes)
        self._world, self._local, self._groups, self._release = world, local, groups, release
        self._element = dtype_code(shape.dtype) << 8
        self._vigil: Vigil | None = None
        if world.size > 1:
            progress = local.progress.numpy()
            self._vigil = Vigil(world, streams, progress, shape.timeout, lambda: nccl.abort(groups))

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
            if self._groups and len(flat):
                dist.broadcast(moved, root, group=self._groups[lane])
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
        """Waits for what this rank has launched, and a short time for ranks that have not come to this."""
        self._close(None)

    def __exit__(self, *exc: object) -> None:
        """After an error it does not wait long: other ranks may never come to what this one has launched."""
        self._close(_RAISED_SECONDS if any(exc) else None)

    def _close(self, patience: float | None) -> None:
        if not self._lanes:
            return
        super().close()
        if self._vigil is None:
            return
        try:
            if self._world.ended is None:
                within(patience, self._local.synchronize)
        except TimeoutError:
            self._world.end(f"rank {self.rank} has raised an error, with operations under way", wait=False)
        except RuntimeError as error:
            self._world.end(f"rank {self.rank}'s GPU has failed: {str(error).splitlines()[0]}", wait=False)
            raise
        finally:
            self._vigil.stop()
        if self._world.ended is None:
            self._release(self._groups)

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
        if self._groups:
            dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=self._groups[own.number])
        else:
            received.copy_(sent)

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
            what = f"{describe(words)} on lane {own.number}: {nccl.told_by(error)}"
            raise CommunicationError(self._world.end(f"rank {self.rank}: {what}", wait=True)) from error
        self._local.finish(own.number)

    def _settle(self) -> None:
        if self._local.settle():
            self.check()


def _lane(shape: CollectiveShape, size: int, device: torch.device, number: int) -> ExchangeLane:
    buffer = torch.empty(shape.max_tokens, shape.hidden_size, dtype=shape.dtype, device=device)
    return ExchangeLane(buffer, buffer, number, PackedLane.of(shape, size, device))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor."""
    return tensor.detach().view(-1).view(torch.uint8)
