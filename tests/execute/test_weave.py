"""Weaving changes when things happen and nothing else: every cut, random cuts, random delays, failures."""

import functools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from execute import weave_ranks
from execute.test_executor import expected_linear

from tokenweave.comm import launch
from tokenweave.comm.processes import RankError

both = pytest.mark.parametrize("collective", ["shared_memory", "distributed"])


@functools.cache
def results(size: int, collective: str) -> list[dict[str, Any]]:
    """Of every rank, all checks in one start."""
    return launch(weave_ranks.all_checks, size, collective)


@both
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_cut_gives_the_unwoven_logits(size: int, collective: str) -> None:
    """Inside a request, on a border, decodes in one lane and the prefill in the other, empty lanes, fewer tokens than
    ranks; the cache is poisoned where the step must write before it reads."""
    found = results(size, collective)[0]["every_cut"]
    assert len(found) == len(weave_ranks.MODELS) * sum(1 + sum(n for n, _ in step) for step in weave_ranks.STEPS)
    assert [case for case in found if case[1] > 1e-4] == []


@both
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_lanes_give_the_bits_of_the_whole(size: int, collective: str) -> None:
    assert [found["rows_by_lane"] for found in results(size, collective)] == [[]] * size


@both
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_two_hundred_random_steps_at_random_cuts(size: int, collective: str) -> None:
    assert results(size, collective)[0]["random_steps"] <= 1e-4


@both
def test_delays_change_nothing(collective: str) -> None:
    assert [found["with_sleeps"] for found in results(2, collective)] == [[], []]


@both
@pytest.mark.parametrize("size", [2, 4])
def test_no_row_is_read_before_it_is_there(size: int, collective: str) -> None:
    for found in results(size, collective):
        for count, by_cut in zip(weave_ranks.COUNTS, found["linear_counts"], strict=True):
            for cut, rows in by_cut.items():
                torch.testing.assert_close(
                    rows.double(), expected_linear(count, size), atol=1e-4, rtol=1e-4,
                    msg=lambda m, w=(count, cut): f"{w}: {m}",
                )  # fmt: skip


@both
@pytest.mark.parametrize("how", ["raised", "killed"])
def test_a_rank_that_fails_while_woven_is_told_to_all(how: str, collective: str, tmp_path: Path) -> None:
    began = time.monotonic()
    error, words = (RankError, "rank 1 was killed") if how == "killed" else (ValueError, "a stage that cannot go on")
    with pytest.raises(error, match=words):
        launch(weave_ranks.fails_woven, 3, collective, args=(how, str(tmp_path)), timeout=30.0)
    assert time.monotonic() - began < 20  # start included; the deadline of a wait is 30
    for rank in (0, 2):
        told = (tmp_path / f"told-{rank}").read_text()
        assert told.startswith("CommunicationError: rank 1 ") and "lane" in told
