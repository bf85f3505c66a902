"""Byte streams between ranks, here threads of one process over loopback."""

import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import numpy as np
import pytest
import torch.distributed as dist

from tokenweave.comm.streams import LOOPBACK, StreamError, Streams, connect, own_address, own_interface

Run = Callable[[int, list[Streams]], object]


def on_ranks(size: int, run: Run, lanes: int = 1) -> list:
    store = dist.HashStore()

    def rank(number: int) -> object:
        opened = connect(store, "key", number, size, lanes=lanes, timeout=10.0, address=LOOPBACK)
        try:
            return run(number, opened)
        finally:
            for streams in opened:
                streams.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


def soon() -> float:
    return time.monotonic() + 10.0


def pattern(sender: int, receiver: int, lane: int, count: int) -> np.ndarray:
    return np.random.default_rng([sender, receiver, lane, count]).integers(0, 256, count, dtype=np.uint8)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_everything_to_everyone_in_order(size: int) -> None:
    """Messages of every length, empty ones too, on two lanes; 9 MB both ways are more than sockets hold."""
    counts = (1, 0, 3, 577, 9_000_000 // size, 13)

    def run(rank: int, lanes: list[Streams]) -> bool:
        right = True
        for lane, streams in enumerate(lanes):
            peers = [peer for peer in range(size) if peer != rank]
            messages = {peer: [pattern(rank, peer, lane, count) for count in counts] for peer in peers}
            for peer in peers:
                streams.post(peer, *(message.data for message in messages[peer]))
            for count in counts:
                memory = {peer: np.zeros(count, dtype=np.uint8) for peer in peers}
                streams.receive({peer: m.data for peer, m in memory.items()}, soon())
                right &= all((m == pattern(peer, rank, lane, count)).all() for peer, m in memory.items())
            streams.flush(soon())
        return right

    assert on_ranks(size, run, lanes=2) == [True] * size


def test_a_late_peer_is_named() -> None:
    def run(rank: int, lanes: list[Streams]) -> object:
        if rank == 2:
            time.sleep(0.6)
            return None
        with pytest.raises(StreamError) as caught:
            if rank == 0:
                lanes[0].receive({2: memoryview(bytearray(1))}, time.monotonic() + 0.2)
            else:
                lanes[0].post(2, memoryview(bytearray(64 << 20)))  # a socket does not hold that much
                lanes[0].flush(time.monotonic() + 0.2)
        return caught.value.peer, caught.value.late

    assert on_ranks(3, run) == [(2, True), (2, True), None]


def test_what_was_posted_to_a_peer_that_has_gone_is_forgotten() -> None:
    """After that it is not in the way of the others."""

    def run(rank: int, lanes: list[Streams]) -> object:
        streams = lanes[0]
        if rank == 2:
            return None
        if rank == 1:
            time.sleep(0.5)
            streams.post(0, memoryview(b"here"))
            return None
        with pytest.raises(StreamError) as caught:
            while True:
                streams.post(2, memoryview(b"x"))
                time.sleep(0.05)
        assert (caught.value.peer, caught.value.late) == (2, False)
        streams.forget(2)
        memory = bytearray(4)
        streams.receive({1: memoryview(memory)}, soon())
        streams.flush(soon())
        return bytes(memory)

    assert on_ranks(3, run) == [b"here", None, None]


def test_a_peer_that_has_gone_is_named() -> None:
    def run(rank: int, lanes: list[Streams]) -> object:
        if rank == 1:
            return None
        with pytest.raises(StreamError) as caught:
            lanes[0].receive({1: memoryview(bytearray(1))}, soon())
        with pytest.raises(StreamError):
            while True:  # the first bytes may still be taken by the system
                lanes[0].post(1, memoryview(b"x"))
                time.sleep(0.01)
        return caught.value.peer, caught.value.late

    assert on_ranks(2, run) == [(1, False), None]


def test_a_peer_that_never_says_where_it_is_is_late() -> None:
    store = dist.HashStore()
    began = time.monotonic()
    with pytest.raises(StreamError, match="rank 0 is late"):
        connect(store, "key", 1, 2, lanes=1, timeout=0.3, address=LOOPBACK)
    assert time.monotonic() < began + 10.0


def test_strangers_do_not_move_the_deadline() -> None:
    """They knock at every moment until the rank gives up."""
    store = dist.HashStore()
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(connect, store, "key", 0, 2, lanes=1, timeout=1.0, address=LOOPBACK)
        host, port, _ = json.loads(store.get("key/0"))
        with suppress(OSError):
            while time.monotonic() < began + 20.0:
                with socket.create_connection((host, port), timeout=1.0) as stranger:
                    stranger.sendall(b"?")
        with pytest.raises(StreamError, match="rank 1 is late"):
            waiting.result(timeout=20.0)
    assert time.monotonic() < began + 10.0


def test_who_does_not_know_the_token_stays_outside() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(connect, store, "key", 0, 2, lanes=1, timeout=10.0, address=LOOPBACK)
        host, port, _ = json.loads(store.get("key/0"))
        assert host == "127.0.0.1"
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"0" * 32 + b"\0\0\0\1\0\0\0\0"):
            with socket.create_connection((host, port)) as stranger:
                stranger.sendall(words)
                stranger.shutdown(socket.SHUT_WR)
                stranger.settimeout(5.0)
                try:
                    assert stranger.recv(1) == b""  # refused
                except ConnectionResetError:
                    pass
        second = connect(store, "key", 1, 2, lanes=1, timeout=10.0, address=LOOPBACK)
        with closing(first.result()[0]) as here, closing(second[0]) as there:
            there.post(0, memoryview(b"hello"))
            memory = bytearray(5)
            here.receive({1: memoryview(memory)}, soon())
            assert memory == b"hello"


def test_nobody_comes() -> None:
    with pytest.raises(StreamError, match="rank 1 is late"):
        connect(dist.HashStore(), "key", 0, 2, lanes=1, timeout=0.1, address=LOOPBACK)


def test_where_a_rank_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_address() == LOOPBACK
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(ValueError, match="'none0', which has no address here"):
        own_address()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_address() == LOOPBACK
    assert own_interface() == "lo"
    monkeypatch.setattr("tokenweave.comm.streams.own_address", lambda: (socket.AF_INET, "192.0.2.1"))  # of no interface
    assert own_interface() is None
