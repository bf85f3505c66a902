"""Who is named when an operation on the GPU does not end. Ranks are threads, and what their GPUs write is made up."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
import torch.distributed as dist

from tokenweave.comm.operations import Operation
from tokenweave.comm.streams import LOOPBACK, connect
from tokenweave.comm.vigil import PROGRESS_WORDS, Progress, Vigil

SUM = (Operation.ALL_REDUCE, 5, 64)  # float32
TIMEOUT = 0.4


class Worlds:
    """What ranks share: the first account."""

    def __init__(self) -> None:
        self.first: str | None = None


class Rank:
    """One rank: its world, and what its GPU has written."""

    def __init__(self, rank: int, size: int, shared: Worlds) -> None:
        self.rank, self.size, self.ended, self._shared = rank, size, None, shared
        self.progress = np.zeros((2, PROGRESS_WORDS), dtype=np.int64)
        self.aborted = 0.0
        self.vigil: Vigil | None = None

    def end(self, account: str, *, wait: bool) -> str:
        deadline = time.monotonic() + (0.3 if wait else 0.0)
        while self._shared.first is None and time.monotonic() < deadline:
            time.sleep(0.01)
        self._shared.first = self._shared.first or account
        self.ended = self._shared.first
        return self.ended

    def look(self) -> None:
        self.ended = self.ended or self._shared.first

    def abort(self) -> None:
        assert self.ended is not None
        self.aborted = time.monotonic()

    def begin(self, lane: int, words: tuple[int, int, int] = SUM) -> None:
        self.progress[lane, Progress.CODE : Progress.COLUMNS + 1] = words
        self.progress[lane, Progress.BEGUN] += 1

    def finish(self, lane: int) -> None:
        self.progress[lane, Progress.DONE] = self.progress[lane, Progress.BEGUN]


def on_ranks(
    size: int, run: Callable[[Rank], None], *, keep: float = 3.0, silent: int | None = None
) -> tuple[str | None, list[Rank]]:
    """Run it on every rank, then wait for the end of its group, `keep` seconds at most. The account and the ranks.
    silent: a rank whose thread stands still."""
    store, shared = dist.HashStore(), Worlds()

    def rank(number: int) -> Rank:
        here = Rank(number, size, shared)
        streams = connect(store, "key", number, size, lanes=1, timeout=10.0, address=LOOPBACK)[0]
        if number == silent:
            with closing(streams):
                time.sleep(keep)
            return here
        here.vigil = vigil = Vigil(here, streams, here.progress, TIMEOUT, here.abort)  # type: ignore[arg-type]
        try:
            run(here)
            deadline = time.monotonic() + keep
            while here.ended is None and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            vigil.stop()
        return here

    with ThreadPoolExecutor(size) as pool:
        ranks = list(pool.map(rank, range(size)))
    return shared.first, ranks


@pytest.mark.parametrize("size", (2, 3))
def test_a_rank_that_does_not_come_is_named_on_every_rank(size: int) -> None:
    def run(rank: Rank) -> None:
        rank.begin(0)
        rank.finish(0)
        if rank.rank != 1:
            rank.begin(1)
        else:
            time.sleep(1.0)
            rank.begin(1)  # too late: its peers have ended

    account, ranks = on_ranks(size, run)
    assert account is not None
    assert "rank 1 did not come to all_reduce of [5, 64] float32 on lane 1 within 0.4 s" in account
    assert [rank.ended for rank in ranks] == [account] * size
    assert all(rank.aborted for rank in ranks)


def test_the_rank_that_is_furthest_behind_is_named() -> None:
    """Rank 0 waits for rank 2, which waits for rank 1 in the operation before."""

    def behind(rank: Rank) -> None:
        counts = {0: 3, 1: 1, 2: 2}
        for _ in range(counts[rank.rank]):
            rank.begin(0)
            if rank.rank == 1:
                rank.finish(0)

    account, _ = on_ranks(3, behind, keep=1.2)
    assert account is not None and account.startswith("rank 1 did not come to")


def test_operations_that_end_in_time_are_left_alone() -> None:
    """One after another for longer than the timeout, with pauses: the count moves, or there is nothing to wait for."""

    def run(rank: Rank) -> None:
        for _ in range(12):
            rank.begin(0)
            time.sleep(0.05)
            rank.finish(0)
            rank.begin(0)
        rank.finish(0)
        time.sleep(2 * TIMEOUT)

    account, ranks = on_ranks(2, run, keep=0.0)
    assert account is None
    assert not any(rank.aborted for rank in ranks)


def test_a_peer_that_goes_is_noticed_by_who_waits_for_it() -> None:
    began = time.monotonic()

    def run(rank: Rank) -> None:
        if rank.rank == 1:
            rank.ended = "gone"  # and its connections with it
        else:
            rank.begin(1)

    account, ranks = on_ranks(3, run)
    assert account is not None
    assert account.startswith("rank 1 has died") and "all_reduce of [5, 64] float32 on lane 1" in account
    assert all(rank.aborted < began + 2.0 for rank in ranks)


def test_a_rank_that_waits_for_nothing_is_told_too() -> None:
    """What it sends for and gets from now on would be garbage."""

    def run(rank: Rank) -> None:
        if rank.rank == 0:
            rank.begin(0)

    account, ranks = on_ranks(2, run)
    assert account is not None and ranks[1].ended == account
    assert 0 < ranks[1].aborted < ranks[0].aborted + 0.5


def test_a_peer_that_goes_when_nobody_waits_is_no_failure() -> None:
    def run(rank: Rank) -> None:
        rank.begin(0)
        rank.finish(0)
        time.sleep(1.0 * (rank.rank == 0))

    account, _ = on_ranks(2, run, keep=0.0)
    assert account is None


def test_a_rank_that_is_done_has_not_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 gathers: rank 1 has sent and closes, rank 2 comes long after that, but within the deadline."""
    monkeypatch.setattr("test_vigil.TIMEOUT", 20.0)

    def run(rank: Rank) -> None:
        if rank.rank == 1:
            rank.begin(0)
            rank.finish(0)
            return
        rank.begin(0)
        time.sleep(2.0)  # it waits for others for a second
        rank.finish(0)

    account, _ = on_ranks(3, run, keep=0.0)
    assert account is None


