"""Logits and greedy tokens of every family, rank count, mode and collective against transformers' own models."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from models.ranks import Case, run_cases
from tiny import FAMILIES, Tiny, build, save

from tokenweave.comm import launch

TOLERANCE = 1e-4  # relative to the largest logit, float32
PROMPT = [3, 141, 59, 26, 5, 358, 97, 9, 32, 384, 62, 64, 33]
MODES = ("serial", "reordered", "fused", "weave")
SIZES = (1, 2, 3, 4, 5)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@dataclass
class Reference:
    """transformers' model of one tiny checkpoint."""

    path: Path
    model: Any
    logits: torch.Tensor  # of every prompt token
    confirmed: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def heads(self) -> int:
        return self.model.config.num_attention_heads

    @torch.no_grad()
    def confirms(self, tokens: list[int]) -> bool:
        """Whether each token is the most likely after the prompt and those before it, so that all are the greedy ones.

        At once where a key does not depend on what came after it; else step by step with transformers' own cache.
        """
        if tuple(tokens) not in self.confirmed and tokens:
            if self.model.config.rope_parameters["rope_type"] == "dynamic":
                greedy = self._step_by_step(len(tokens))
            else:
                logits = self.model(torch.tensor([PROMPT + tokens])).logits[0]
                greedy = logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()
            if tokens != greedy:
                return False
            self.confirmed.add(tuple(tokens))
        return True

    def _step_by_step(self, count: int) -> list[int]:
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        new, found = PROMPT, []
        for _ in range(count):
            found.append(int(self.model(torch.tensor([new]), cache=cache).logits[0, -1].argmax()))
            new = found[-1:]
        return found


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    directory, made = tmp_path_factory.mktemp("tiny"), {}
    for tiny in FAMILIES:
        model = build(tiny)
        model.save_pretrained(directory / tiny.name)
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT])).logits[0]
        made[tiny.name] = Reference(directory / tiny.name, model, logits)
    return made


@pytest.mark.parametrize("size", SIZES)
def test_equals_transformers(size: int, references: dict[str, Reference]) -> None:
    """The prompt, and 64 tokens after it in serial, fused and weave."""
    cases, names = [], []
    for name, reference in references.items():
        if size <= reference.heads:
            cases += [Case(reference.path, PROMPT, mode, greedy=64 if mode != "reordered" else 0) for mode in MODES]
            names += [name] * len(MODES)
    check(cases, names, references, size, "shared_memory")


@pytest.mark.parametrize("size", [2, 3])
def test_over_sockets(size: int, references: dict[str, Reference]) -> None:
    cases = [Case(references[name].path, PROMPT, mode) for name in references for mode in MODES]
    check(cases, [name for name in references for _ in MODES], references, size, "distributed")


def test_prompts_in_chunks(references: dict[str, Reference]) -> None:
    """A chunk knows the whole prompt's length: dynamic rope, and keys that a window has left behind."""
    names = ["dynamic-rope", "mistral", "qwen2-window", "mixtral"]
    modes = {"fused": (5, 6), "weave": (7,)}  # cut 6 within a chunk as well
    cases = [Case(references[n].path, PROMPT, m, greedy=8, chunks=c, cut=3) for n in names for m, c in modes.items()]
    check(cases, [name for name in names for _ in modes], references, 2, "shared_memory")


def check(cases: list[Case], names: list[str], references: dict[str, Reference], size: int, collective: str) -> None:
    results = launch(run_cases, tensor_parallel_size=size, collective=collective, args=(cases,), timeout=300.0)[0]
    for name, case, (logits, tokens) in zip(names, cases, results, strict=True):
        error = relative(logits, references[name].logits)
        assert error <= TOLERANCE, f"{name}, {case.mode}, {size} ranks: {error:.2e}"
        assert len(tokens) == case.greedy and references[name].confirms(tokens), f"{name}, {case.mode}, {size} ranks"


def test_faults_are_seen(tmp_path: Path) -> None:
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


def test_bfloat16_is_as_close_as_transformers(references: dict[str, Reference]) -> None:
    for tiny in (tiny for tiny in FAMILIES if tiny.name in ("llama", "qwen2", "qwen3", "mistral")):
        path, exact = references[tiny.name].path, references[tiny.name].logits
        with torch.no_grad():
            theirs = build(tiny, torch.bfloat16)(torch.tensor([PROMPT])).logits[0].float()
        bound = 1.2 * float((theirs - exact).norm())
        cases = [Case(path, PROMPT, mode, torch.bfloat16) for mode in MODES]
        for mode, (ours, _) in zip(MODES, launch(run_cases, tensor_parallel_size=2, args=(cases,))[0], strict=True):
            assert float((ours - exact).norm()) <= bound, f"{tiny.name}, {mode}"
