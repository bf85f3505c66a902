import math

import pytest
import torch
from layer_cases import BASE, distance, turned

from tokenweave.config import ModelConfig, RopeConfig
from tokenweave.layers.batch import Batch
from tokenweave.layers.rotary import Rope, Rotation, inverse_frequencies


def config(head_dim: int = 6, limit: int = 100_000, **rope: float | int | str) -> ModelConfig:
    values = BASE | dict(head_dim=head_dim, max_position_embeddings=limit)
    return ModelConfig(**values, rope=RopeConfig(**rope))  # type: ignore[arg-type]


def turn(rope: Rope, x: torch.Tensor, positions: list[int]) -> torch.Tensor:
    return Rotation(rope.cos, rope.sin, torch.tensor(positions)).turn(x)


@pytest.mark.parametrize("head_dim", [2, 6, 64, 80])
def test_turns_pairs_of_the_two_halves(head_dim: int) -> None:
    rope = Rope(config(head_dim, theta=500.0))
    x, positions = torch.randn(4, 3, head_dim), [0, 1, 17, 399]
    assert distance(turn(rope, x, positions), turned(x.double(), positions, 500.0)) < 5e-5
    assert torch.equal(turn(rope, x, [0] * 4), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_rounded_once(dtype: torch.dtype) -> None:
    rope, positions = Rope(config(64)), [5, 1000]
    x = torch.randn(2, 3, 64).to(dtype)
    assert torch.equal(turn(rope, x, positions), turn(rope, x.float(), positions).to(dtype))


def test_scores_depend_on_the_distance_only() -> None:
    rope, q, k = Rope(config(64)), torch.randn(1, 1, 64), torch.randn(1, 1, 64)

    def score(i: int, j: int) -> float:
        return (turn(rope, q, [i]) * turn(rope, k, [j])).sum().item()

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


def test_linear_is_positions_divided() -> None:
    plain, stretched = Rope(config(64)), Rope(config(64, kind="linear", factor=4.0))
    x = torch.randn(3, 2, 64)
    torch.testing.assert_close(turn(stretched, x, [0, 40, 2000]), turn(plain, x, [0, 10, 500]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_frequency_by_frequency(truncate: bool) -> None:
    """Dimensions that turn over 32 times in the original context keep their speed, below once are slowed, and in
    between lies a line over the dimensions."""
    rope = RopeConfig(kind="yarn", theta=10_000.0, factor=4.0, original_max_position_embeddings=2048, truncate=truncate)
    found = inverse_frequencies(rope, 128).tolist()

    def pair(turns: float) -> float:  # 2048 * theta ** (-2 pair / 128) / (2 pi) = turns
        return 64 * math.log(2048 / (2 * math.pi * turns), 10_000.0)

    first, last = (math.floor(pair(32)), math.ceil(pair(1))) if truncate else (pair(32), pair(1))
    expected = []
    for i in range(64):
        slowed = min(max((i - first) / (last - first), 0.0), 1.0)
        expected.append(10_000.0 ** (-2 * i / 128) * (1 - slowed + slowed / 4.0))
    assert 1 < first < last < 63
    assert found == pytest.approx(expected, rel=1e-5)


def test_attention_factor_scales_what_is_turned() -> None:
    x = torch.randn(2, 1, 64)
    plain, scaled = (
        Rope(config(64, kind="yarn", original_max_position_embeddings=32, attention_factor=factor))
        for factor in (1.0, 1.25)
    )
    torch.testing.assert_close(turn(scaled, x, [0, 77]), 1.25 * turn(plain, x, [0, 77]))


def chunk(new: int, context: int, prompt: int | None) -> Batch:
    """The last `new` of `context` tokens."""
    return Batch(
        token_ids=torch.zeros(new, dtype=torch.int64),
        positions=torch.arange(context - new, context),
        query_offsets=torch.tensor([0, new], dtype=torch.int32),
        context_lengths=torch.tensor([context], dtype=torch.int32),
        prompt_lengths=None if prompt is None else torch.tensor([prompt], dtype=torch.int32),
    )


@pytest.mark.parametrize("length", [1, 19, 20, 21, 33, 577])
def test_dynamic_base_follows_the_requests_length(length: int) -> None:
    rope = Rope(config(8, limit=1000, kind="dynamic", factor=4.0, original_max_position_embeddings=20))
    stretch = 4.0 * max(length, 20) / 20 - 3.0
    base = 10_000.0 * stretch ** (8 / 6)
    x = torch.randn(length, 2, 8)
    expected = turned(x.double(), list(range(length)), base)
    assert distance(rope.rotation(Batch.prompts([[1] * length])).turn(x), expected) < 1e-4
    # the same in chunks, of which each knows the whole prompt
    for start, stop in ((0, length // 2), (length // 2, length)):
        part = rope.rotation(chunk(stop - start, stop, length)).turn(x[start:stop])
        assert distance(part, expected[start:stop]) < 1e-4


def test_dynamic_base_of_a_token_behind_the_prompt_is_its_own() -> None:
    rope = Rope(config(8, limit=1000, kind="dynamic", factor=4.0, original_max_position_embeddings=20))
    x = torch.randn(5, 2, 8)
    found = rope.rotation(chunk(5, 50, 48)).turn(x)  # as after a preemption: two tokens behind the prompt
    for i, length in enumerate((48, 48, 48, 49, 50)):
        base = 10_000.0 * (4.0 * length / 20 - 3.0) ** (8 / 6)
        assert distance(found[i : i + 1], turned(x[i : i + 1].double(), [45 + i], base)) < 1e-4


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
