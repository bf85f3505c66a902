"""What the ranks of the failure tests run: each ends in a CommunicationError, whose text it returns or writes down."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tokenweave.comm import Collective, CommunicationError, Group


def message(run: Callable[[], object]) -> str:
    try:
        run()
    except CommunicationError as error:
        return str(error)
    return "nothing was wrong"


def late(group: Group) -> tuple[str, float, str]:
    """Rank 1 comes half a second late. What each rank was told, after how long, and at its next operation."""
    c = group.open_collective(64, 8, lanes=2, timeout=0.5)
    rows = len(range(5)[group.rows(5)])
    c.barrier(lane=1)
    if group.rank == 1:
        time.sleep(1.0)
    start = time.monotonic()
    told = message(
        lambda: c.all_reduce_add_rms_norm(c.buffer(1, 5), torch.zeros(rows, 64), torch.ones(64), 1e-5, lane=1)
    )
    return told, time.monotonic() - start, message(c.barrier)


def other_shape(group: Group) -> str:
    tokens = 6 if group.rank == 1 else 5
    return message(lambda: opened(group).all_reduce(torch.zeros(tokens, 64), lane=1))


def other_operation(group: Group) -> str:
    def run() -> None:
        c = opened(group)
        if group.rank == 1:
            c.barrier()
        else:
            c.broadcast(torch.zeros(3))

    return message(run)


def other_dtype(group: Group) -> str:
    dtype = torch.float16 if group.rank == 1 else torch.bfloat16
    return message(lambda: group.open_collective(64, 8, dtype, timeout=5.0))


def other_capacity(group: Group) -> str:
    return message(lambda: group.open_collective(64, 8 + group.rank, timeout=5.0))


def opened(group: Group) -> Collective:
    return group.open_collective(64, 8, lanes=2, timeout=5.0)


def wait_for_the_dead(group: Group, links: object, notes: str, collective_seconds: float) -> None:
    """Rank 1 writes its pid down and sleeps; the others wait for it and write down what they are told."""
    c = group.open_collective(64, 8, lanes=2, timeout=collective_seconds)
    c.barrier()
    if group.rank == 1:
        write(notes, "victim", str(os.getpid()))
        time.sleep(60)
    try:
        c.all_reduce(c.buffer(1, 3), lane=1)
    except CommunicationError as error:
        write(notes, f"told-{group.rank}", str(error))
        raise


def write(directory: str, name: str, text: str) -> None:
    """Whole or not at all."""
    hidden = Path(directory, f".{name}")
    hidden.write_text(text)
    hidden.rename(Path(directory, name))
