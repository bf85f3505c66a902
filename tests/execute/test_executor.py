"""The executors against a float64 loop over whole matrices, and the contract between stages and executors."""

import pytest
import torch
from execute.stage_ranks import (
    EPS,
    HIDDEN,
    MAX_TOKENS,
    MODES,
    linear_stage,
    norm,
    run_layers,
    run_linear,
    run_outside_partial,
    run_scattering_expert,
)

from tokenweave.comm import Group, launch
from tokenweave.config import ModelConfig
from tokenweave.execute import Executor
from tokenweave.layers.batch import Batch

COUNTS = [1, 0, 2, 3, 4, 5, 13, 33, MAX_TOKENS]


def rows_in(tokens: int) -> torch.Tensor:
    return torch.sin(torch.arange(HIDDEN) * 0.3 + torch.arange(tokens).unsqueeze(1)).double()


def normalise(y: torch.Tensor, seed: int) -> torch.Tensor:
    return y / (y.square().mean(1, keepdim=True) + EPS).sqrt() * norm(seed).weight.double()


def expected_linear(tokens: int, size: int) -> torch.Tensor:
    x, residual = rows_in(tokens), torch.zeros(tokens, HIDDEN, dtype=torch.float64)
    for seed in range(4):
        weight = sum(linear_stage("", seed, rank)[1].double() for rank in range(size))
        residual = residual + x @ weight
        x = normalise(residual, seed)
    return x


@pytest.mark.parametrize("collective", ["shared_memory", "distributed"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_mode_at_every_token_count(size: int, collective: str) -> None:
    """Counts below the rank count, and one after another, would show a residual kept by the wrong owner."""
    results = launch(run_linear, tensor_parallel_size=size, collective=collective, args=(COUNTS,))
    for count, *found in zip(COUNTS, *results, strict=True):
        for rank, rows in enumerate(found):
            for mode in MODES:
                torch.testing.assert_close(
                    rows[mode].double(), expected_linear(count, size), atol=1e-4, rtol=1e-4,
                    msg=lambda m, w=(mode, count, rank): f"{w}: {m}",
                )  # fmt: skip
            assert rows["copies"] == 0


def test_late_ranks_change_nothing() -> None:
    for rows in launch(run_linear, tensor_parallel_size=3, args=([5, 64, 1], True)):
        torch.testing.assert_close(rows[1]["fused"].double(), expected_linear(64, 3), atol=1e-4, rtol=1e-4)


def test_a_stage_that_scatters_computes_privately() -> None:
    tokens, size = 7, 2
    x = normalise(first := rows_in(tokens) @ sum(linear_stage("", 0, r)[1].double() for r in range(size)), 0)
    y = torch.zeros_like(x)
    for expert in range(3):
        rows = [t for t in range(tokens) if t % 3 == expert]
        for target, source in zip(rows, rows[::-1], strict=True):
            y[target] += x[source] * sum(expert + 1 + r for r in range(size))
    expected = normalise(first + y, 1)
    for found in launch(run_scattering_expert, tensor_parallel_size=size, args=(tokens,)):
        assert found["copies"] == 0
        for mode in MODES:
            torch.testing.assert_close(found[mode].double(), expected, atol=1e-4, rtol=1e-4)


def test_out_none_is_a_fresh_tensor_under_autograd() -> None:
    stage, weight = linear_stage("s", 0, 0)
    x = rows_in(3).float().requires_grad_()
    y = stage.compute(x, Batch.prompts([[0, 1, 2]]), None)
    y.sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(1).expand(3, HIDDEN))


@pytest.mark.parametrize("collective", ["shared_memory", "distributed"])
def test_a_partial_from_outside_is_copied_in_and_counted(collective: str) -> None:
    expected = normalise(rows_in(5) @ sum(linear_stage("", 0, r)[1].double() for r in range(2)), 0)
    for found in launch(run_outside_partial, tensor_parallel_size=2, collective=collective, args=(5,)):
        assert found["copies"] == (1 if collective == "shared_memory" else 0)  # gloo sends from where it lies
        torch.testing.assert_close(found["rows"].double(), expected, atol=1e-4, rtol=1e-4)


CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=97, hidden_size=48, intermediate_size=70, num_hidden_layers=3,
    num_attention_heads=6, num_key_value_heads=3, head_dim=8, max_position_embeddings=128,
    qkv_bias=True, output_bias=True, rms_norm_eps=EPS,
)  # fmt: skip


def test_every_stage_sees_the_same_rows_at_every_rank_count() -> None:
    """A sum reduced twice, or a whole result reduced again, shows at the first stage it happens in."""
    prompt = [5, 96, 0, 41, 41, 7, 13]

    def every_mode(group: Group) -> list[dict]:
        return [run_layers(group, CONFIG, prompt, mode) for mode in MODES]

    whole = launch(every_mode, tensor_parallel_size=1)[0]
    for size in (2, 4):
        for rank in launch(every_mode, tensor_parallel_size=size):
            for mode, found, alone in zip(MODES, rank, whole, strict=True):
                assert found["copies"] == 0, "a dense model writes its partials where peers read them"
                assert len(found["seen"]) == len(alone["seen"]) == 7
                for index, (rows, expected) in enumerate(zip(found["seen"], alone["seen"], strict=True)):
                    where = f"{mode}, stage {index}: "
                    torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-4, msg=lambda m, w=where: w + m)


def test_refuses_what_it_cannot_run() -> None:
    class Collective:
        pass

    from execute.stage_ranks import model_of

    executor = Executor(model_of([], 0, 1), Collective(), max_tokens=4)  # type: ignore[arg-type]
    from tokenweave.plan import StepPlan

    with pytest.raises(ValueError, match="at most 4 tokens, got 5"):
        executor.forward(Batch.prompts([[0] * 5]), StepPlan("fused"))
