"""How rank 0's steps reach the other ranks."""

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
        if 0 in self._peers:
            self._peers[0].send(value)
            return self._peers[0].recv()
        for link in self._peers.values():
            value = min(value, link.recv())
        for link in self._peers.values():
            link.send(value)
        return value

    def send(self, message: bytes) -> None:
        for rank, link in self._peers.items():
            try:
                link.send(message)
            except BrokenPipeError:
                raise CommunicationError(f"rank {rank} has ended: the next step cannot reach it") from None

    def receive(self) -> bytes | None:
        try:
            return self._peers[0].recv()
        except EOFError:
            return None
