"""The collective of GPUs against plain torch and float64: several ranks on the GPU there is, in turns if need be."""

import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import symmetric_ranks
from test_failures import wait_for

from tokenweave.comm import launch
from tokenweave.comm.processes import start_ranks

pytestmark = pytest.mark.gpu
CHECKS = (
    "fused", "any_cut", "not_finite", "layers", "separate_operations", "gather_and_broadcast", "refused", "replayed",
    "poisoned",
)  # fmt: skip


@functools.cache
def results(size: int) -> list[dict[str, Any]]:
    return launch(symmetric_ranks.all_checks, size, device="cuda")


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("size", (1, 2, 4))
def test_is_right(size: int, check: str) -> None:
    for rank, found in enumerate(results(size)):
        assert found[check] == [], f"rank {rank}"


def test_two_thousand_replays() -> None:
    assert launch(symmetric_ranks.replayed, 2, device="cuda", args=(2000,)) == [[], []]


def test_a_late_rank_is_named_within_the_deadline() -> None:
    told = launch(symmetric_ranks.late, 3, device="cuda")
    for rank, (message, seconds) in enumerate(told):
        assert "rank 1 did not come to all_reduce_add_rms_norm of [5, 64] float32 on lane 1 within 0.5 s" in message
        assert rank == 1 or 0.4 < seconds < 3


def test_ranks_with_other_shapes_are_told() -> None:
    for message in launch(symmetric_ranks.other_shape, 2, device="cuda"):
        assert all(word in message for word in ("all_reduce of [6, 64]", "all_reduce of [5, 64]", "on lane 1")), message


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    with start_ranks(symmetric_ranks.wait_for_the_dead, 2, (str(tmp_path),), device="cuda"):
        os.kill(int(wait_for(tmp_path / "victim")), signal.SIGKILL)
        killed = time.monotonic()
        told = wait_for(tmp_path / "told-0", 10.0)
        assert time.monotonic() - killed < 3
        assert "rank 1 has died" in told and "all_reduce_add_rms_norm of [5, 64] float32 on lane 1" in told


def test_opening_inside_a_capture_is_refused() -> None:
    assert "before a CUDA graph is captured" in launch(symmetric_ranks.captured, 1, device="cuda")[0]
