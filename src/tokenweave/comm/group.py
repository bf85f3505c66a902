"""A group of ranks: what each rank knows of it, and where it opens collectives."""

from types import TracebackType
from typing import Protocol

import torch

from tokenweave.comm.collective import Collective
from tokenweave.comm.shape import CollectiveShape
from tokenweave.config import partition


class Opener(Protocol):
    """One rung of the ladder, on one rank."""

    def open(self, shape: CollectiveShape) -> Collective: ...

    def close(self) -> None: ...


class Group:
    """One rank's membership. Every rank opens the same collectives in the same order. A context manager.

    collective: what open_collective uses: a rung of the ladder, or "emulated". hosts: how many the ranks are on.
    """

    def __init__(
        self, rank: int, size: int, *, device: str, collective: str, timeout: float, opener: Opener, hosts: int = 1
    ) -> None:
        self.rank, self.size, self.collective, self.timeout, self.hosts = rank, size, collective, timeout, hosts
        self.device = torch.device(device)
        self._opener = opener
        self._opened: list[Collective] = []

    def rows(self, n: int) -> slice:
        """Which of n rows this rank owns."""
        return partition(n, self.size, self.rank)

    def open_collective(
        self,
        hidden_size: int,
        max_tokens: int,
        dtype: torch.dtype = torch.float32,
        lanes: int = 1,
        timeout: float | None = None,
    ) -> Collective:
        """Buffers of [max_tokens, hidden_size] per rank and lane, and the operations over them.

        lanes: 1 or 2. timeout: seconds that any wait may take; the group's own by default. Compiles or loads the
        kernels and waits until every rank has done so, which does not count against the timeout.
        Raises ValueError for shapes that cannot be, CommunicationError if the ranks' shapes differ.
        """
        timeout = self.timeout if timeout is None else timeout
        shape = CollectiveShape(
            hidden_size=hidden_size, max_tokens=max_tokens, dtype=dtype, lanes=lanes, timeout=timeout,
            device=self.device.type,
        )  # fmt: skip
        collective = self._opener.open(shape)
        self._opened.append(collective)
        return collective

    def close(self) -> None:
        """Close every collective."""
        self.__exit__(None, None, None)

    def __enter__(self) -> "Group":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for collective in self._opened:
            collective.__exit__(kind, value, trace)
        self._opened.clear()
        self._opener.close()
