"""The caller's side of the ranks, in a process that was forked from the caller."""

import os
from queue import SimpleQueue
from typing import Any

import pytest

from tokenweave.engine.client import EngineClient


class IdleRanks:
    """Takes what it is sent, and has nothing to tell until it is closed."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.sent: list[Any] = []
        self.closed: SimpleQueue[None] = SimpleQueue()

    def send(self, rank: int, value: Any) -> None:
        self.sent.append(value)

    def receive(self, rank: int) -> Any:
        self.closed.get()
        raise EOFError

    def close(self, grace: float) -> None:
        self.closed.put(None)


def in_a_fork(ranks: IdleRanks, client: EngineClient) -> bool:
    """Whether calls are refused there and closing leaves the ranks alone."""
    for call in (client.check, lambda: client.submit([], SimpleQueue())):
        with pytest.raises(RuntimeError, match="forked from; make one here"):
            call()
    client.close()
    return not ranks.sent and ranks.closed.empty()


@pytest.mark.parametrize("held", [False, True])
def test_a_forked_process_neither_uses_nor_ends_the_ranks(held: bool) -> None:
    """held: a thread that the forked process does not have holds the lock."""
    ranks = IdleRanks()
    client = EngineClient(ranks)
    if held:
        client._lock.acquire()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if in_a_fork(ranks, client) else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    if held:
        client._lock.release()
    client.check()
    client.close()
    assert ranks.sent == [None]
