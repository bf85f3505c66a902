"""The demo model: greedy answers equal transformers' on the same dequantised weights, at every rank count."""

from typing import Any

import pytest
import torch

from tokenweave import LLM, SamplingParams
from tokenweave.layers.batch import Batch
from tokenweave.models.loading import load_model
from tokenweave.models.resolve import demo_file, resolve

NEW = 32
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three prime numbers.",
    "Why is the sky blue?",
    "Translate 'good morning' to Spanish.",
    "Who wrote Hamlet?",
    "What is 12 times 7?",
    "Name a mammal that lays eggs.",
    "Give me a recipe for pancakes.",
    "How do plants make food?",
]
BEGINNINGS = [
    "Once upon a time, in a small village,",
    "The three laws of thermodynamics are",
    "def fibonacci(n):\n",
    "1, 1, 2, 3, 5, 8,",
    "In 1969, the first humans",
    "Dear Sir or Madam,\n\nI am writing to",
    "Café, naïve, 東京, 🙂:",
    "The quick brown fox",
    "import numpy as np\n",
    "a",
]


@pytest.fixture(scope="module")
def oracle() -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(resolve(None, "float32"), dtype=torch.float32).eval()


def test_transformers_reading_of_the_same_file() -> None:
    """It dequantises, renames and reorders by its own code: logits within 1e-3, and the same 64 greedy tokens."""
    import transformers

    file = demo_file()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    parts = [load_model(resolve(None, "float32"), rank=rank, size=2, dtype=torch.float32) for rank in range(2)]
    prompt = [504, 3575, 282, 4649, 314, 260, 2076, 1089]
    with LLM(tensor_parallel_size=2, dtype="float32") as llm:
        params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
        answer = llm.generate([prompt], params, progress=False)[0].token_ids
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt + answer])).logits[0]
        batch, normed = Batch.prompts([prompt + answer]), None
        residual = torch.zeros(batch.num_tokens, parts[0].config.hidden_size)
        for stages in zip(*(part.stages for part in parts), strict=True):
            residual = sum((stage.compute(normed, batch, None) for stage in stages), residual)
            normed = stages[0].norm(residual)
        logits = torch.cat([part.head(normed) for part in parts], dim=1)
    assert float((logits - expected).abs().max() / expected.abs().max()) <= 1e-3
    assert len(answer) == 64 and answer == expected[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_twenty_prompts_at_every_rank_count(oracle: Any) -> None:
    """Each token is transformers' most likely one after the same beginning, so the whole answers are equal."""
    answers: dict[int, list[list[int]]] = {}
    prompts: list[list[int]] = []
    for size in (1, 2, 3, 4):
        with LLM(tensor_parallel_size=size, dtype="float32") as llm:
            prompts = [llm.tokenizer.chat([{"role": "user", "content": text}]) for text in QUESTIONS]
            prompts += [llm.tokenizer.encode(text) for text in BEGINNINGS]
            params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
            answers[size] = [c.token_ids for c in llm.generate(prompts, params, progress=False)]
    for index, (prompt, answer) in enumerate(zip(prompts, answers[1], strict=True)):
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        assert answer == logits.argmax(-1).tolist(), f"prompt {index}"
        assert len(answer) == NEW
    for size in (2, 3, 4):
        assert answers[size] == answers[1], f"{size} ranks"
