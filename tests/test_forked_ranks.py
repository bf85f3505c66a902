"""A forked rank finds what a started one finds, and ends as it does."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from forked_ranks import AS_USERS_DO

from tokenweave.comm import Group, launch, rank_process
from tokenweave.comm.rank_process import RankError


def surroundings(group: Group) -> dict[str, object]:
    with group.open_collective(64, 8) as collective:
        descriptors = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        kinds = sorted(os.readlink(fd).split(":")[0] for fd in descriptors if os.path.lexists(fd))
        collective.barrier()  # of a peer that has ended there is one less
    print("said", file=sys.stderr, flush=True)
    return {
        "environment": dict(os.environ), "directory": os.getcwd(), "path": sys.path, "threads": torch.get_num_threads(),
        "session": os.getsid(0) == os.getpgid(0) == os.getpid(), "descriptors": kinds,
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "cores": os.sched_getaffinity(0), "command": sys.argv[0].endswith(("worker.py", "worker")),
    }  # fmt: skip


def test_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "7")
    monkeypatch.delenv("HOME", raising=False)
    forked = launch(surroundings, 2, threads=1)
    monkeypatch.setattr(rank_process, "start", AS_USERS_DO)
    assert launch(surroundings, 2, threads=1) == forked
    assert forked[0]["environment"]["LOCAL_WORLD_SIZE"] == "7" and forked[0]["session"]
    assert capfd.readouterr().err.count("said") == 4  # two ranks write at once


def end(group: Group, how: str) -> None:
    if group.rank == 1:
        print("a complaint", file=sys.stderr, flush=True)
        os._exit(3) if how == "exit" else os.kill(os.getpid(), signal.SIGSEGV) if how == "crash" else sys.exit(4)


@pytest.mark.parametrize(("how", "code"), [("exit", 3), ("crash", -signal.SIGSEGV), ("sys.exit", 4)])
def test_ends(how: str, code: int) -> None:
    with pytest.raises(RankError, match="a complaint") as caught:
        launch(end, 2, args=(how,))
    assert (caught.value.rank, caught.value.exit_code) == (1, code)
