"""Byte streams between ranks: a TCP connection to every peer for each lane, without a thread of their own.

Why not gloo's: the thread that serves its sockets, woken on a rank's only core, preempts the thread that is sending,
finds the lock taken and spins until its time slice ends: 3 ms for a message that takes 0.6. Then a woven prefill was no
faster than one that is not.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Collection
from contextlib import suppress
from datetime import timedelta
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the caller's process starts a second faster without torch
    from torch.distributed import Store

Address = tuple[socket.AddressFamily, str]
LOOPBACK: Address = (socket.AF_INET, "127.0.0.1")
_HELLO = struct.Struct("!32sII")  # the listener's token, then the rank and lane that connect


class StreamError(Exception):
    """late: the peer did not come in time, else its connection has ended."""

    def __init__(self, peer: int, *, late: bool) -> None:
        super().__init__(f"rank {peer} {'is late' if late else 'has gone'}")
        self.peer, self.late = peer, late


class Streams:
    """One lane's connections, by peer. One thread at a time may use it.

    Bytes arrive in the order in which they were posted. What is posted goes out when the system takes it, at the latest
    while this rank waits in `receive` or `flush`, so ranks that send each other more than a socket holds do not block.
    """

    def __init__(self, connections: dict[int, socket.socket]) -> None:
        self._connections = connections
        self._peers = {connection.fileno(): peer for peer, connection in connections.items()}
        self._outgoing: dict[int, list[memoryview]] = {peer: [] for peer in connections}
        for connection in connections.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # a host that loses its power says nothing: noticed after two minutes by those who wait without a deadline
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6)):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
            connection.setblocking(False)

    def post(self, peer: int, *parts: memoryview) -> None:
        """Send bytes, which must stay as they are until `flush` has returned."""
        self._outgoing[peer].extend(part for part in parts if part.nbytes)
        self._push(peer)

    def receive(self, wanted: dict[int, memoryview], deadline: float) -> None:
        """Fill each peer's memory. deadline: of time.monotonic(), infinity for none. Raises StreamError."""
        left = {peer: memory for peer, memory in wanted.items() if memory.nbytes}
        while left:
            for peer in self._ready(left, deadline):
                if count := self._pull(peer, left[peer]):
                    left[peer] = left[peer][count:]
                    if not left[peer].nbytes:
                        del left[peer]

    def ready(self, peers: Collection[int], seconds: float) -> list[int]:
        """Those of the peers, of whom there is at least one, that have sent something or have gone; waits so long for
        the first. Raises StreamError."""
        try:
            return self._ready(peers, time.monotonic() + seconds)
        except StreamError as error:
            if error.late:
                return []
            raise

    def flush(self, deadline: float) -> None:
        """Wait until the system has taken all that was posted. Raises StreamError."""
        while any(self._outgoing.values()):
            self._ready((), deadline)

    def forget(self, peer: int) -> None:
        """Drop what is posted and has not gone out: nothing goes to a peer that has gone, and to try in vain wakes
        every wait at once."""
        self._outgoing[peer].clear()

    def close(self) -> None:
        """Peers that wait for this rank see the connections end."""
        for connection in self._connections.values():
            with suppress(OSError):  # the peer has gone already
                connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in poll, which close would not
            connection.close()

    def _ready(self, wanted: Collection[int], deadline: float) -> list[int]:
        """Wait until something moves, send what can be sent; those of `wanted` that have bytes or have ended."""
        poll = select.poll()
        for peer, connection in self._connections.items():
            events = (select.POLLIN if peer in wanted else 0) | (select.POLLOUT if self._outgoing[peer] else 0)
            if events:
                poll.register(connection, events)
        found = poll.poll(None if deadline == inf else max(0.0, 1000 * (deadline - time.monotonic())))
        if not found:
            awaited = [*wanted, *(peer for peer, parts in self._outgoing.items() if parts)]
            raise StreamError(awaited[0], late=True)
        for fd, events in found:
            if events & ~select.POLLIN and self._outgoing[self._peers[fd]]:
                self._push(self._peers[fd])
        return [self._peers[fd] for fd, events in found if events & ~select.POLLOUT and self._peers[fd] in wanted]

    def _push(self, peer: int) -> None:
        parts = self._outgoing[peer]
        try:
            sent = self._connections[peer].sendmsg(parts) if parts else 0
        except BlockingIOError:
            return
        except OSError:
            raise StreamError(peer, late=False) from None
        while parts and sent >= parts[0].nbytes:
            sent -= parts.pop(0).nbytes
        if sent:
            parts[0] = parts[0][sent:]

    def _pull(self, peer: int, memory: memoryview) -> int:
        try:
            count = self._connections[peer].recv_into(memory)
        except BlockingIOError:
            return 0
        except OSError:
            count = 0
        if not count:
            raise StreamError(peer, late=False)
        return count


