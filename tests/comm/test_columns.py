"""Column slices gathered two ways."""

import pytest
import torch

from tokenweave.comm import Group, launch
from tokenweave.comm.columns import all_gather_columns, all_reduce_columns, bytes_received

CASES = [(0, 12), (3, 13), (33, 7)]


def gathered(group: Group, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(both ways' results, the whole) of every case; widths uneven, rank 1's twice as wide."""
    found = []
    for count, width in CASES:
        parts = [2 if rank == 1 else 1 for rank in range(group.size)]
        borders = [width * sum(parts[:r]) // sum(parts) for r in range(group.size + 1)]
        widths = [b - a for a, b in zip(borders, borders[1:], strict=False)]
        whole = torch.randn(count, width, generator=torch.Generator().manual_seed(width)).to(dtype)
        own = whole[:, borders[group.rank] : borders[group.rank + 1]]
        with group.open_collective(width, 64 + 2 * count * group.size, dtype) as collective:
            one = all_gather_columns(collective, own, widths, group.rank).clone()
            found.append((one, all_reduce_columns(collective, own, widths, group.rank).clone(), whole))
    return found


@pytest.mark.parametrize(("size", "collective"), [(2, "distributed"), (3, "shared_memory")])
def test_every_rank_has_every_column(size: int, collective: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for rank in launch(gathered, size, collective, args=(dtype,)):
            for one, other, whole in rank:
                assert torch.equal(one, whole) and torch.equal(other, whole)


def test_bytes() -> None:
    """Of 10 x 8 float32 over 4 ranks three quarters are others'."""
    assert bytes_received("all-gather", 10, 8, 4, 4) == 240
    assert bytes_received("zero-filled all-reduce", 10, 8, 4, 4) == 480
    assert bytes_received("all-gather", 10, 8, 1, 4) == 0
