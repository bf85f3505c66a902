"""What the ranks of the tests of worlds run."""

import os
import socket
import time

import torch

from tokenweave.comm import Group
from tokenweave.comm.distributed import Distributed
from tokenweave.comm.shape import CollectiveShape
from tokenweave.comm.world import World


def two_worlds(group: Group) -> list[list[float]]:
    """The sums of a collective of the group, of one of a second world of the same ranks, and of the first again."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    shape = CollectiveShape(hidden_size=4, max_tokens=2, dtype=torch.float32, lanes=1, timeout=10.0)
    with group.open_collective(4, 2, torch.float32) as first:
        if group.rank == 0:  # the other asks for its address before it has put down a new one
            listen = socket.create_server
            socket.create_server = lambda *args, **options: time.sleep(0.3) or listen(*args, **options)
        with Distributed(World.of_environment()).open(shape) as second:
            sums = [c.all_reduce(torch.full((2, 4), 1.0 + group.rank)) for c in (first, second, first)]
            return [rows[0].tolist() for rows in sums]
