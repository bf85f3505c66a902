"""The collective of GPUs that can read each other's memory: a kernel for each operation, over memory they all map."""

import functools
import json
import os
from dataclasses import asdict

import torch

from tokenweave.comm import staging
from tokenweave.comm.collective import CommunicationError
from tokenweave.comm.control import CONTROL_BYTES, Control
from tokenweave.comm.devices import multicast_disabled
from tokenweave.comm.gpu_collective import KernelCollective, KernelLane, RowKernels, lane_words, refuse_in_capture
from tokenweave.comm.kernels.compiler import Tiling
from tokenweave.comm.kernels.lane_words import LaneWord
from tokenweave.comm.kernels.loaded import address_on_gpu, bulk_kernels, multicast_kernels, plain_kernels
from tokenweave.comm.operations import explain
from tokenweave.comm.peers import PeerLane, PeerMemory
from tokenweave.comm.shape import CollectiveShape
from tokenweave.comm.world import World

_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped


class Symmetric:
    """Opens collectives in torch's symmetric memory. Every rank opens the same ones in the same order.

    control: the page in which kernels put down what they find wrong, and read who has died.
    """

    def __init__(self, control: Control, world: World, device: torch.device) -> None:
        self._control, self._world, self._device = control, world, device
        self._opened = 0
        with torch.cuda.device(device):
            torch.cuda.init()
            status = torch.cuda.cudart().cudaHostRegister(control.address, CONTROL_BYTES, _MAPPED)
            if int(status) != 0:
                raise RuntimeError(f"CUDA cannot map the ranks' control page: {status}")
            self._page = address_on_gpu(control.address)

    def open(self, shape: CollectiveShape) -> "SymmetricCollective":
        refuse_in_capture()
        self._opened += 1
        self._world.meet(shape.timeout)
        self._agree(shape)
        memory = PeerMemory(shape, self._world, self._device)
        multicast = self._world.exchange(
            f"multicast/{self._opened}", str(memory.multicast and not multicast_disabled(os.environ))
        )
        kernels = _kernels(shape, self._world, self._device, multicast=all(word == "True" for word in multicast))
        self._world.meet(shape.timeout)  # every rank's flags are down, and its kernels compiled
        return SymmetricCollective(shape, self._world, self._device, memory, kernels, self._control, self._page)

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.cudart().cudaHostUnregister(self._control.address)
        self._world.close()

    def _agree(self, shape: CollectiveShape) -> None:
        """Every rank asks for the same, on the same kind of GPU: others would run other kernels."""
        capability = torch.cuda.get_device_capability(self._device)
        mine = json.dumps({**asdict(shape), "dtype": shape.dtype_name, "compute capability": capability})
        self._world.agree(f"symmetric/{self._opened}", "open_collective", mine)


class SymmetricCollective(KernelCollective):
    """See `Collective` and `GpuCollective`. Sums are in rank order, but for multicast, where the switch sums
    in its own and rounds before the residual is added. gather and broadcast leave the lanes' buffers
    alone, and are not compared between the ranks: those that differ in them get wrong values, or come late. barrier and
    what brings CPU tensors wait for the stream."""

    def __init__(
        self, shape: CollectiveShape, world: World, device: torch.device, memory: PeerMemory, kernels: RowKernels,
        control: Control, page: int,
    ) -> None:  # fmt: skip
        self._peer_lanes = [memory.lane(number) for number in range(shape.lanes)]
        self._memory, self._control = memory, control
        lanes = [_lane(shape, world, number, lane, device, page) for number, lane in enumerate(self._peer_lanes)]
        super().__init__(shape, world.rank, world.size, device, kernels, lanes)
        for number in range(shape.lanes):
            self.barrier(lane=number)

    def check(self) -> None:
        if self._control.ended:
            raise CommunicationError(explain(self._control.finding, self.shape.timeout))

    def gather(self, columns: torch.Tensor, widths: list[int], *, lane: int = 0) -> torch.Tensor | None:
        own = self._lane(lane)
        meet = functools.partial(self._meet, own)
        memory = self._peer_lanes[lane].staging
        return staging.gather(columns, widths, rank=self.rank, size=self.size, staging=memory, meet=meet)

    def broadcast(self, tensor: torch.Tensor, root: int = 0, *, lane: int = 0) -> torch.Tensor:
        own = self._lane(lane)
        meet = functools.partial(self._meet, own)
        memory = self._peer_lanes[lane].staging
        staging.broadcast(tensor, root, rank=self.rank, size=self.size, staging=memory, meet=meet)
        if tensor.is_cpu:
            self._settle()
        return tensor

    def barrier(self, *, lane: int = 0) -> None:
        self._meet(self._lane(lane), 0, 0, 0)
        self._settle()

    def close(self) -> None:
        """This rank's memory stays until its peers' handles have gone too."""
        if self._lanes:
            torch.cuda.synchronize(self.device)
        super().close()
        self._peer_lanes = []

    def _meet(self, own: KernelLane, code: int, rows: int, columns: int) -> None:
        self._kernels.barrier(own.words, self._stream)

    def _settle(self) -> None:
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self.device).synchronize()
            self.check()


def _kernels(shape: CollectiveShape, world: World, device: torch.device, *, multicast: bool) -> RowKernels:
    """Those that move such rows on such a GPU. It depends on what is the same on every rank."""
    capability = torch.cuda.get_device_capability(device)
    tiling = Tiling.of(shape.row_bytes)
    if multicast and capability >= (9, 0) and shape.row_bytes % 16 == 0:
        return multicast_kernels(shape.dtype, shape.hidden_size, capability, device.index)
    if tiling is not None and capability >= (9, 0):
        return bulk_kernels(shape.dtype, shape.hidden_size, tiling, capability, device.index, emulated=False)
    return plain_kernels(shape.dtype, shape.hidden_size, capability, device, rank=world.rank, size=world.size)


def _lane(
    shape: CollectiveShape, world: World, number: int, lane: PeerLane, device: torch.device, page: int
) -> KernelLane:
    facts = {
        LaneWord.RANK: world.rank,
        LaneWord.SIZE: world.size,
        LaneWord.LANE: number,
        LaneWord.TIMEOUT: int(shape.timeout * 1e9),
        LaneWord.PAGE: page,
        LaneWord.MULTICAST: lane.multicast,
    }
    tables = {LaneWord.SOURCES: lane.buffers, LaneWord.TARGETS: lane.buffers, LaneWord.FLAGS: lane.flags}
    return KernelLane(lane.buffer, lane.buffer, lane_words(facts, tables, device))
