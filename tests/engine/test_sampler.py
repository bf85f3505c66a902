import numpy as np
import pytest
import torch

from tokenweave.engine import draw, sampler
from tokenweave.engine.events import NO_TOKEN
from tokenweave.engine.params import SamplingParams
from tokenweave.engine.sampler import Sampler


def distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """float64 [V]: what a token must be drawn from, by sorting and summing in plain numpy."""
    scaled = logits.astype(np.float64) / params.temperature
    weights = np.exp(scaled - scaled.max())
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    if params.top_k > 0:
        order = order[: params.top_k]
    total, reached, kept = sum(weights[token] for token in order), 0.0, []
    for token in order:
        kept.append(token)
        reached += weights[token]
        if reached >= params.top_p * total * (1 - 1e-12):
            break
    out = np.zeros(len(weights))
    out[kept] = weights[kept] / reached
    return out


def sample(logits: torch.Tensor, params: SamplingParams, indexes: np.ndarray, seed: int = 5) -> list[int]:
    sampler = Sampler(3)
    sampler.assign(1, params, seed)
    return sampler.sample(logits, np.ones(len(indexes), dtype=np.int32), indexes).token_ids.tolist()


@pytest.mark.parametrize("vocab", [1, 2, 33, 577, 3001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_is_the_largest(vocab: int, dtype: torch.dtype) -> None:
    logits = torch.randn(13, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    expected = [max(range(vocab), key=lambda t: row[t]) for row in logits.float().tolist()]
    got = sample(logits, SamplingParams(temperature=0), np.arange(13))
    assert logits.float()[range(13), got].tolist() == logits.float()[range(13), expected].tolist()


@pytest.mark.parametrize(
    "options",
    [
        {}, {"temperature": 0.5}, {"temperature": 2.0}, {"top_k": 3}, {"top_k": 12, "temperature": 0.7}, {"top_k": 13},
        {"top_k": 99}, {"top_p": 0.5}, {"top_p": 0.9}, {"top_p": 1e-9}, {"top_k": 5, "top_p": 0.6},
        {"temperature": 1.3, "top_k": 8, "top_p": 0.95},
    ],
)  # fmt: skip
@pytest.mark.parametrize(("candidates", "rounds"), [((64, 1024), 8), ((2, 3), 8), ((2, 3), 1)])
def test_frequencies_follow_the_distribution(
    options: dict[str, float], candidates: tuple[int, int], rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few candidates and rounds most rows go on to the next way of drawing, the full sort at last."""
    monkeypatch.setattr(draw, "CANDIDATES", candidates)
    monkeypatch.setattr(draw, "ROUNDS", rounds)
    monkeypatch.setattr(
        sampler, "ROWS", 1000
    )  # 8 at a time take ten times as long; what is drawn is the same, see below
    logits = torch.randn(13, generator=torch.Generator().manual_seed(3)) * 2
    params = SamplingParams(**options)  # type: ignore[arg-type]
    expected = distribution(logits.numpy(), params)
    count = 20_000
    drawn = sample(logits.expand(count, -1), params, np.arange(count))
    got = np.bincount(drawn, minlength=13) / count
    assert got[expected == 0].sum() == 0
    np.testing.assert_allclose(got, expected, atol=4 * 0.5 / count**0.5)


@pytest.mark.parametrize("options", [{}, {"top_k": 50}, {"top_p": 0.8}, {"top_k": 2000, "top_p": 0.9}])
def test_a_draw_does_not_depend_on_the_rest_of_the_batch(options: dict[str, float]) -> None:
    """bfloat16: many equal logits, whose order must not depend on the batch either."""
    logits = (torch.randn(40, 4099, generator=torch.Generator().manual_seed(1)) * 2).bfloat16()
    sampler = Sampler(40)
    for slot in range(40):
        wanted = {"top_k": 3000} if slot % 5 == 0 else {} if slot % 3 == 0 else options
        sampler.assign(slot, SamplingParams(temperature=0.0 if slot % 7 == 0 else 1.0, **wanted), seed=slot)  # type: ignore[arg-type]
    slots, indexes = np.arange(40, dtype=np.int32), np.arange(40) * 3
    together = sampler.sample(logits, slots, indexes).token_ids
    alone = [
        int(sampler.sample(logits[i : i + 1], slots[i : i + 1], indexes[i : i + 1]).token_ids[0]) for i in range(40)
    ]
    assert together.tolist() == alone


def test_seeds_and_places_give_different_draws() -> None:
    logits = torch.zeros(200, 1000)
    first, again = (sample(logits, SamplingParams(), np.arange(200), seed=1) for _ in range(2))
    other = sample(logits, SamplingParams(), np.arange(200), seed=2)
    assert first == again and first != other
    assert len(set(first)) > 150 and sum(a == b for a, b in zip(first, other, strict=True)) < 5


def test_tiny_temperatures_and_large_logits() -> None:
    logits = torch.tensor([[3e4, 2.9e4, -3e4], [-1e30, 5.0, 4.0]])
    assert sample(logits, SamplingParams(temperature=1e-30), np.arange(2)) == [0, 1]
    assert sample(logits, SamplingParams(temperature=1e-30, top_p=0.9), np.arange(2)) == [0, 1]


@pytest.mark.parametrize("vocab", [13, 600, 2000])
def test_of_equal_logits_always_the_same_are_taken(vocab: int) -> None:
    assert len(set(sample(torch.zeros(300, vocab), SamplingParams(top_k=7), np.arange(300)))) == 7


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((500, 9), -torch.inf)
    logits[:, [2, 7]] = 0.0
    for params in (SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_p=0.99)):
        assert set(sample(logits, params, np.arange(500))) == {2, 7}


@pytest.mark.parametrize("count", [0, 1, 5, 33, 100])
def test_logprobs_are_of_the_models_own_distribution(count: int) -> None:
    logits = torch.randn(4, 33, generator=torch.Generator().manual_seed(9))
    sampler = Sampler(4)
    for slot in range(4):
        sampler.assign(slot, SamplingParams(temperature=0.3, top_k=2, logprobs=count if slot % 2 else None), seed=slot)
    sampled = sampler.sample(logits, np.arange(4), np.zeros(4, dtype=np.int64))
    assert set(sampled.logprobs) == {1, 3}
    for row, report in sampled.logprobs.items():
        wide = logits[row].double().numpy()
        expected = wide - np.log(np.exp(wide).sum())
        best = np.argsort(-expected)[: min(count, 33)].tolist()
        chosen = int(sampled.token_ids[row])
        assert set(report) == {chosen, *best}
        assert next(iter(report)) == chosen
        np.testing.assert_allclose([report[t] for t in report], expected[list(report)], atol=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 3])
def test_a_row_that_is_not_finite_gets_no_token(bad: float, temperature: float, top_k: int) -> None:
    """And no log-probabilities; its neighbours get what they would get."""
    logits = torch.randn(3, 400, generator=torch.Generator().manual_seed(1))
    made, slots = Sampler(3), np.arange(3)
    for slot in range(3):
        made.assign(slot, SamplingParams(temperature=temperature, top_k=top_k, logprobs=2), seed=slot)
    expected = made.sample(logits, slots, np.zeros(3, dtype=np.int64))
    logits[1, 399] = bad
    found = made.sample(logits, slots, np.zeros(3, dtype=np.int64))
    assert found.token_ids.tolist() == [expected.token_ids[0], NO_TOKEN, expected.token_ids[2]]
    assert found.logprobs == {row: expected.logprobs[row] for row in (0, 2)}
