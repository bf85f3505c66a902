"""gradcheck in float64 of the communication pairs, at odd row counts, on ranks that are threads."""

import pytest
import torch
from layers.thread_ranks import ThreadGroup, as_one
from torch.autograd import gradcheck

from tokenweave.layers.autograd import copy_to_ranks, gather_rows, scatter_sum, sum_over_ranks

HIDDEN = 3
ROWS = (0, 1, 2, 3, 5)


def own_rows(rows: int, size: int) -> list[int]:
    return [(r + 1) * rows // size - r * rows // size for r in range(size)]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("rows", ROWS)
def test_what_all_hold_alike(rows: int, size: int) -> None:
    group = ThreadGroup(size)
    copied = as_one(group, lambda c, x: copy_to_ranks(x, c), shared_input=True, alike=False)
    assert gradcheck(copied, (random(rows, HIDDEN),))
    summed = as_one(group, lambda c, x: sum_over_ranks(x, c), shared_input=False, alike=True)
    inputs = [random(rows, HIDDEN) for _ in range(size)]
    assert gradcheck(summed, inputs)
    torch.testing.assert_close(summed(*inputs), torch.stack(inputs).sum(0))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("rows", ROWS)
def test_rows_that_each_rank_owns(rows: int, size: int) -> None:
    group = ThreadGroup(size)
    gathered = as_one(group, lambda c, x: gather_rows(x, rows, c), shared_input=False, alike=False)
    inputs = [random(count, HIDDEN) for count in own_rows(rows, size)]
    assert gradcheck(gathered, inputs)
    assert all(torch.equal(found, torch.cat(inputs)) for found in gathered(*inputs))
    scattered = as_one(group, lambda c, x: scatter_sum(x, c), shared_input=False, alike=False)
    partials = [random(rows, HIDDEN) for _ in range(size)]
    assert gradcheck(scattered, partials)
    torch.testing.assert_close(torch.cat(scattered(*partials)), torch.stack(partials).sum(0))


def test_the_pair_is_a_column_and_a_row_parallel_layer() -> None:
    """Y = tanh(X A) B with A cut by columns and B by rows (section 3): values and gradients of the whole product."""
    size, x = 3, torch.randn(4, HIDDEN, dtype=torch.float64, requires_grad=True)
    a, b = torch.randn(size, HIDDEN, 2, dtype=torch.float64), torch.randn(size, 2, HIDDEN, dtype=torch.float64)
    layer = as_one(
        ThreadGroup(size),
        lambda c, rows: sum_over_ranks(torch.tanh(copy_to_ranks(rows, c) @ a[c.rank]) @ b[c.rank], c),
        shared_input=True,
        alike=True,
    )
    whole = torch.tanh(x @ torch.cat(list(a), 1)) @ torch.cat(list(b), 0)
    grad = torch.randn_like(whole)
    torch.testing.assert_close(layer(x), whole)
    torch.testing.assert_close(
        torch.autograd.grad(layer(x), x, grad), torch.autograd.grad(whole, x, grad)
    )  # fmt: skip
