"""The GPUs of a host: which one a rank computes on, and how ranks on them can reach each other."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tokenweave.comm.ladder import Rung

_NO_GPU = "there is no GPU that torch can use"
_SHARED = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def claim(rank: int, size: int, collective: str) -> torch.device:
    """This rank's GPU, made the current one. Where ranks outnumber the GPUs of the host they share them, in turns: good
    for tests alone, which rank 0 says on stderr.

    rank, size: of the ranks on this host. Raises ValueError if there is no GPU that torch can use, or too few for the
    collective.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise ValueError("device 'cuda' needs a GPU that torch can use; there is none")
    if size > count and collective == "distributed":
        raise ValueError(
            f"collective 'distributed' needs a GPU for each rank, as NCCL does, and {size} ranks have {count}; "
            "where one caller starts them, 'symmetric' lets them take turns"
        )
    if size > count:
        os.environ.update(_SHARED)
        if rank == 0:
            print(
                f"tokenweave: {size} ranks share {count} GPU{'s' * (count > 1)} and take turns on it: right, but slow",
                file=sys.stderr,
            )
    device = torch.device("cuda", rank % count)
    torch.cuda.set_device(device)  # first: asking about peers opens the current one
    return device


def gpu_rung(collective: str, rank: int, size: int) -> str:
    """Which rung "auto" means for ranks on the GPUs of this host, or the collective asked for. All ranks come to the
    same answer; rank 0 says on stderr if it is not the highest.

    Raises ValueError for one that cannot be used.
    """
    count = torch.cuda.device_count()
    obstacle = _unreached(_peers(size)) if size <= count else None
    if collective == "auto" and obstacle is not None:
        if rank == 0:
            print(f"tokenweave: collective distributed, not symmetric: {obstacle}", file=sys.stderr)
        return "distributed"
    if collective == "symmetric" and obstacle is not None:
        raise ValueError(
            f"collective 'symmetric' cannot be used here: {obstacle}; 'distributed' can, and 'auto' takes it"
        )
    return "symmetric" if collective == "auto" else collective


@dataclass(frozen=True)
class Gpu:
    """What the ladder asks of a GPU. peers: the numbers of the GPUs whose memory it can read and write."""

    host: str
    number: int
    name: str
    capability: tuple[int, int]
    peers: frozenset[int]
    multicast: bool


def gpus_here() -> list[Gpu]:
    """The GPUs of this host that torch can use."""
    peers = _peers(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return [
        Gpu(
            host=os.uname().nodename,
            number=number,
            name=torch.cuda.get_device_name(number),
            capability=torch.cuda.get_device_capability(number),
            peers=reached,
            multicast=_has_multicast(number),
        )
        for number, reached in peers.items()
    ]


def _peers(count: int) -> dict[int, frozenset[int]]:
    """Of the first `count` GPUs each: those of them whose memory it can read and write."""
    return {
        number: frozenset(p for p in range(count) if p != number and torch.cuda.can_device_access_peer(number, p))
        for number in range(count)
    }


def gpu_ladder(gpus: list[Gpu], environment: Mapping[str, str]) -> list[Rung]:
    """The rungs for a rank on each of these GPUs, from the highest down, and what keeps the ranks off each."""
    p2p = _no_p2p(gpus)
    return [
        Rung("symmetric, multicast", p2p or _no_multicast(gpus, environment)),
        Rung("symmetric, p2p", p2p),
        Rung("distributed, NCCL", None if gpus else _NO_GPU),
    ]


def _no_p2p(gpus: list[Gpu]) -> str | None:
    if not gpus:
        return _NO_GPU
    hosts = sorted({gpu.host for gpu in gpus})
    if len(hosts) > 1:
        return f"the ranks are on different hosts: {', '.join(hosts)}"
    return _unreached({gpu.number: gpu.peers for gpu in gpus})


def _unreached(peers: Mapping[int, frozenset[int]]) -> str | None:
    for number, reached in peers.items():
        if missing := sorted(peers.keys() - reached - {number}):
            return f"GPU {number} cannot reach the memory of GPU {missing[0]} (no P2P between them)"
    return None


def _no_multicast(gpus: list[Gpu], environment: Mapping[str, str]) -> str | None:
    if multicast_disabled(environment):
        return "multicast is disabled: TORCH_SYMM_MEM_DISABLE_MULTICAST is set"
    for gpu in gpus:
        if gpu.capability < (9, 0):
            return f"GPU {gpu.number} ({gpu.name}) is older than Hopper"
        if not gpu.multicast:
            return f"GPU {gpu.number} ({gpu.name}) has no multicast: no NVSwitch, or its fabric manager is not running"
    return None if len(gpus) > 1 else "there is nobody to send to: one GPU"


def multicast_disabled(environment: Mapping[str, str]) -> bool:
    return environment.get("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0") not in ("", "0")


def _has_multicast(number: int) -> bool:
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    return bool(_SymmetricMemory.has_multicast_support(DeviceType.CUDA, number))
