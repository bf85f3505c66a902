"""A rank's membership in torch.distributed: joining, streams for each lane, and who says why it has ended."""

import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from tokenweave.comm.collective import CommunicationError
from tokenweave.comm.streams import LOOPBACK, Address, StreamError, Streams, connect, own_interface
from tokenweave.comm.within import within

_OPENING_SECONDS = 120.0  # what opening may take beyond the deadline, as ranks may be compiling the kernels
_ECHO_SECONDS = 0.5  # how long to look for another rank's account of a failure
# What the store may take then: where its host says nothing, a TCPStore waits in `check` beyond its own timeout.
_STORE_SECONDS = 1.0


class World:
    """Joined when the first collective is opened; alone (size 1) there is nothing to join."""

    def __init__(self, rank: int, size: int, join: Callable[[timedelta], None], address: Address | None = None) -> None:
        self.rank, self.size = rank, size
        self._join, self._address = join, address
        self._opened = 0  # collectives, on every rank in the same order
        self._joined_here = False
        self._meeting: dist.ProcessGroup | None = None
        self._store_is_silent = False
        self.ended: str | None = None  # why, once an operation has failed

    @staticmethod
    def of_one_host(store_fd: int, rank: int, size: int) -> "World":
        """Of ranks started by one caller: they meet through the memory file it handed down, and talk over loopback."""

        def join(timeout: timedelta) -> None:
            # whatever the caller has set for ranks on other hosts
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
            store = dist.FileStore(f"/proc/self/fd/{store_fd}", size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)

        return World(rank, size, join, LOOPBACK)

    @staticmethod
    def of_environment() -> "World":
        """Of ranks started by torchrun or the like: the world that exists, or that RANK, WORLD_SIZE, MASTER_ADDR and
        MASTER_PORT describe. Raises ValueError if they are not set."""
        if dist.is_initialized():
            return World(dist.get_rank(), dist.get_world_size(), lambda timeout: None)
        missing = [n for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
        if missing:
            raise ValueError(f"no torch.distributed world to join: {', '.join(missing)} not set; start with torchrun")
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

        def join(timeout: timedelta) -> None:
            # gloo would take the address of the host's own name, which on some is one that no other host can reach
            if name := own_interface():
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
                os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # else all that begin so
            dist.init_process_group("gloo", timeout=timeout)

        return World(rank, size, join)

    @property
    def group(self) -> dist.ProcessGroup:
        """Of all ranks, on gloo; there once they have met."""
        assert self._meeting is not None
        return self._meeting

    def meet(self, timeout: float) -> None:
        """Wait until every rank has come here, joining the world first. Ranks may be compiling kernels meanwhile."""
        if self.size == 1:
            return
        patience = timedelta(seconds=timeout + _OPENING_SECONDS)
        if not dist.is_initialized():
            self._join(patience)
            self._joined_here = True
        if self._meeting is None:
            self._meeting = dist.new_group(backend="gloo", timeout=patience)
        try:
            dist.monitored_barrier(self._meeting, timeout=patience)
        except RuntimeError as error:
            reason, *_ = str(error).splitlines()
            raise CommunicationError(f"rank {self.rank}: not all ranks came to open a collective: {reason}") from error

    def exchange(self, key: str, text: str) -> list[str]:
        """Every rank's text, in rank order. The key is used once."""
        if self.size == 1:
            return [text]
        store = dist.distributed_c10d._get_default_store()
        store.set(self._key(f"{key}/{self.rank}"), text)
        return [store.get(self._key(f"{key}/{rank}")).decode() for rank in range(self.size)]

    def agree(self, key: str, what: str, mine: str) -> None:
        """Every rank comes to `what` with the same text. The key is used once. Raises CommunicationError."""
        for rank, theirs in enumerate(self.exchange(key, mine)):
            if theirs != mine:
                raise CommunicationError(
                    f"rank {rank} came to {what} with {theirs} where rank {self.rank} came with {mine}"
                )

    def open_lanes(self, lanes: int, timeout: float) -> list[Streams]:
        """Streams for each lane: no two lanes share one. Raises CommunicationError if a rank cannot be reached."""
        if self.size == 1:
            return [Streams({}) for _ in range(lanes)]
        self.meet(timeout)
        self._opened += 1
        key = self._key(f"streams/{self._opened}")
        store = dist.distributed_c10d._get_default_store()
        try:
            return connect(store, key, self.rank, self.size, lanes=lanes, timeout=timeout, address=self._address)
        except StreamError as error:
            raise CommunicationError(
                f"rank {self.rank} could not connect to rank {error.peer}; if they are on different hosts, set "
                "GLOO_SOCKET_IFNAME to the network interface between them"
            ) from error

    def end(self, account: str, *, wait: bool) -> str:
        """Put down why the group has ended, unless another rank has; returns the first account, which all ranks raise.

        wait: this rank has seen only that a peer is gone, which another rank may be about to explain."""
        first = self._told_by_store(lambda store: self._first_account(store, account, wait))
        self.ended = first or self.ended or account
        return self.ended

    def look(self) -> None:
        """Take in why the group has ended, if another rank has put that down."""

        def account(store: dist.Store) -> str | None:
            failure = self._key("failure")
            return store.get(failure).decode() if store.check([failure]) else None

        if self.ended is None:
            found = self._told_by_store(account)
            self.ended = self.ended or found  # an operation may have failed meanwhile

    def _first_account(self, store: dist.Store, account: str, wait: bool) -> str:
        deadline = time.monotonic() + (_ECHO_SECONDS if wait else 0.0)
        failure = self._key("failure")
        while not store.check([failure]) and time.monotonic() < deadline:
            time.sleep(0.02)
        return store.compare_set(failure, "", account).decode()

    def _told_by_store(self, question: Callable[[dist.Store], str | None]) -> str | None:
        """None also where the store has gone with its host."""
        if self._store_is_silent:
            return None
        store = dist.distributed_c10d._get_default_store()
        try:
            return within(_ECHO_SECONDS + _STORE_SECONDS, lambda: question(store))
        except TimeoutError:
            self._store_is_silent = True
        except RuntimeError:  # nobody listens
            pass
        return None

    def _key(self, name: str) -> str:
        """In the store, which other worlds of these ranks may have used or be using."""
        return f"tokenweave/{self.group.group_name}/{name}"

    def close(self) -> None:
        if self._joined_here and dist.is_initialized():
            dist.destroy_process_group()
        self._joined_here, self._meeting = False, None
