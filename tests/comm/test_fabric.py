"""The symmetric collective between GPUs: bits, graphs and a rank that dies, on as many GPUs as there are."""

import functools
import os
import signal
from pathlib import Path
from typing import Any

import fabric_ranks
import pytest
import symmetric_ranks
import torch
from test_failures import wait_for

from tokenweave.comm import launch
from tokenweave.comm.processes import start_ranks

pytestmark = pytest.mark.multigpu


@functools.cache
def results() -> list[dict[str, Any]]:
    """All that the ranks find, in one launch: starting them is what takes time."""
    return launch(fabric_ranks.all_checks, torch.cuda.device_count(), device="cuda")


@pytest.mark.parametrize("hidden", fabric_ranks.HIDDEN)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_fused_is_the_oracles_on_every_rank(dtype: torch.dtype, hidden: int) -> None:
    found = [rank[hidden, dtype] for rank in results()]
    for rank, (wrong, bits) in enumerate(found):
        assert wrong == [], f"rank {rank}"
        assert bits == found[0][1], f"rank {rank} has other bits than rank 0"


def test_2000_replays_of_two_lanes_with_ranks_late_at_random() -> None:
    for same in [rank["replays"] for rank in results()]:
        assert len(same) == 40 and all(same)


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    with start_ranks(symmetric_ranks.wait_for_the_dead, 2, (str(tmp_path),), device="cuda"):
        os.kill(int(wait_for(tmp_path / "victim")), signal.SIGKILL)
        assert "rank 1 has died" in wait_for(tmp_path / "told-0", 10.0)
