import copy

import pytest
import torch
from layer_cases import distance

from tokenweave.layers.projection import Projection


def make(inputs: int, outputs: int, bias: bool, dtype: torch.dtype = torch.float32) -> Projection:
    projection = Projection(inputs, outputs, bias=bias, dtype=dtype)
    for parameter in projection.parameters():
        parameter.data.normal_()
    return projection


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 13])
def test_equals_the_formula_with_and_without_out(tokens: int, bias: bool) -> None:
    projection, x = make(33, 5, bias), torch.randn(tokens, 33)
    oracle = x.double() @ projection.weight.double().T + (projection.bias.double() if bias else 0.0)
    out = torch.empty(tokens, 5)
    assert projection(x, out) is out
    assert distance(out, oracle) < 1e-6 and distance(projection(x), oracle) < 1e-6


def test_needs_no_gradients_unless_told() -> None:
    assert not any(parameter.requires_grad for parameter in make(3, 2, True).parameters())


def test_arrays_follow_the_parameters() -> None:
    """To new memory, into a copy, and to another dtype."""
    projection = make(4, 3, True)
    weight, bias = projection.arrays()
    projection.weight.data.fill_(2.0)
    assert (weight == 2.0).all() and (bias == projection.bias.detach().numpy()).all()
    twin = copy.deepcopy(projection)
    twin.weight.data.fill_(3.0)
    assert (twin.arrays()[0] == 3.0).all() and (projection.arrays()[0] == 2.0).all()
    projection.weight = torch.nn.Parameter(torch.full((3, 4), 4.0), requires_grad=False)
    assert (projection.arrays()[0] == 4.0).all()
    assert projection.to(torch.bfloat16).arrays()[0].dtype == "uint16"
    assert make(4, 3, False).arrays()[1].size == 0
