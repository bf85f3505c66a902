"""How rank 0's steps reach the other ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from tokenweave.comm.collective import CommunicationError
from tokenweave.comm.links import Link, Links


class StepChannel(Protocol):
    """Order of use is the same on all ranks. What travels are bytes of `Step.encode`, so a channel may cross hosts."""

    def least(self, value: int) -> int:
        """The least of the ranks' values, on every rank."""
        ...

    def send(self, message: bytes) -> None:
        """Rank 0: give every other rank the message."""
        ...

    def receive(self) -> bytes | None:
        """Other ranks: the next message, however long that takes, asleep meanwhile; None when rank 0 has ended."""
        ...


class LinkChannel:
    """Over the pipes between rank 0 and the others."""

    def __init__(self, links: Links) -> None:
        self._peers: dict[int, Link] = links.peers

    def least(self, value: int) -> int:
        """Raises CommunicationError if a rank has ended."""
        if 0 in self._peers:
            with _named(0):
                self._peers[0].send(value)
                return self._peers[0].recv()
        for rank, link in self._peers.items():
            with _named(rank):
                value = min(value, link.recv())
        self._tell(value)
        return value

    def send(self, message: bytes) -> None:
        """Raises CommunicationError if a rank has ended."""
        self._tell(message)

    def receive(self) -> bytes | None:
        try:
            return self._peers[0].recv()
        except EOFError:
            return None

    def _tell(self, value: object) -> None:
        for rank, link in self._peers.items():
            with _named(rank):
                link.send(value)


@contextmanager
def _named(rank: int) -> Iterator[None]:
    """Turn the end of a rank's pipe into an error that names the rank."""
    try:
        yield
    except (EOFError, BrokenPipeError):
        raise CommunicationError(f"rank {rank} has ended") from None
