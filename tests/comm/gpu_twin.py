"""The GPU's distributed collective with its GPU taken away: gloo for NCCL, plain torch for the kernels."""

import threading
import time
from contextlib import nullcontext, suppress
from datetime import timedelta

import comm_oracle as oracle
import comm_ranks
import torch
import torch.distributed as dist

from tokenweave.comm import CommunicationError, Group, distributed_gpu, nccl
from tokenweave.comm.operations import Operation
from tokenweave.comm.vigil import PROGRESS_WORDS, Progress


class CpuRows:
    """As GpuRows, at once."""

    def __init__(self, shape, size: int, device: torch.device) -> None:
        self.size = size
        self.progress = torch.zeros(shape.lanes, PROGRESS_WORDS, dtype=torch.int64)

    def begin(self, lane: int, words: tuple[int, int, int]) -> None:
        self.progress[lane, Progress.CODE : Progress.COLUMNS + 1] = torch.tensor(words)
        self.progress[lane, Progress.BEGUN] += 1

    def finish(self, lane: int) -> None:
        self.progress[lane, Progress.DONE] = self.progress[lane, Progress.BEGUN]

    def combine(self, operation, packed, rows, weight, *, own: int, eps: float, blocks: int) -> None:
        starts = packed.tables[own, : self.size]
        assert starts.tolist() == [packed.rows[n * own : n * own + 1].data_ptr() for n in range(self.size)]
        parts = packed.rows[: self.size * own].view(self.size, own, -1)
        if operation == Operation.ALL_GATHER:
            parts[:] = rows
        elif operation == Operation.ALL_REDUCE_ADD_RMS_NORM:
            y, x = oracle.fused(list(parts), rows, weight, eps)
            rows.copy_(y)
            parts[:] = x
        elif operation == Operation.REDUCE_SCATTER:
            rows.copy_(oracle.total(list(parts)))
        else:
            parts[:] = oracle.total(list(parts)).to(parts.dtype)

    def settle(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def gloo(device: torch.device, patience: float) -> dist.ProcessGroup:
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=20))


def twin_of(group: Group) -> Group:
    """A group of the same ranks."""
    distributed_gpu.GpuRows = CpuRows  # type: ignore[assignment,misc]
    distributed_gpu.refuse_in_capture = lambda: None
    nccl.connected = gloo
    opener = distributed_gpu.DistributedOnGpus(group._opener._world, torch.device("cpu"))
    return Group(group.rank, group.size, device="cpu", collective="distributed", timeout=20.0, opener=opener)


def all_checks(group: Group) -> dict[str, object]:
    """What the CPU's collectives are held to."""
    twin = twin_of(group)
    found: dict[str, object] = {"fused": []}
    for hidden in (33, 64):
        for dtype in comm_ranks.DTYPES:
            found["fused"] += comm_ranks.fused(twin, hidden, dtype, comm_ranks.SIZES)[0]  # type: ignore[operator]
    checks = (
        comm_ranks.any_cut, comm_ranks.not_finite, comm_ranks.layers, comm_ranks.separate_operations,
        comm_ranks.gather_and_broadcast, comm_ranks.refused, comm_ranks.two_lanes, comm_ranks.copies,
    )  # fmt: skip
    found |= {check.__name__: check(twin) for check in checks}
    twin.close()
    return found


def raising(group: Group, where: str) -> tuple[str | None, float]:
    """Rank 1 raises an error with operations under way, within the collective's `with` or only the group's. What each
    rank was told, and after how long."""
    twin, began = twin_of(group), time.monotonic()
    collective = twin.open_collective(64, 8)
    if group.rank == 0:
        while time.monotonic() < began + 20:
            try:
                collective.check()
            except CommunicationError as error:
                collective.close()
                return str(error), time.monotonic() - began
            time.sleep(0.02)
        return None, 0.0
    under_way = threading.Event()
    collective._local.synchronize = lambda: under_way.wait(30.0)
    with suppress(ZeroDivisionError), twin, collective if where == "in the collective" else nullcontext():
        raise ZeroDivisionError
    return collective._world.ended, time.monotonic() - began
