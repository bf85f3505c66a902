"""Worlds of torch.distributed: what ranks joined by one share with others who use it."""

import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from world_ranks import two_worlds

from tokenweave.comm import launch, world


def test_two_collectives_of_worlds_of_the_same_ranks() -> None:
    """The second does not find what the first has put into the store."""
    assert launch(two_worlds, 2, "distributed") == [[[3.0] * 4] * 3] * 2


@pytest.fixture
def world_of_a_store(monkeypatch: pytest.MonkeyPatch) -> world.World:
    found = world.World(1, 2, lambda timeout: None)
    found._meeting = SimpleNamespace(group_name="here")  # type: ignore[assignment]
    monkeypatch.setattr(world, "_ECHO_SECONDS", 0.05)
    monkeypatch.setattr(world, "_STORE_SECONDS", 0.1)
    return found


class Silent:
    """A store whose host has lost its power."""

    def __init__(self) -> None:
        self.asked, self.end = 0, threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        return self.end.wait(30.0)


def test_a_store_that_does_not_answer_holds_nobody(
    world_of_a_store: world.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Silent()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    world_of_a_store.look()
    assert world_of_a_store.ended is None
    assert [world_of_a_store.end(account, wait=wait) for account, wait in (("why", False), ("echo", True))] == [
        "why"
    ] * 2
    assert world_of_a_store.ended == "why" and store.asked == 1 and not store.end.is_set()
    store.end.set()


def test_a_look_takes_nothing_back(world_of_a_store: world.World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation fails on the other thread while the store says that there is no account."""

    class Store:
        def check(self, keys: list[str]) -> bool:
            world_of_a_store.ended = "found meanwhile"
            return False

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", Store)
    world_of_a_store.look()
    assert world_of_a_store.ended == "found meanwhile"


def test_the_first_account_is_everybodys(world_of_a_store: world.World, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    world_of_a_store.look()
    assert world_of_a_store.ended is None
    store.set("tokenweave/here/failure", "theirs")
    assert world_of_a_store.end("mine", wait=True) == "theirs" == world_of_a_store.ended
    world_of_a_store.ended = None
    world_of_a_store.look()
    assert world_of_a_store.ended == "theirs"
