"""The memory that ranks share: what it takes, and that it is given back."""

import gc
import os

import pytest
import torch

from tokenweave.comm.control import ARENA_BYTES, CONTROL_BYTES, Control
from tokenweave.comm.linux import memfd
from tokenweave.comm.segment import STAGING_BYTES
from tokenweave.comm.shape import CollectiveShape
from tokenweave.comm.shared_memory import SharedMemory


def used(arena: int) -> int:
    return os.fstat(arena).st_blocks * 512


def test_memory_is_what_the_buffers_take_and_is_given_back() -> None:
    arena = memfd("test", ARENA_BYTES)
    space = SharedMemory(Control(arena), 0, 1)
    shape = CollectiveShape(hidden_size=1024, max_tokens=512, dtype=torch.float32, lanes=2, timeout=5.0)
    buffers = 2 * 512 * 1024 * 4
    for _ in range(3):
        with space.open(shape) as collective:
            assert used(arena) <= 3 * CONTROL_BYTES
            for lane in range(2):
                collective.buffer(lane, 512).fill_(1.0)
                collective.all_reduce(torch.ones(512, 1024), lane=lane)
            assert buffers <= used(arena) <= buffers + 3 * CONTROL_BYTES + 2 * STAGING_BYTES
            kept = collective.buffer(1, 2)
        del collective
        gc.collect()
        assert (kept == 1).all()  # memory stays as long as a tensor shows it
        del kept
        gc.collect()
        assert used(arena) <= 3 * CONTROL_BYTES
    os.close(arena)


def test_segments_do_not_overlap() -> None:
    arena = memfd("test", ARENA_BYTES)
    space = SharedMemory(Control(arena), 0, 1)
    opened = []
    for hidden, tokens in ((1, 1), (577, 33), (64, 7)):
        shape = CollectiveShape(hidden_size=hidden, max_tokens=tokens, dtype=torch.bfloat16, lanes=2, timeout=5.0)
        opened.append(space.open(shape))
    for number, collective in enumerate(opened):
        for lane in range(2):
            collective.buffer(lane, collective.shape.max_tokens).fill_(2 * number + lane)
    for number, collective in enumerate(opened):
        for lane in range(2):
            assert (collective.buffer(lane, collective.shape.max_tokens) == 2 * number + lane).all()
    os.close(arena)


def test_buffers_beyond_the_memory_file_are_refused() -> None:
    arena = memfd("test", ARENA_BYTES)
    shape = CollectiveShape(hidden_size=577, max_tokens=10**10, dtype=torch.bfloat16, lanes=2, timeout=5.0)
    with pytest.raises(ValueError, match="2 buffers of 10000000000 x 577 take 23080 GB, of at most 17592"):
        SharedMemory(Control(arena), 0, 1).open(shape)
    os.close(arena)
