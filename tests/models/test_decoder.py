"""Logits and greedy tokens of every family, rank count, mode and collective against transformers' own model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models.ranks import Case, run_cases
from tiny import FAMILIES, Tiny, build, save

from tokenweave.comm import launch

TOLERANCE = 1e-4  # relative to the largest logit, float32
PROMPT = [3, 141, 59, 26, 5, 358, 97, 9, 32, 384, 62, 64, 33]
MODES = ("serial", "reordered", "fused")


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, torch.Tensor, list[int]]]:
    """Per family: checkpoint, logits of the prompt, 64 greedy tokens."""
    directory, made = tmp_path_factory.mktemp("tiny"), {}
    for tiny in FAMILIES:
        model = build(tiny)
        model.save_pretrained(directory / tiny.name)
        made[tiny.name] = (directory / tiny.name, *reference(model))
    return made


@torch.no_grad()
def reference(model: Any) -> tuple[torch.Tensor, list[int]]:
    logits = model(torch.tensor([PROMPT])).logits[0].float()
    tokens = list(PROMPT)
    for _ in range(64):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return logits, tokens[len(PROMPT) :]


@pytest.mark.parametrize("collective", ["shared_memory", "distributed"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equals_transformers(size: int, collective: str, oracle: dict) -> None:
    cases, names = [], []
    for name, (path, _, _) in oracle.items():
        cases += [Case(path, PROMPT, mode, greedy=64 if mode == "fused" or size == 2 else 8) for mode in MODES]
        names += [name] * len(MODES)
    results = launch(run_cases, tensor_parallel_size=size, collective=collective, args=(cases,))[0]
    for name, case, (logits, tokens) in zip(names, cases, results, strict=True):
        _, expected, expected_tokens = oracle[name]
        error = relative(logits, expected)
        assert error <= TOLERANCE, f"{name}, {case.mode}, {size} ranks: {error:.2e}"
        assert tokens == expected_tokens[: case.greedy], f"{name}, {case.mode}, {size} ranks"


def test_faults_are_seen(oracle: dict, tmp_path: Path) -> None:
    biased = Tiny("biased", "LlamaConfig", dict(attention_bias=True))
    model = build(biased)
    path = save(biased, tmp_path)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    biases = {k: v for k, v in model.state_dict().items() if k.endswith("o_proj.bias")}
    faults = ["rope off", "one reduction skipped", "bias on every rank"]
    cases = [Case(path, PROMPT, "serial")] + [Case(path, PROMPT, "serial", fault=f, extra=biases) for f in faults]
    results = launch(run_cases, tensor_parallel_size=2, args=(cases,))[0]
    errors = [relative(logits, expected) for logits, _ in results]
    assert errors[0] <= TOLERANCE
    for fault, error in zip(faults, errors[1:], strict=True):
        assert error > 10 * TOLERANCE, f"{fault}: {error:.2e}"


def test_bfloat16_is_as_close_as_transformers(oracle: dict) -> None:
    for tiny in (FAMILIES[0], FAMILIES[4], FAMILIES[6]):
        path, exact, _ = oracle[tiny.name]
        with torch.no_grad():
            theirs = build(tiny, torch.bfloat16)(torch.tensor([PROMPT])).logits[0].float()
        bound = 1.2 * float((theirs - exact).norm())
        cases = [Case(path, PROMPT, mode, torch.bfloat16) for mode in MODES]
        for mode, (ours, _) in zip(MODES, launch(run_cases, tensor_parallel_size=2, args=(cases,))[0], strict=True):
            assert float((ours - exact).norm()) <= bound, f"{tiny.name}, {mode}"
