"""The pipes between rank 0 and the others, when one end has gone."""

import pytest

from tokenweave.comm.collective import CommunicationError
from tokenweave.comm.links import Link, Links
from tokenweave.engine.channel import LinkChannel


def test_the_least_value_reaches_every_rank() -> None:
    pairs = {rank: Link.pair() for rank in (1, 2)}
    parent, _ = Link.pair()
    for rank, value in ((1, 7), (2, 3)):
        pairs[rank][1].send(value)
    assert LinkChannel(Links(parent, {rank: here for rank, (here, _) in pairs.items()})).least(5) == 3
    assert [pairs[rank][1].recv() for rank in (1, 2)] == [3, 3]


@pytest.mark.parametrize("here, there", [(0, 2), (1, 0)])
def test_a_rank_that_has_gone_is_named(here: int, there: int) -> None:
    """Rank `here` asks after rank `there` has ended."""
    mine, theirs = Link.pair()
    theirs.close()
    channel = LinkChannel(Links(Link.pair()[0], {there: mine}))
    with pytest.raises(CommunicationError, match=f"rank {there} has ended"):
        channel.least(5)
    with pytest.raises(CommunicationError, match=f"rank {there} has ended"):
        channel.send(b"step")
