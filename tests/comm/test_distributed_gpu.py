"""The GPUs' distributed collective, without the GPUs: who gets which rows, on any number of ranks. See `gpu_twin`."""

import functools
import threading

import gpu_twin
import pytest
import torch

from tokenweave.comm import CommunicationError, distributed_gpu, launch, nccl
from tokenweave.comm.distributed_gpu import DistributedOnGpus
from tokenweave.comm.shape import CollectiveShape
from tokenweave.comm.streams import Streams

CHECKS = (
    "fused", "any_cut", "not_finite", "layers", "separate_operations", "gather_and_broadcast", "refused", "two_lanes",
)  # fmt: skip


@functools.cache
def results(size: int) -> list[dict[str, object]]:
    return launch(gpu_twin.all_checks, size, "distributed", threads=1)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("size", (1, 2, 3))
def test_is_right(size: int, check: str) -> None:
    for rank, found in enumerate(results(size)):
        assert found[check] == [], f"rank {rank}"


@pytest.mark.parametrize("size", (1, 2, 3))
def test_what_is_not_in_the_buffer_is_copied_and_counted(size: int) -> None:
    assert [found["copies"] for found in results(size)] == [[0, 0, 1, 2]] * size


class FakeWorld:
    """Notes what is asked of it."""

    rank, size, ended = 0, 2, None

    def __init__(self) -> None:
        self.asked: list[str] = []

    def meet(self, timeout: float) -> None:
        self.asked.append("meet")

    def agree(self, key: str, what: str, mine: str) -> None:
        self.asked.append("agree")

    def open_lanes(self, lanes: int, timeout: float) -> list[Streams]:
        raise CommunicationError("rank 0 could not connect to rank 1")

    def end(self, account: str, *, wait: bool) -> str:
        self.ended = account
        return account

    def close(self) -> None:
        self.asked.append("close")


SHAPE = CollectiveShape(hidden_size=64, max_tokens=8, dtype=torch.float32, lanes=2, timeout=1.0)


@pytest.fixture
def opener(monkeypatch: pytest.MonkeyPatch) -> tuple[DistributedOnGpus, FakeWorld]:
    monkeypatch.setattr(distributed_gpu, "GpuRows", gpu_twin.CpuRows)
    monkeypatch.setattr(distributed_gpu, "refuse_in_capture", lambda: None)
    world = FakeWorld()
    return DistributedOnGpus(world, torch.device("cpu")), world  # type: ignore[arg-type]


@pytest.mark.parametrize("destroyed", (True, False))
def test_the_second_close_does_nothing(
    opener: tuple[DistributedOnGpus, FakeWorld], destroyed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where groups cannot be destroyed, leaving the world would wait for them for ever."""
    monkeypatch.setattr(nccl, "destroyed", lambda groups: destroyed)
    here, world = opener
    here._release(["held by a graph"])  # type: ignore[list-item]
    here.close()
    here.close()
    assert world.asked == ["close"] * destroyed


def test_what_fails_on_one_rank_fails_before_they_meet(
    opener: tuple[DistributedOnGpus, FakeWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, world = opener
    for name in ("GpuRows", "_lane"):
        with monkeypatch.context() as fault, pytest.raises(torch.OutOfMemoryError):
            fault.setattr(distributed_gpu, name, out_of_memory)
            here.open(SHAPE)
        assert world.asked == []


def out_of_memory(*arguments: object) -> None:
    raise torch.OutOfMemoryError("none left")


def test_process_groups_outlive_an_opening_that_fails(opener: tuple[DistributedOnGpus, FakeWorld]) -> None:
    here, world = opener
    here._release(["first", "second"])  # type: ignore[list-item]
    with pytest.raises(CommunicationError, match="could not connect to rank 1"):
        here.open(SHAPE)
    assert here._free == ["first", "second"]


def test_a_rank_that_does_not_connect_is_not_waited_for(
    opener: tuple[DistributedOnGpus, FakeWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group is there, but its first operation does not end. After that the ranks are out of step: nothing opens."""
    released, aborted = threading.Event(), []

    def connect(made: list[object], *others: object) -> None:
        made.append("group")
        released.wait(30.0)

    monkeypatch.setattr(nccl, "_connect", connect)
    monkeypatch.setattr(nccl, "abort", aborted.extend)
    monkeypatch.setattr(distributed_gpu, "_PATIENCE_SECONDS", 0.1 - SHAPE.timeout)
    here, world = opener
    streams = Streams({})
    monkeypatch.setattr(world, "open_lanes", lambda lanes, timeout: [streams])
    for _ in range(2):
        with pytest.raises(CommunicationError, match=r"rank 0: NCCL has not connected the ranks: not done within 0\.1"):
            here.open(SHAPE)
    assert aborted == ["group"] and not released.is_set()
    here.close()
    assert "close" not in world.asked
    released.set()


def test_what_nccl_says_of_the_cause_is_told(
    opener: tuple[DistributedOnGpus, FakeWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*others: object) -> None:
        raise torch.distributed.DistBackendError(
            "NCCL error in: NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for details)\n"
            "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"
        )

    monkeypatch.setattr(nccl, "_connect", connect)
    here, world = opener
    monkeypatch.setattr(world, "open_lanes", lambda lanes, timeout: [Streams({})])
    with pytest.raises(CommunicationError, match="rank 0: NCCL has not connected the ranks: Duplicate GPU detected"):
        here.open(SHAPE)
    assert nccl.told_by(RuntimeError("first\nsecond")) == "first"


@pytest.mark.parametrize("raises", ("in the collective", "in the group"))
def test_a_rank_that_raises_does_not_wait_for_what_it_has_launched(raises: str) -> None:
    """Its peers, which are elsewhere, are told; what it has launched would wait for them until the deadline."""
    told = launch(gpu_twin.raising, 2, "distributed", args=(raises,), threads=1)
    assert told[0][0] == told[1][0] == "rank 1 has raised an error, with operations under way"
    assert told[1][1] < 10
