"""LLM over real rank processes and tiny random models."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tiny import Tiny, build

from tokenweave.engine.completion import Completion
from tokenweave.engine.llm import LLM
from tokenweave.engine.params import SamplingParams

LONG = Tiny("long", "LlamaConfig", {"max_position_embeddings": 1024, "num_attention_heads": 6, "num_key_value_heads": 3,
                                    "hidden_size": 48, "intermediate_size": 50, "num_hidden_layers": 2})  # fmt: skip
GAP = 1e-3  # of the two best logits: below it rounding may choose


@dataclass
class Made:
    path: Path
    model: Any


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    model = build(LONG)
    path = tmp_path_factory.mktemp("models") / "long"
    model.save_pretrained(path)
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(509)}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(path / "tokenizer.json"))
    return Made(path, model)


@torch.no_grad()
def logits(made: Made, tokens: list[int]) -> torch.Tensor:
    return made.model(torch.tensor([tokens])).logits[0].double()


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, **more)


def traffic(seed: int, count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 900 tokens, most of them short, a third with one of two long common beginnings; every fifth draws
    at temperature 0.8 with a seed of its own."""
    rng = np.random.default_rng(seed)
    common = [rng.integers(3, 509, size=300).tolist() for _ in range(2)]
    prompts, params = [], []
    for i in range(count):
        length = int(np.exp(rng.uniform(0, np.log(900.99))))
        prompt = rng.integers(3, 509, size=length).tolist()
        if i % 3 == 0:
            prompt = (common[i % 2][: int(rng.integers(1, 300))] + prompt)[:900]
        prompts.append(prompt)
        tokens = int(rng.integers(1, 33))
        params.append(
            greedy(tokens, logprobs=2) if i % 5 else SamplingParams(max_tokens=tokens, temperature=0.8, seed=i)
        )
    return prompts, params


def certain(completion: Completion) -> int:
    """How many of a greedy completion's tokens come before its first near tie."""
    assert completion.logprobs is not None
    for i, report in enumerate(completion.logprobs):
        best, second = sorted(report.values())[-1:-3:-1]
        if best - second < GAP:
            return i
    return len(completion.token_ids)


@pytest.fixture(scope="module")
def alone(made: Made) -> tuple[list[list[int]], list[SamplingParams], list[Completion]]:
    """200 requests, each answered with nothing else running, without prefix reuse, at one rank."""
    prompts, params = traffic(seed=7, count=200)
    with LLM(made.path, enable_prefix_caching=False, mode="serial", block_size=32) as llm:
        answers = [llm.generate([prompt], wanted)[0] for prompt, wanted in zip(prompts, params, strict=True)]
    return prompts, params, answers


def test_alone_is_what_transformers_says(made: Made, alone: Any) -> None:
    for prompt, wanted, answer in list(zip(*alone, strict=True))[:40]:
        if wanted.temperature:
            continue
        rows = logits(made, prompt + answer.token_ids)[len(prompt) - 1 : -1]
        count = certain(answer)
        assert answer.token_ids[:count] == rows.argmax(-1).tolist()[:count]
        expected = rows.log_softmax(-1)
        for row, token, report in zip(expected, answer.token_ids, answer.logprobs, strict=True):
            assert report[token] == pytest.approx(row[token].item(), abs=1e-3)


@pytest.mark.parametrize(
    ("size", "mode"),
    [(1, "serial"), (1, "fused"), (2, "serial"), (2, "fused"), pytest.param(2, "weave", marks=pytest.mark.started)],
)
def test_under_load_as_alone(made: Made, alone: Any, size: int, mode: str) -> None:
    """200 requests at once, some cancelled on the way, in a cache that forces preemption: each as it was alone."""
    prompts, params, answers = alone
    heads = 3 if size == 1 else 2  # of the rank that has most
    context = 2 * 2 * 1024 * heads * 8 * 4  # bytes
    with LLM(
        made.path,
        tensor_parallel_size=size,
        mode=mode,
        kv_cache_memory=2 * context,
        max_tokens_per_step=300,
        max_running_requests=40,
    ) as llm:
        cancelled = [llm.stream(prompt, greedy(100)) for prompt in prompts[:20]]
        for stream in cancelled:
            next(stream)
        together = llm.generate(prompts, params, progress=False)
        for stream in cancelled:
            stream.close()
        llm.generate([3], greedy(1))  # a step after the last cancellation
        assert llm.stats()[-1].free_blocks >= llm.num_blocks - 1
        assert sum(step.preempted for step in llm.stats()) > 0
        assert max(step.tokens for step in llm.stats()) <= 300
        assert max(step.requests for step in llm.stats()) <= 40
    compared = 0
    for wanted, one, other in zip(params, answers, together, strict=True):
        count = certain(one) if wanted.temperature == 0 else 0
        assert other.token_ids[:count] == one.token_ids[:count]
        compared += count
    assert compared > 0.9 * sum(len(a.token_ids) for a, w in zip(answers, params, strict=True) if not w.temperature)
    drawn = [
        (one.token_ids, other.token_ids)
        for w, one, other in zip(params, answers, together, strict=True)
        if w.temperature
    ]
    assert sum(a == b for a, b in drawn) > 0.9 * len(drawn)  # a draw near the border of two tokens may fall either way


@pytest.mark.parametrize("size", [1, 3])
def test_scores_are_transformers(made: Made, size: int) -> None:
    rng = np.random.default_rng(size)
    with LLM(made.path, tensor_parallel_size=size, max_tokens_per_step=257) as llm:
        for length in (2, 13, 577):
            tokens = rng.integers(3, 509, size=length).tolist()
            expected = logits(made, tokens).log_softmax(-1)[range(length - 1), tokens[1:]]
            np.testing.assert_allclose(llm.score(tokens), expected, atol=2e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_memory": 1000}, "kv_cache_memory is 1000"),
        ({"tensor_parallel_size": 7}, "num_attention_heads"),
        ({"max_model_len": 1025}, "context is 1024"),
    ],
)
def test_options_that_cannot_work(made: Made, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(made.path, **options)


def _truncate(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "model.safetensors"),
        (lambda path: (path / "model.safetensors").unlink(), "model.safetensors"),
        (lambda path: (path / "config.json").unlink(), "config.json"),
        (lambda path: (path / "config.json").write_text("{"), "config.json"),
    ],
)
def test_a_damaged_checkpoint_is_one_line(made: Made, tmp_path: Path, damage: Callable, message: str) -> None:
    for file in made.path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    damage(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        LLM(tmp_path, tensor_parallel_size=2)
    assert "\n" not in str(caught.value)
