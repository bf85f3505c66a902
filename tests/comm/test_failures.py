"""A rank that dies, comes late or comes with something else: every rank is told, and nothing is left behind."""

import os
import signal
import time
from pathlib import Path

import failing_ranks
import pytest

from tokenweave.comm import launch
from tokenweave.comm.processes import RankError, start_ranks

pytestmark = pytest.mark.started

both = pytest.mark.parametrize("collective", ("shared_memory", "distributed"))


@both
def test_a_late_rank_is_named_on_every_rank(collective: str) -> None:
    told = launch(failing_ranks.late, 3, collective)
    for rank, (message, seconds, again) in enumerate(told):
        assert "rank 1 did not come to all_reduce_add_rms_norm of [5, 64] float32 on lane 1 within 0.5 s" in message
        assert again == message
        assert rank == 1 or seconds < 2
    assert len({message for message, _, _ in told}) == 1


@both
@pytest.mark.parametrize(
    "run, words",
    (
        (failing_ranks.other_shape, ("all_reduce of [6, 64] float32", "all_reduce of [5, 64] float32", "on lane 1")),
        (failing_ranks.other_operation, ("barrier", "broadcast of 12 bytes from rank 0", "on lane 0")),
        (failing_ranks.other_dtype, ("open_collective of [8, 64]", "float16", "bfloat16")),
        (failing_ranks.other_capacity, ("open_collective of [8, 64]", "open_collective of [9, 64]")),
    ),
)
def test_ranks_with_unlike_plans_are_named_on_every_rank(collective, run, words) -> None:
    told = launch(run, 2, collective)
    assert told[0] == told[1]
    assert all(word in told[0] for word in (*words, "rank 0", "rank 1"))


@both
def test_a_killed_rank_is_named_within_two_seconds(collective: str, tmp_path: Path) -> None:
    with start_ranks(failing_ranks.wait_for_the_dead, 3, (str(tmp_path), 30.0), collective=collective) as ranks:
        victim = int(wait_for(tmp_path / "victim"))
        assert victim == ranks.pids[1]
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(RankError, match="rank 1 was killed by SIGKILL") as caught:
            ranks.results()
        assert time.monotonic() - killed < 2
        assert (caught.value.rank, caught.value.exit_code) == (1, -signal.SIGKILL)
        for rank in (0, 2):
            told = (tmp_path / f"told-{rank}").read_text()
            assert "rank 1 has died" in told and "all_reduce of [3, 64] float32 on lane 1" in told
        pids = ranks.pids
    assert not any(alive(pid) for pid in pids)


def wait_for(path: Path, seconds: float = 30.0) -> str:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.01)
    return path.read_text()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
