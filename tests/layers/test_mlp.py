from dataclasses import replace

import pytest
import torch
from layer_cases import EVERYTHING, FORMULAS, HALF_TOLERANCE, TINY, distance, fill, mlp_oracle, tensors

from tokenweave.config import ModelConfig, shard
from tokenweave.layers.batch import Batch
from tokenweave.layers.mlp import MLP

NONE = Batch.prompts([])  # the MLP does not look at it
CONFIGS = {"biases": EVERYTHING, "tiny": TINY}


def make(config: ModelConfig, *, size: int = 1, rank: int = 0, dtype: torch.dtype = torch.float32) -> MLP:
    mlp = MLP(config, shard(config, size, rank), dtype=dtype)
    fill(mlp.pieces("model.layers.1.mlp"), tensors(config, dtype=dtype), "model.layers.1.mlp")
    return mlp


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 13, 33, 577])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_partial_sums_add_up_to_the_formula(config: ModelConfig, tokens: int, kernels: bool) -> None:
    x = torch.randn(tokens, config.hidden_size)
    for size in (1, 2, 3, 4):
        with torch.set_grad_enabled(not kernels):
            parts = [make(config, size=size, rank=rank)(x, NONE, None) for rank in range(size)]
        assert distance(torch.stack(parts).double().sum(0), mlp_oracle(tensors(config), x)) < 2e-6
        if tokens and size > 1:  # control
            assert distance(torch.stack(parts[1:]).double().sum(0), mlp_oracle(tensors(config), x)) > 1e-2


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", FORMULAS)
def test_activations(activation: str, gated: bool, kernels: bool) -> None:
    config = replace(EVERYTHING, activation=activation, gated_mlp=gated)
    x = torch.randn(5, config.hidden_size)
    for size in (1, 3):
        with torch.set_grad_enabled(not kernels):
            parts = [make(config, size=size, rank=rank)(x, NONE, None) for rank in range(size)]
            fresh = make(config)(x, NONE, None)
        oracle = mlp_oracle(tensors(config), x, activation, gated)
        assert distance(torch.stack(parts).double().sum(0), oracle) < 2e-6
        for other in FORMULAS.keys() - {activation}:  # control
            assert distance(fresh, mlp_oracle(tensors(config), x, other, gated)) > 1e-5
    with torch.inference_mode():
        torch.testing.assert_close(make(config)(x, NONE, x), fresh)


@pytest.mark.parametrize("threads, tokens", [(1, 1), (1, 7), (1, 49), (2, 49)])
@pytest.mark.parametrize("dtype", HALF_TOLERANCE)
def test_half_types_are_as_exact_as_torch(dtype: torch.dtype, threads: int, tokens: int) -> None:
    """49 rows of bfloat16 on two threads take the path on which torch multiplies."""
    torch.set_num_threads(threads)
    x = torch.randn(tokens, EVERYTHING.hidden_size).to(dtype)
    oracle = mlp_oracle(tensors(EVERYTHING, dtype=dtype), x)
    errors = []
    for kernels in (True, False):
        with torch.set_grad_enabled(not kernels):
            errors.append((make(EVERYTHING, dtype=dtype)(x, NONE, None).double() - oracle).norm() / oracle.norm())
    assert errors[0] < HALF_TOLERANCE[dtype] and errors[0] < 1.1 * errors[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_alone_gives_the_same_bits_as_among_others(dtype: torch.dtype) -> None:
    mlp, x = make(EVERYTHING, dtype=dtype), torch.randn(16, EVERYTHING.hidden_size).to(dtype)
    with torch.inference_mode():
        together = mlp(x, NONE, None)
        for i, n in ((0, 1), (5, 2), (12, 4), (3, 13)):
            assert torch.equal(mlp(x[i : i + n], NONE, None), together[i : i + n])


@pytest.mark.parametrize("tokens", [1, 5, 60])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_out_may_be_the_memory_of_the_input(dtype: torch.dtype, tokens: int) -> None:
    mlp, x = make(EVERYTHING, dtype=dtype), torch.randn(tokens, EVERYTHING.hidden_size).to(dtype)
    with torch.inference_mode():
        fresh = mlp(x, NONE, None)
        assert mlp(x, NONE, x) is x and torch.equal(x, fresh)


def test_gradients() -> None:
    mlp = MLP(TINY, shard(TINY, 2, 1), dtype=torch.float64).requires_grad_(True)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, TINY.hidden_size, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: mlp(x, NONE, None), (x, mlp.gate_up.weight, mlp.down.weight))


def test_extreme_inputs_go_through() -> None:
    mlp = make(TINY)
    x = torch.randn(4, TINY.hidden_size)
    x[1], x[2] = float("nan"), 1e30
    with torch.inference_mode():
        out = mlp(x, NONE, None)
    assert out[1].isnan().all() and out[[0, 3]].isfinite().all() and not out[2].eq(0).any()


def test_what_does_not_fit_is_refused() -> None:
    with torch.inference_mode():
        for wrong in (torch.randn(2, 9), torch.randn(2, 8).bfloat16()):
            with pytest.raises(RuntimeError):
                make(TINY)(wrong, NONE, None)
