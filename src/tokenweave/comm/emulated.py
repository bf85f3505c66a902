"""One GPU standing in for one rank of N: its communication with the real number of thread blocks and the real traffic,
held back to times measured elsewhere on real links."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log2

import torch

from tokenweave.comm.gpu_collective import KernelCollective, KernelLane, lane_words, refuse_in_capture
from tokenweave.comm.group import Group
from tokenweave.comm.kernels.compiler import Tiling
from tokenweave.comm.kernels.lane_words import LaneWord
from tokenweave.comm.kernels.loaded import bulk_kernels
from tokenweave.comm.operations import Operation
from tokenweave.comm.shape import CollectiveShape, check_columns, check_root

TRAFFIC = ("multicast", "p2p")
Pace = Callable[[float], float]  # tokens -> seconds
# Of a kernel's launch and end, which published times hold and its clock does not see: paced to 74.8 µs an all-reduce
# took 76.9 on an H200, and 502.5 instead of 500.2.
LAUNCH_SECONDS = 2e-6


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """What a rank of `size` is to look like.

    traffic: of an operation, for each row of this rank. "multicast": one row in and one out, as where the switch adds
    and copies. "p2p": a row in from every rank and one out to every rank.
    fused: seconds of the fused operation by thread blocks; between two such numbers linear in the logarithm. The others
    by tokens alone. link_seconds: of the fused operation and a token, that the link takes at least.
    """

    size: int
    traffic: str
    fused: Mapping[int, Pace]
    all_reduce: Pace
    reduce_scatter: Pace
    all_gather: Pace
    link_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")
        if self.traffic not in TRAFFIC:
            raise ValueError(f"traffic must be one of {', '.join(TRAFFIC)}, got {self.traffic!r}")
        if not self.fused or min(self.fused) < 1:
            raise ValueError("fused must hold a pace for at least one number of thread blocks")

    def seconds(self, operation: Operation, tokens: int, budget: int) -> float:
        """What the operation takes, at least."""
        if operation == Operation.ALL_REDUCE_ADD_RMS_NORM:
            return max(self._fused(tokens, budget), self.link_seconds * tokens)
        name = operation.name.lower()
        pace: Pace = getattr(self, name)
        return pace(tokens)

    def _fused(self, tokens: int, budget: int) -> float:
        known = sorted(self.fused)
        low = max((b for b in known if b <= budget), default=known[0])
        high = min((b for b in known if b >= budget), default=known[-1])
        first, last = self.fused[low](tokens), self.fused[high](tokens)
        share = log2(budget / low) / log2(high / low) if low < budget < high else 0.0
        return first + share * (last - first)


class Emulated:
    """Opens collectives of rank 0 of an emulated group."""

    def __init__(self, emulation: Emulation, device: torch.device) -> None:
        self._emulation, self._device = emulation, device

    def open(self, shape: CollectiveShape) -> "EmulatedCollective":
        return EmulatedCollective(shape, self._emulation, self._device)

    def close(self) -> None:
        """Memory goes with the collectives."""


class EmulatedCollective(KernelCollective):
    """See `Collective`: the time and the traffic are an operation's, the results are not.

    With p2p traffic the lane's buffer stands for every rank's: its N shares are summed and each gets the result. With
    multicast traffic a share's rows go in, and out to rows of other memory, of normal size from the start: so what the
    next stage reads stays like what it would really read.
    """

    def __init__(self, shape: CollectiveShape, emulation: Emulation, device: torch.device) -> None:
        refuse_in_capture()
        tiling = Tiling.of(shape.row_bytes)
        capability = torch.cuda.get_device_capability(device)
        if tiling is None or capability < (9, 0):
            raise ValueError(
                f"an emulated collective needs a GPU of compute capability 9.0 and rows of whole multiples of 16 bytes "
                f"up to 37 KB, got {capability[0]}.{capability[1]} and {shape.row_bytes} bytes"
            )
        kernels = bulk_kernels(shape.dtype, shape.hidden_size, tiling, capability, device.index, emulated=True)
        lanes = [_lane(shape, emulation, number, device) for number in range(shape.lanes)]
        super().__init__(shape, 0, emulation.size, device, kernels, lanes)
        self._emulation = emulation

    def pace(self, operation: Operation, tokens: int, budget: int) -> float:
        return max(self._emulation.seconds(operation, tokens, budget) - LAUNCH_SECONDS, 0.0)

    def gather(self, columns: torch.Tensor, widths: list[int], *, lane: int = 0) -> torch.Tensor | None:
        check_columns(columns, widths, self.rank, self.size)
        gathered = columns.new_zeros(columns.shape[0], sum(widths))
        gathered[:, : widths[0]] = columns
        return gathered

    def broadcast(self, tensor: torch.Tensor, root: int = 0, *, lane: int = 0) -> torch.Tensor:
        check_root(root, self.size)
        return tensor

    def barrier(self, *, lane: int = 0) -> None:
        self._lane(lane)
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self.device).synchronize()


def emulated_group(emulation: Emulation, device: str = "cuda", timeout: float = 60.0) -> Group:
    """Rank 0 of an emulated group, in this process. Raises ValueError if there is no GPU."""
    if not torch.cuda.is_available():
        raise ValueError("an emulated rank needs a GPU that torch can use; there is none")
    place = torch.device(device)
    place = torch.device("cuda", torch.cuda.current_device() if place.index is None else place.index)
    torch.cuda.set_device(place)
    torch.cuda.synchronize(place)  # makes CUDA's context, in which kernels are loaded
    return Group(
        0, emulation.size, device=str(place), collective="emulated", timeout=timeout, opener=Emulated(emulation, place)
    )


def _lane(shape: CollectiveShape, emulation: Emulation, number: int, device: torch.device) -> KernelLane:
    buffer = torch.randn(shape.max_tokens, shape.hidden_size, dtype=shape.dtype, device=device)
    several = emulation.traffic == "p2p"
    result = buffer if several else torch.randn_like(buffer)
    moved = emulation.size if several else 1
    words = lane_words(
        {LaneWord.SIZE: emulation.size, LaneWord.LANE: number, LaneWord.MULTICAST: moved},
        {LaneWord.SOURCES: [buffer.data_ptr()] * moved, LaneWord.TARGETS: [result.data_ptr()] * moved},
        device,
    )
    return KernelLane(buffer, result, words)
