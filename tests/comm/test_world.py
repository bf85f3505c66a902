"""Worlds of torch.distributed: what ranks joined by one share with others who use it."""

from world_ranks import two_worlds

from tokenweave.comm import launch


def test_two_collectives_of_worlds_of_the_same_ranks() -> None:
    """The second does not find what the first has put into the store."""
    assert launch(two_worlds, 2, "distributed") == [[[3.0] * 4] * 3] * 2
