from dataclasses import replace

import pytest
import torch
from layer_cases import BASE, FORMULAS, distance, fill

from tokenweave.config import ExpertsConfig, ModelConfig, shard
from tokenweave.layers.batch import Batch
from tokenweave.layers.experts import Experts

NONE = Batch.prompts([])  # experts do not look at it
HIDDEN = BASE["hidden_size"]


def experts_config(count: int = 5, per_token: int = 2, **changes: bool | str) -> ModelConfig:
    normalised = bool(changes.pop("normalised", True))
    mixture = ExpertsConfig(
        count=count, per_token=per_token, intermediate_size=11, normalised=normalised, layers=(True,) * 2
    )
    return ModelConfig(**BASE, experts=mixture, **changes)  # type: ignore[arg-type]


def checkpoint(config: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    assert config.experts is not None
    generator = torch.Generator().manual_seed(3)
    found = {"gate.weight": torch.randn(config.experts.count, HIDDEN, generator=generator)}
    for expert in range(config.experts.count):
        for name, shape in (("gate", (11, HIDDEN)), ("up", (11, HIDDEN)), ("down", (HIDDEN, 11))):
            found[f"experts.{expert}.{name}_proj.weight"] = torch.randn(shape, generator=generator) / shape[1] ** 0.5
    return {name: tensor.to(dtype) for name, tensor in found.items()}


def make(config: ModelConfig, tensors: dict[str, torch.Tensor], *, size: int = 1, rank: int = 0) -> Experts:
    experts = Experts(config, shard(config, size, rank), dtype=tensors["gate.weight"].dtype)
    fill(experts.pieces("model.layers.1.mlp"), tensors, "model.layers.1.mlp")
    return experts


def oracle(config: ModelConfig, tensors: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Token by token in float64."""
    assert config.experts is not None
    w, results = {name: tensor.double() for name, tensor in tensors.items()}, []
    for row in x.double():
        logits = w["gate.weight"] @ row
        chances = logits.exp() / logits.exp().sum()
        best = sorted(range(len(chances)), key=lambda e: -float(chances[e]))[: config.experts.per_token]
        total = sum(float(chances[e]) for e in best) if config.experts.normalised else 1.0
        parts = []
        for e in best:
            gate, up, down = (w[f"experts.{e}.{name}_proj.weight"] for name in ("gate", "up", "down"))
            parts.append(float(chances[e]) / total * (down @ (FORMULAS[config.activation](gate @ row) * (up @ row))))
        results.append(torch.stack(parts).sum(0))
    return torch.stack(results) if results else x.double()


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 3, 13, 33, 577])
def test_partial_sums_add_up_to_the_formula(tokens: int, kernels: bool) -> None:
    for config in (experts_config(), experts_config(normalised=False), experts_config(7, 1), experts_config(3, 3)):
        tensors, x = checkpoint(config), torch.randn(tokens, HIDDEN)
        expected = oracle(config, tensors, x)
        for size in (1, 2, 3) if tokens < 500 else (2,):
            with torch.set_grad_enabled(not kernels):
                parts = [make(config, tensors, size=size, rank=rank)(x, NONE, None) for rank in range(size)]
            assert distance(torch.stack(parts).double().sum(0), expected) < 2e-6
            if tokens and size > 1:  # control: a rank missing
                assert distance(torch.stack(parts[1:]).double().sum(0), expected) > 1e-2


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_other_activations(activation: str) -> None:
    config, x = experts_config(activation=activation), torch.randn(5, HIDDEN)
    with torch.inference_mode():
        assert distance(make(config, checkpoint(config))(x, NONE, None), oracle(config, checkpoint(config), x)) < 2e-6


def test_all_tokens_on_one_expert_and_experts_without_a_token() -> None:
    config = experts_config(8, 1)
    tensors = checkpoint(config)
    x = torch.randn(13, HIDDEN).abs()
    tensors["gate.weight"][6] = 5.0
    experts = make(config, tensors)
    with torch.inference_mode():
        assert experts.route(x)[1].eq(6).all()
        assert distance(experts(x, NONE, None), oracle(config, tensors, x)) < 2e-6


def test_a_cut_through_an_experts_tokens() -> None:
    """A token's result has the same bits whichever other tokens its experts get."""
    config = experts_config(4, 2)
    experts, x = make(config, checkpoint(config)), torch.randn(16, HIDDEN)
    with torch.inference_mode():
        together, chosen = experts(x, NONE, None), experts.route(x)[1]
        for cut in (1, 2, 7, 8, 15):
            assert set(chosen[:cut].flatten().tolist()) & set(chosen[cut:].flatten().tolist())
            halves = [experts(half.contiguous(), NONE, None) for half in (x[:cut], x[cut:])]
            assert torch.equal(torch.cat(halves), together)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_out_may_be_the_memory_of_the_input(dtype: torch.dtype) -> None:
    config = experts_config()
    experts, x = make(config, checkpoint(config, dtype)), torch.randn(9, HIDDEN).to(dtype)
    with torch.inference_mode():
        fresh = experts(x, NONE, None)
        assert experts(x, NONE, x) is x and torch.equal(x, fresh)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_half_types(dtype: torch.dtype, tolerance: float) -> None:
    """Every token on both experts: a choice that rounding turns would be another result."""
    config = experts_config(2, 2)
    tensors, x = checkpoint(config, dtype), torch.randn(33, HIDDEN).to(dtype)
    with torch.inference_mode():
        assert distance(make(config, tensors)(x, NONE, None), oracle(config, tensors, x)) < tolerance


def test_gradients() -> None:
    config = replace(experts_config(3, 2), hidden_size=HIDDEN)
    experts = Experts(config, shard(config, 2, 1), dtype=torch.float64).requires_grad_(True)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, HIDDEN, dtype=torch.float64, requires_grad=True)
    inputs = (x, experts.router, experts.gate_up, experts.down)
    assert torch.autograd.gradcheck(lambda x, *_: experts(x, NONE, None), inputs)


@pytest.mark.parametrize("columns, size, expected", [(31, 2, False), (64, 2, True), (64, 3, False), (48, 3, True)])
def test_ranks_agree_on_whether_a_step_is_captured(columns: int, size: int, expected: bool) -> None:
    """Of 31 columns one rank has 16, which torch's grouped matmul takes, and one 15: a rank alone cannot tell."""
    config = experts_config()
    assert config.experts is not None
    config = replace(config, hidden_size=64, experts=replace(config.experts, intermediate_size=columns))
    ranks = [Experts(config, shard(config, size, rank), dtype=torch.bfloat16) for rank in range(size)]
    assert [rank.capturable for rank in ranks] == [expected] * size
    assert not Experts(config, shard(config, size, 0), dtype=torch.float32).capturable
