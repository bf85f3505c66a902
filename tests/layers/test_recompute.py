"""A function that runs again in the backward pass."""

import torch
from torch.autograd import gradcheck

from tokenweave.layers.recompute import recomputed


def test_gradcheck() -> None:
    weight = torch.randn(3, 3, dtype=torch.float64)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda rows: recomputed(lambda r: torch.tanh(r @ weight), rows), (x,))


def test_parameters_get_their_gradients_and_nothing_is_kept() -> None:
    weight = torch.randn(3, 3, requires_grad=True)
    x = torch.randn(5, 3, requires_grad=True)
    runs = []

    def run(rows: torch.Tensor) -> torch.Tensor:
        runs.append(torch.is_grad_enabled())
        return torch.tanh(torch.tanh(rows @ weight) @ weight)

    found = recomputed(run, x)
    assert [tensor is x for tensor in found.grad_fn.saved_tensors] == [True]
    found.square().sum().backward()
    assert runs == [True, True]
    gradients = x.grad, weight.grad
    expected = torch.autograd.grad(run(x).square().sum(), (x, weight))
    for one, other in zip(gradients, expected, strict=True):
        assert one is not None and torch.equal(one, other)
    with torch.no_grad():
        assert torch.equal(recomputed(run, x), found.detach())
