"""Groups of ranks that were started by others."""

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tokenweave.comm import group_from_environment
from tokenweave.comm.environment import _on_this_host, group_of
from tokenweave.comm.world import World

RANK = """
    import sys
    import torch, torch.distributed as dist
    from tokenweave.comm import group_from_environment

    if len(sys.argv) > 1:
        store = dist.FileStore(sys.argv[1], 2)
        dist.init_process_group("gloo", store=store, rank=int(sys.argv[2]), world_size=2)
    with group_from_environment() as group:
        with group.open_collective(33, 5) as collective:
            x = collective.all_reduce(torch.full((5, 33), group.rank + 1.0))
            assert (x == 3).all()
        print(group.rank, group.size, group.collective, group.rows(5))
    assert dist.is_initialized() == (len(sys.argv) > 1)  # a world that was there stays
"""
WANTED = ["0 2 distributed slice(0, 2, None)\n", "1 2 distributed slice(2, 5, None)\n"]


def run(arguments: list[list[str]], environments: list[dict[str, str]]) -> list[str]:
    base = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(RANK), *words],
            env={**base, **extra},
            stdout=subprocess.PIPE,
            text=True,
        )
        for words, extra in zip(arguments, environments, strict=True)
    ]
    try:
        return [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def test_a_world_that_exists_is_joined(tmp_path: Path) -> None:
    assert run([[str(tmp_path / "store"), str(rank)] for rank in range(2)], [{}, {}]) == WANTED


def test_a_world_that_the_environment_describes_is_made() -> None:
    """As under torchrun, whose agent keeps the store."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    about = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    assert run([[], []], [{**about, "RANK": str(rank)} for rank in range(2)]) == WANTED
    del store


def test_without_either_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"):
        group_from_environment()
    with pytest.raises(ValueError, match="cannot be used here"):
        group_from_environment("shared_memory")


@pytest.mark.parametrize(("local", "hosts"), [(None, 1), ("1", 5), ("2", 3), ("5", 1)])
def test_hosts_are_those_of_torchrun(local: str | None, hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert group_of(World(1, 5, lambda timeout: None), "distributed", "cpu", 1.0).hosts == hosts


@pytest.mark.parametrize(
    "gpus, local, expected",
    [
        (8, {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}, (3, 8)),  # torchrun, on the second of two hosts
        (1, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, (0, 1)),
        (1, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (1, 2)),  # is then refused: a GPU for two
        (1, {}, (0, 1)),  # a host with one GPU, or one of several that each rank was given
        (1, {"LOCAL_RANK": "3"}, (0, 1)),
        (16, {}, (11, 16)),
        (0, {}, (11, 16)),  # is then refused
    ],
)
def test_which_of_the_hosts_ranks_this_is(
    gpus: int, local: dict[str, str], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in local.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert _on_this_host(World(11, 16, lambda timeout: None)) == expected


def test_ranks_of_several_hosts_must_be_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(ValueError, match="16 ranks and 8 GPUs here; set LOCAL_RANK and LOCAL_WORLD_SIZE"):
        _on_this_host(World(11, 16, lambda timeout: None))
