"""The distributed collective between GPUs, over NCCL: bits, graphs, a rank that is late and one that dies."""

import functools
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import nccl_ranks
import pytest
from test_failures import wait_for

from tokenweave.comm import launch
from tokenweave.comm.processes import start_ranks

pytestmark = pytest.mark.multigpu


@functools.cache
def results() -> tuple[list[dict[str, Any]], str, float]:
    """What two ranks find, what rank 0 was told when rank 1 was killed, and how soon: in one launch, as starting them
    is what takes time."""
    with tempfile.TemporaryDirectory() as notes:
        target = nccl_ranks.checked_then_waiting
        with start_ranks(target, 2, (notes,), collective="distributed", device="cuda") as ranks:
            found = [ranks.receive(rank, timeout=120.0) for rank in range(2)]
            os.kill(int(wait_for(Path(notes, "victim"))), signal.SIGKILL)
            killed = time.monotonic()
            told = wait_for(Path(notes, "told-0"), 10.0)
            return found, told, time.monotonic() - killed


@pytest.mark.parametrize("number", range(len(nccl_ranks.FUSED)))
def test_fused_is_the_oracles_on_every_rank(number: int) -> None:
    (wrong, bits), (others_wrong, others_bits) = (found["fused"][number] for found in results()[0])
    assert wrong == others_wrong == []
    assert bits == others_bits


@pytest.mark.parametrize("check", ("any_cut", "separate_operations", "gather_and_broadcast"))
def test_is_right(check: str) -> None:
    assert [found[check] for found in results()[0]] == [[], []]


def test_replays_of_two_lanes_with_ranks_late_at_random() -> None:
    for found in results()[0]:
        assert found["collective"] == "distributed"
        assert len(found["replays"]) == 4 and all(found["replays"])


def test_a_killed_rank_is_named_within_two_seconds() -> None:
    _, told, seconds = results()
    assert "rank 1 has died" in told and "all_reduce_add_rms_norm of [5, 64] float32 on lane 1" in told
    assert seconds < 2


def test_a_rank_late_in_a_replay_is_named_on_every_rank() -> None:
    told = launch(nccl_ranks.late, 2, "distributed", device="cuda")
    for rank, (message, seconds, again) in enumerate(told):
        words = "rank 1 did not come to all_reduce_add_rms_norm of [5, 64] float32 on lane 1 within 0.5 s"
        assert words in message, f"rank {rank} of {told}"
        assert again == message
        assert rank == 1 or 0.4 < seconds < 3


def test_ranks_with_other_shapes_are_told() -> None:
    told = launch(nccl_ranks.other_shape, 2, "distributed", device="cuda")
    assert told[0] == told[1]
    assert all(word in told[0] for word in ("all_reduce of [6, 64]", "all_reduce of [5, 64]", "on lane 1")), told[0]
