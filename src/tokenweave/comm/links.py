"""Two-way channels between the caller and the ranks, and between rank 0 and the others: pairs of anonymous pipes."""

import os
import pickle
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any


class Link:
    """One end of a channel for Python objects. Built on file descriptors, which it owns.

    Anonymous pipes only reach processes that were handed their descriptors, so pickle is safe here; on a socket it
    would not be."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._reader = Connection(read_fd, writable=False)
        self._writer = Connection(write_fd, readable=False)

    @staticmethod
    def pair() -> tuple["Link", "Link"]:
        """Both ends of a new channel."""
        here_read, there_write = os.pipe()
        there_read, here_write = os.pipe()
        return Link(here_read, here_write), Link(there_read, there_write)

    @property
    def fds(self) -> tuple[int, int]:
        """Descriptors to read from and to write to."""
        return self._reader.fileno(), self._writer.fileno()

    def fileno(self) -> int:
        """Readable when a message is there, or when the other end has gone."""
        return self._reader.fileno()

    def send(self, value: Any) -> None:
        """Blocks while the pipe is full. BrokenPipeError if the other end has gone."""
        # Not Connection.send: its pickler, once torch has registered with it, hands tensors over through named files.
        self._writer.send_bytes(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))

    def recv(self) -> Any:
        """The next object, in the order sent. EOFError if the other end has gone."""
        return pickle.loads(self._reader.recv_bytes())

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Whether recv would return, or raise, at once; waits up to `timeout` seconds for that, None for ever."""
        return self._reader.poll(timeout)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


@dataclass(frozen=True)
class Links:
    """What a rank can talk to. parent: the caller. peers: on rank 0 every other rank, on the others rank 0."""

    parent: Link
    peers: dict[int, Link] = field(default_factory=dict)
