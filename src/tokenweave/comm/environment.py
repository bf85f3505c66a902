"""Groups of ranks that somebody else has started: torchrun, or a program with a torch.distributed world of its own."""

import os

import torch

from tokenweave.comm.distributed import Distributed
from tokenweave.comm.group import Group, Opener
from tokenweave.comm.ladder import choose
from tokenweave.comm.world import World


def group_from_environment(collective: str = "auto", device: str = "cpu", timeout: float = 60.0) -> Group:
    """The group of all ranks of the torch.distributed world; call it on every rank.

    Joins the world that exists, or the one that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe.
    device: "cuda" is the GPU whose number is the rank's among those on its host.
    Raises ValueError if there is no world, or if the collective cannot be used that way.
    """
    rung = choose(collective, device, one_caller=False)
    return group_of(World.of_environment(), rung, device, timeout)


def group_of(world: World, rung: str, device: str, timeout: float) -> Group:
    """The group of a world's ranks. rung: "distributed". Raises ValueError if this rank has no GPU of its own."""
    opener: Opener
    hosts = -(-world.size // int(os.environ.get("LOCAL_WORLD_SIZE", world.size)))  # as torchrun tells it
    if device == "cpu":
        opener = Distributed(world)
    else:
        from tokenweave.comm.devices import claim
        from tokenweave.comm.distributed_gpu import DistributedOnGpus

        place = claim(*_on_this_host(world), rung)
        device, opener = str(place), DistributedOnGpus(world, place)
    return Group(world.rank, world.size, device=device, collective=rung, timeout=timeout, opener=opener, hosts=hosts)


def _on_this_host(world: World) -> tuple[int, int]:
    """This rank's number among those of the host and how many these are, as torchrun tells. Without it a rank that sees
    one GPU is alone with it (SLURM gives each its own), and one that sees several has all ranks beside it.

    Raises ValueError where they cannot be all here."""
    if "LOCAL_RANK" in os.environ and "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    count = torch.cuda.device_count()
    if count == 1:
        return 0, 1
    if 1 < count < world.size:
        raise ValueError(
            f"there are {world.size} ranks and {count} GPUs here; set LOCAL_RANK and LOCAL_WORLD_SIZE, as torchrun "
            "does, to tell which ranks are on this host"
        )
    return world.rank, world.size
