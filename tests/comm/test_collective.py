"""Both CPU collectives against plain torch, on one to four ranks."""

import functools
from typing import Any

import comm_ranks
import pytest
import torch

from tokenweave.comm import Group, launch

COLLECTIVES = ("shared_memory", "distributed")
CHECKS = (
    "fused", "any_cut", "not_finite", "layers", "separate_operations", "gather_and_broadcast", "refused", "two_lanes",
)  # fmt: skip


@functools.cache
def results(collective: str, size: int) -> list[dict[str, Any]]:
    return launch(comm_ranks.all_checks, size, collective)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("size", (1, 2, 3, 4))
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_is_right(collective: str, size: int, check: str) -> None:
    for rank, found in enumerate(results(collective, size)):
        assert found[check] == [], f"rank {rank}"


@pytest.mark.parametrize("size", (1, 2, 3, 4))
def test_both_collectives_give_the_same_bits(size: int) -> None:
    ranks = results("shared_memory", size) + results("distributed", size)
    assert all(found["bits"] == ranks[0]["bits"] for found in ranks)


def test_copies_are_counted() -> None:
    """The distributed collective sends partials from where they lie."""
    for size in (1, 2):
        assert all(found["copies"] == [0, 0, 1, 2] for found in results("shared_memory", size))
        assert all(found["copies"] == [0, 0, 0, 0] for found in results("distributed", size))


def uneven(group: Group) -> list[str]:
    return comm_ranks.fused(group, 64, torch.float32, (0, 1, 7, 13))[0]


def test_thirteen_rows_on_eight_ranks() -> None:
    assert launch(uneven, 8) == [[]] * 8


def large(group: Group) -> list[str]:
    """[8192, 8192] in bfloat16 and [4096, 64], up to the last row."""
    wrong = []
    for tokens, hidden, dtype in ((8192, 8192, torch.bfloat16), (4096, 64, torch.float32), (3, 4096, torch.float32)):
        with group.open_collective(hidden, tokens, dtype) as collective:
            partial = collective.buffer(0, tokens)
            partial[:] = torch.arange(tokens).remainder_(8).add_(group.rank)[:, None]
            own = group.rows(tokens)
            residual = torch.ones(own.stop - own.start, hidden, dtype=dtype)
            x = collective.all_reduce_add_rms_norm(partial, residual, torch.ones(hidden, dtype=dtype), 1e-5)
            rows = torch.arange(tokens, dtype=torch.float32).remainder_(8).mul_(group.size) + 1
            want = (rows + sum(range(group.size)))[own, None].expand(-1, hidden).to(dtype)
            wrong += comm_ranks.same(f"residual [{tokens}, {hidden}]", residual, want)
            # Equal elements: each over its own root mean square is 1.
            if not (x - 1).abs().max() < 1e-6:
                wrong.append(f"normed [{tokens}, {hidden}]")
    return wrong


def test_large_on_four_ranks() -> None:
    assert launch(large, 4) == [[]] * 4


def compiled(group: Group) -> int:
    from tokenweave.comm.kernels.exchange import exchange, meet

    with group.open_collective(64, 8):
        return sum(exchange.stats.cache_misses.values()) + sum(meet.stats.cache_misses.values())


@pytest.mark.started
def test_second_start_compiles_nothing() -> None:
    launch(compiled, 1)
    assert launch(compiled, 2) == [0, 0]