def test_a_rank_that_was_done_before_it_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_vigil.TIMEOUT", 20.0)

    def run(rank: Rank) -> None:
        for count in range(2):
            rank.begin(0)
            if count == 0 or rank.rank == 1:
                rank.finish(0)
            if rank.rank == 1:
                assert rank.vigil is not None
                rank.vigil.stop()
                return

    account, ranks = on_ranks(3, run, keep=3.0)
    assert account is not None and account.startswith("rank 1 has closed the collective; rank ")
    assert account.endswith("waits for it in all_reduce of [5, 64] float32 on lane 0")
    assert ranks[0].aborted and ranks[2].aborted


def test_a_rank_that_is_done_says_how_far_it_came() -> None:
    """Not silent, and not the late one: rank 2 is."""

    def run(rank: Rank) -> None:
        if rank.rank != 2:
            rank.begin(0)
        if rank.rank == 1:
            rank.finish(0)
            assert rank.vigil is not None
            rank.vigil.stop()

    account, _ = on_ranks(3, run)
    assert account is not None and account.startswith("rank 2 did not come to all_reduce of [5, 64]")


@pytest.mark.parametrize("dies", (True, False))
def test_those_that_are_left_hear_each_other(dies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 has gone, and not all that was posted to it had gone out."""
    turns: list[int] = []
    listen = Vigil._listen

    def counted(vigil: Vigil, seconds: float) -> None:
        turns.append(vigil._world.rank)
        listen(vigil, seconds)

    monkeypatch.setattr(Vigil, "_listen", counted)

    def run(rank: Rank) -> None:
        assert rank.vigil is not None
        if rank.rank == 2:
            if dies:
                rank.ended = "gone"
            rank.vigil.stop()
            return
        time.sleep(1.5)  # until rank 2 no longer waits for others
        for _ in range(2):  # the first is taken by the system
            rank.vigil._streams._outgoing[2].append(memoryview(b"too late"))
            time.sleep(0.3)
        for number in range(12):
            rank.vigil.launched(0, (Operation.ALL_REDUCE, 5 + (rank.rank == 1 and number == 11), 64))
            time.sleep(0.05)

    account, ranks = on_ranks(3, run, keep=2.0)
    assert account is not None and "came with" in account
    assert all(words in account for words in ("of [5, 64]", "of [6, 64]", "rank 0", "rank 1"))
    assert ranks[0].aborted and ranks[1].aborted
    assert turns.count(0) < 100  # in 4 s: ten looks a second, and one for each message


def test_ranks_that_wait_in_unlike_operations_are_told_so() -> None:
    account, _ = on_ranks(2, lambda rank: rank.begin(0, (Operation.ALL_REDUCE, 5 + rank.rank, 64)))
    assert account is not None and "came with" in account
    assert all(words in account for words in ("all_reduce of [5, 64]", "all_reduce of [6, 64]", "on lane 0"))


@pytest.mark.parametrize("fault", (None, 3, 999))
def test_ranks_that_launch_unlike_operations_are_told_so_at_once(fault: int | None) -> None:
    """Where the GPU does not notice: operation number `fault` of rank 1 on lane 1 is another."""

    def run(rank: Rank) -> None:
        assert rank.vigil is not None
        for number in range(1000):
            rank.vigil.launched(0, SUM)
            rank.vigil.launched(1, (Operation.ALL_REDUCE, number + (rank.rank == 1 and number == fault), 64))
            if number % 200 == 0:
                time.sleep(0.02 * (1 + rank.rank))

    account, ranks = on_ranks(3, run, keep=1.0)
    if fault is None:
        assert account is None
        return
    assert account is not None and "came with" in account and "rank 1" in account
    assert all(words in account for words in (f"of [{fault}, 64]", f"of [{fault + 1}, 64]", "on lane 1"))
    assert all(rank.aborted for rank in ranks)


def test_an_operation_that_all_came_to_and_that_does_not_end() -> None:
    account, _ = on_ranks(2, lambda rank: rank.begin(0))
    assert account is not None
    assert "all_reduce of [5, 64] float32 on lane 0 did not end within 0.4 s, though every rank came to it" in account


def test_a_rank_that_does_not_answer_is_the_late_one() -> None:
    """Stopped by a signal, say: its peers have begun the same operation."""
    account, ranks = on_ranks(3, lambda rank: rank.begin(0), silent=1, keep=2.5)
    assert account is not None and account.startswith("rank 1 did not come to all_reduce of [5, 64]")
    assert ranks[0].aborted and ranks[2].aborted
