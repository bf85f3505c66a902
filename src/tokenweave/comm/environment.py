"""Groups of ranks that somebody else has started: torchrun, or a program with a torch.distributed world of its own."""

from tokenweave.comm.distributed import Distributed
from tokenweave.comm.group import Group
from tokenweave.comm.ladder import choose
from tokenweave.comm.world import World


def group_from_environment(collective: str = "auto", device: str = "cpu", timeout: float = 60.0) -> Group:
    """The group of all ranks of the torch.distributed world; call it on every rank.

    Joins the world that exists, or the one that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe.
    Raises ValueError if there is neither, or if the collective cannot be used that way.
    """
    rung = choose(collective, device, one_caller=False)
    world = World.of_environment()
    return Group(world.rank, world.size, device=device, collective=rung, timeout=timeout, opener=Distributed(world))
