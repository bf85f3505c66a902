"""Channels over pipes."""

import threading

import pytest
import torch

from tokenweave.comm.links import Link


def test_objects_arrive_in_order_both_ways() -> None:
    near, far = Link.pair()
    assert not near.poll() and not far.poll()
    near.send(1)
    near.send({"two": [3]})
    far.send("four")
    assert far.poll() and near.poll(None)
    assert (far.recv(), far.recv(), near.recv()) == (1, {"two": [3]}, "four")
    assert not far.poll(0.01)


def test_more_than_a_pipe_holds() -> None:
    near, far = Link.pair()
    sent = torch.arange(1_000_000)
    thread = threading.Thread(target=near.send, args=(sent,))
    thread.start()
    assert torch.equal(far.recv(), sent)
    thread.join()


def test_a_closed_end_is_noticed() -> None:
    near, far = Link.pair()
    near.send("last")
    near.close()
    near.close()
    assert far.recv() == "last"
    assert far.poll()
    with pytest.raises(EOFError):
        far.recv()
    with pytest.raises(BrokenPipeError):
        far.send("anybody?")
