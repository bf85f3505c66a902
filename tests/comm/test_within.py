"""A deadline for a call that has none."""

import threading
import time

import pytest

from tokenweave.comm.within import within


@pytest.mark.parametrize("seconds", (None, 10.0))
def test_what_comes_of_it(seconds: float | None) -> None:
    assert within(seconds, lambda: None) is None
    assert within(seconds, lambda: [1, 2]) == [1, 2]
    with pytest.raises(ZeroDivisionError):
        within(seconds, lambda: 1 // 0)
    with pytest.raises(KeyboardInterrupt):
        within(seconds, interrupted)


def interrupted() -> None:
    raise KeyboardInterrupt


def test_what_takes_longer_is_left_behind() -> None:
    go, ended = threading.Event(), threading.Event()
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"not done within 0\.05 s"):
        within(0.05, lambda: go.wait(10.0) and ended.set())
    assert 0.04 < time.monotonic() - began < 5
    go.set()
    assert ended.wait(10.0)
