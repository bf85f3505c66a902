import math

import pytest
import torch
from layer_cases import BASE, distance, turned

from tokenweave.config import ModelConfig, RopeConfig
from tokenweave.layers.batch import Batch
from tokenweave.layers.rotary import Rope, inverse_frequencies


def config(head_dim: int = 6, limit: int = 100_000, **rope: float | int | str) -> ModelConfig:
    values = BASE | dict(head_dim=head_dim, max_position_embeddings=limit)
    return ModelConfig(**values, rope=RopeConfig(**rope))  # type: ignore[arg-type]


@pytest.mark.parametrize("head_dim", [2, 6, 64, 80])
def test_turns_pairs_of_the_two_halves(head_dim: int) -> None:
    rope = Rope(config(head_dim, theta=500.0))
    x, positions = torch.randn(4, 3, head_dim), [0, 1, 17, 399]
    assert distance(rope.rotate(x, torch.tensor(positions)), turned(x.double(), positions, 500.0)) < 5e-5
    assert torch.equal(rope.rotate(x, torch.zeros(4, dtype=torch.int64)), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_rounded_once(dtype: torch.dtype) -> None:
    rope, positions = Rope(config(64)), torch.tensor([5, 1000])
    x = torch.randn(2, 3, 64).to(dtype)
    assert torch.equal(rope.rotate(x, positions), rope.rotate(x.float(), positions).to(dtype))


def test_scores_depend_on_the_distance_only() -> None:
    rope, q, k = Rope(config(64)), torch.randn(1, 1, 64), torch.randn(1, 1, 64)

    def score(i: int, j: int) -> float:
        return (rope.rotate(q, torch.tensor([i])) * rope.rotate(k, torch.tensor([j]))).sum().item()

    assert score(5, 3) == pytest.approx(score(105, 103), abs=1e-3)


def test_llama3_stretches_long_waves_only() -> None:
    """The three ranges of the published rule, one frequency at a time."""
    rope = RopeConfig(kind="llama3", theta=500_000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                      original_max_position_embeddings=8192)  # fmt: skip
    found = inverse_frequencies(rope, 128).tolist()
    expected, ranges = [], set()
    for i in range(64):
        plain = 500_000.0 ** (-2 * i / 128)
        turns = 8192 * plain / (2 * math.pi)  # over the original context
        if turns > 4.0:
            expected.append(plain)
        elif turns < 1.0:
            expected.append(plain / 8)
        else:
            kept = (turns - 1.0) / (4.0 - 1.0)
            expected.append((1 - kept) * plain / 8 + kept * plain)
        ranges.add(turns > 4.0 or (turns < 1.0 and "low"))
    assert ranges == {True, False, "low"}
    assert found == pytest.approx(expected, rel=1e-5)


def test_tables_grow_with_the_context_and_keep_what_they_held() -> None:
    rope = Rope(config())
    before = rope.cos.clone()
    rope.reserve(Batch.prompts([[1] * 3000, [1]]))
    assert rope.cos.shape[0] >= 3000 and torch.equal(rope.cos[: len(before)], before)
    assert rope.arrays[0].shape == tuple(rope.cos.shape) and rope.sin[2999].ne(0).any()
    rope.reserve(Batch.prompts([]))


def test_a_context_longer_than_the_models_is_refused() -> None:
    rope = Rope(config(limit=20))
    rope.reserve(Batch.prompts([[1] * 20]))
    with pytest.raises(ValueError, match="21 tokens is longer than the model's 20"):
        rope.reserve(Batch.prompts([[1] * 21]))
    assert rope.cos.shape[0] == 20
