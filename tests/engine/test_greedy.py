import pytest
import torch

from tokenweave.engine.events import NO_TOKEN
from tokenweave.engine.greedy import BLOCK, choose, largest, pack


def first_largest(row: list[float]) -> int:
    return max(range(len(row)), key=lambda column: (row[column], -column))


@pytest.mark.parametrize("width", [1, 2, 13, BLOCK - 1, BLOCK, BLOCK + 1, 577, 3 * BLOCK, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_first_of_the_largest(width: int, dtype: torch.dtype) -> None:
    """In half precision many are equal."""
    logits = torch.randn(33, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    values, columns = largest(logits)
    expected = [first_largest(row) for row in logits.tolist()]
    assert columns.tolist() == expected
    assert values.tolist() == [row[column] for row, column in zip(logits.tolist(), expected, strict=True)]


@pytest.mark.parametrize("widths", [[577], [1, 1], [300, 301], [1, 577, 40], [256, 255, 257, 3]])
def test_best_of_all_ranks(widths: list[int]) -> None:
    logits = (torch.randn(13, sum(widths), generator=torch.Generator().manual_seed(1)) * 3).bfloat16()
    firsts = [sum(widths[:rank]) for rank in range(len(widths))]
    packed = [pack(part, first) for part, first in zip(logits.split(widths, 1), firsts, strict=True)]
    assert choose(torch.cat(packed, 1)).tolist() == [first_largest(row) for row in logits.tolist()]


def test_negative_and_infinite_logits_and_no_rows() -> None:
    logits = torch.full((2, 700), -torch.inf)
    logits[1, 650] = -1e30
    assert largest(logits)[1].tolist() == [0, 650]
    assert choose(torch.cat((pack(logits[:, :300], 0), pack(logits[:, 300:], 300)), 1)).tolist() == [NO_TOKEN, 650]
    assert choose(pack(torch.zeros(0, 700), 0)).tolist() == []


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("column", [0, 299, 300, 576, 699])
def test_of_a_row_that_is_not_finite_none_is_best(bad: float, dtype: torch.dtype, column: int) -> None:
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = logits.argmax(-1).tolist()
    logits[1, column] = bad
    found = choose(torch.cat((pack(logits[:, :300], 0), pack(logits[:, 300:], 300)), 1)).tolist()
    assert found == [expected[0], NO_TOKEN, expected[2]]
