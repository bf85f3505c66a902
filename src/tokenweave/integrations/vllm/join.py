"""The ranks of vLLM's tensor-parallel group as a group of this project's: workers that vLLM has started.

Workers of one host share memory as ranks of `tokenweave.comm.launch` do: an anonymous memory file. There it is handed
down when they start; here rank 0 makes it and the others open it through /proc, which the system grants to processes of
the same user in the same namespace. Nothing has a name and nothing listens.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import GroupCoordinator

from tokenweave.comm.control import ARENA_BYTES, Control
from tokenweave.comm.environment import group_from_environment
from tokenweave.comm.group import Group, Opener
from tokenweave.comm.linux import memfd
from tokenweave.comm.shared_memory import SharedMemory
from tokenweave.comm.watch import watch
from tokenweave.comm.world import World

_WORD_BYTES = 128


@dataclass(frozen=True)
class Joined:
    """group; hosts: how many its ranks are on; how: its collective, and why not a quicker one, in words."""

    group: Group
    hosts: int
    how: str


def join(ranks: GroupCoordinator, device: str, timeout: float) -> Joined:
    """All ranks call it together. timeout: seconds that any wait inside a collective may take.

    Raises ValueError, on all ranks alike, where there is no collective for them.
    """
    places = _gathered(ranks, _place())
    hosts = len({place.split(b"|")[0] for place in places})
    control = _shared_control(ranks) if len(set(places)) == 1 else None
    rank, size = ranks.rank_in_group, ranks.world_size
    if device == "cpu" and control is not None:
        opener: Opener = SharedMemory(control, rank, size)
        group = Group(rank, size, device=device, collective="shared_memory", timeout=timeout, opener=opener)
        return Joined(group, hosts, "shared_memory")
    apart = (
        "the ranks are in different namespaces or on different hosts"
        if len(set(places)) > 1
        else "this system does not let the ranks open each other's files in /proc"
    )
    if device == "cuda" and control is None:
        raise ValueError(f"GPUs need memory that all ranks map: {apart}")
    if dist.get_world_size() != size or dist.get_rank() != rank:
        raise ValueError(
            f"the tensor-parallel group must be the whole torch.distributed world: {size} ranks of "
            f"{dist.get_world_size()}"
        )
    if device == "cpu":
        return Joined(group_from_environment(device=device, timeout=timeout), hosts, f"distributed ({apart})")
    from tokenweave.comm.symmetric import Symmetric

    assert control is not None
    place = torch.device("cuda", torch.cuda.current_device())
    opener = Symmetric(control, World.of_environment(), place)
    group = Group(rank, size, device=str(place), collective="symmetric", timeout=timeout, opener=opener)
    return Joined(group, hosts, "symmetric")


def _place() -> bytes:
    """Equal for processes that can open each other's files in /proc: host, user, process and network namespace. The
    last is not needed for that, but ranks put into different networks are meant to talk over them."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    namespaces = "|".join(str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in ("pid", "net"))
    return f"{boot}|{namespaces}|{os.getuid()}".encode()


def _shared_control(ranks: GroupCoordinator) -> Control | None:
    """The control page in a memory file of rank 0's; None, on all ranks, if one of them could not open it."""
    first = ranks.rank_in_group == 0
    fd = memfd("tokenweave", ARENA_BYTES) if first else -1
    said = [tuple(map(int, word.split())) for word in _gathered(ranks, f"{os.getpid()} {fd}".encode())]
    pids, (first_pid, its_fd) = [pid for pid, _ in said], said[0]
    if not first:
        with suppress(OSError):
            fd = os.open(f"/proc/{first_pid}/fd/{its_fd}", os.O_RDWR | os.O_CLOEXEC)
    if b"no" in _gathered(ranks, b"yes" if fd >= 0 else b"no"):
        if fd >= 0:
            os.close(fd)
        return None
    control = Control(fd)
    watch(None, {rank: pid for rank, pid in enumerate(pids) if rank != ranks.rank_in_group}, control.mark_dead)
    return control


def _gathered(ranks: GroupCoordinator, word: bytes) -> list[bytes]:
    """Every rank's word, over vLLM's own group of the ranks' processes: bytes, not objects that would be unpickled."""
    assert len(word) <= _WORD_BYTES
    mine = torch.from_numpy(np.frombuffer(word.ljust(_WORD_BYTES, b"\0"), dtype=np.uint8).copy())
    theirs = [torch.empty_like(mine) for _ in range(ranks.world_size)]
    dist.all_gather(theirs, mine, group=ranks.cpu_group)
    return [tensor.numpy().tobytes().rstrip(b"\0") for tensor in theirs]


def broadcast(ranks: GroupCoordinator, text: str) -> str:
    """Rank 0's text, on every rank."""
    data = torch.from_numpy(np.frombuffer(text.encode(), dtype=np.uint8).copy())
    count = torch.tensor([data.numel()])
    dist.broadcast(count, ranks.ranks[0], group=ranks.cpu_group)
    if ranks.rank_in_group != 0:
        data = torch.empty(int(count), dtype=torch.uint8)
    dist.broadcast(data, ranks.ranks[0], group=ranks.cpu_group)
    return data.numpy().tobytes().decode()