def connect(
    store: Store, key: str, rank: int, size: int, *, lanes: int, timeout: float, address: Address | None = None
) -> list[Streams]:
    """Streams of every lane, between all ranks; all call it with the same key, which is used once.

    address: to listen on, own_address() by default. Only who brings the token that the listener has put into the store
    is taken in. Raises StreamError.
    """
    deadline = time.monotonic() + timeout
    family, host = address or own_address()
    token = secrets.token_hex(16).encode()
    connections: list[dict[int, socket.socket]] = [{} for _ in range(lanes)]
    try:
        with socket.create_server((host, 0), family=family, backlog=lanes * size) as listener:
            store.set(f"{key}/{rank}", json.dumps([*listener.getsockname()[:2], token.decode()]))
            for peer in range(rank):
                there, port, word = json.loads(_told(store, f"{key}/{peer}", peer, deadline))
                for lane in range(lanes):
                    hello = _HELLO.pack(word.encode(), rank, lane)
                    connections[lane][peer] = _call(peer, (there, port), hello, deadline)
            while missing := [p for p in range(rank + 1, size) if any(p not in lane for lane in connections)]:
                _answer(listener, token, connections, missing, deadline)
    except BaseException:
        for connection in (c for lane in connections for c in lane.values()):
            connection.close()
        raise
    return [Streams(lane) for lane in connections]


def own_address() -> Address:
    """Where the other ranks reach this one: on the interface that GLOO_SOCKET_IFNAME names, else on the one that leads
    to MASTER_ADDR, else at what this host's own name means."""
    if name := os.environ.get("GLOO_SOCKET_IFNAME"):
        try:
            return socket.AF_INET, _interface_address(name.split(",")[0])
        except OSError as error:
            raise ValueError(f"GLOO_SOCKET_IFNAME is {name!r}, which has no address here: {error.strerror}") from None
    target = os.environ.get("MASTER_ADDR") or socket.gethostname()
    family, _, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return family, probe.getsockname()[0]


def own_interface() -> str | None:
    """Name of the network interface that has `own_address()`; None if none has, or not as its first address."""
    _, host = own_address()
    for _, name in socket.if_nameindex():
        with suppress(OSError):
            if _interface_address(name) == host:
                return name
    return None


def _interface_address(name: str) -> str:
    """Its first IPv4 address. Raises OSError if it has none."""
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe, 0x8915, request)[20:24])  # SIOCGIFADDR


def _told(store: Store, key: str, peer: int, deadline: float) -> bytes:
    """What a peer puts into the store, which alone would be waited for as long as the store itself waits."""
    try:
        store.wait([key], timedelta(seconds=max(0.001, deadline - time.monotonic())))
        return store.get(key)
    except RuntimeError as error:  # not in time, or the store has gone with its host
        raise StreamError(peer, late=True) from error


def _call(peer: int, address: tuple[str, int], hello: bytes, deadline: float) -> socket.socket:
    try:
        connection = socket.create_connection(address, timeout=max(0.001, deadline - time.monotonic()))
        connection.sendall(hello)
    except OSError as error:
        raise StreamError(peer, late=isinstance(error, TimeoutError)) from error
    return connection


def _answer(
    listener: socket.socket,
    token: bytes,
    connections: list[dict[int, socket.socket]],
    missing: list[int],
    deadline: float,
) -> None:
    """Take in one connection; one that does not know the token is dropped, and does not move the deadline."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise StreamError(missing[0], late=True)
    try:
        listener.settimeout(left)
        connection, _ = listener.accept()
    except TimeoutError:
        raise StreamError(missing[0], late=True) from None
    connection.settimeout(max(0.001, min(5.0, deadline - time.monotonic())))
    with suppress(OSError):
        hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
        if len(hello) == _HELLO.size:
            word, peer, lane = _HELLO.unpack(hello)
            if hmac.compare_digest(word, token) and peer in missing and lane < len(connections):
                connections[lane][peer] = connection
                return
    connection.close()
