"""Gradients of every parameter, and their norm, against transformers' own model in float64, at every rank count."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import FAMILIES, Tiny, build
from train.train_ranks import Case, gradients

from tokenweave.comm import launch
from tokenweave.train.config import TrainingConfig

TOLERANCE = 1e-5  # relative to a tensor's norm, float32
LENGTH = 13
ONE_KV_HEAD = Tiny("qwen3-one-kv-head", "Qwen3Config", dict(head_dim=24, num_key_value_heads=1, attention_bias=True))
NAMES = ("llama", "llama-odd", "llama-bias", "llama3-rope", "qwen2", "qwen2-tied", "qwen3", "qwen3-tied", "mixtral",
         "qwen3-moe", "qwen3-moe-sums")  # fmt: skip
MODELS = [*(tiny for tiny in FAMILIES if tiny.name in NAMES), ONE_KV_HEAD]
VARIANTS: list[dict[str, Any]] = [
    {"sequence_parallel": True},
    {"sequence_parallel": False},
    {"sequence_parallel": True, "recompute": True},
    {"sequence_parallel": False, "recompute": True, "accumulation": 3},
]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, np.ndarray, float, dict]]:
    """Per model: checkpoint, windows, mean loss, gradients by name."""
    directory, made = tmp_path_factory.mktemp("gradients"), {}
    for tiny in MODELS:
        model = build(tiny)
        model.save_pretrained(directory / tiny.name)
        windows = np.random.default_rng(len(tiny.name)).integers(0, 509, (3, LENGTH + 1))
        model = model.double()
        ids = torch.from_numpy(windows)
        logits = model(ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        grads = {name: grad for key, p in model.named_parameters() for name, grad in in_checkpoint(key, p.grad, tiny)}
        made[tiny.name] = (directory / tiny.name, windows, float(loss.detach()), grads)
    return made


def in_checkpoint(name: str, gradient: torch.Tensor, tiny: Tiny) -> Iterator[tuple[str, torch.Tensor]]:
    """transformers holds a layer's experts in two tensors; checkpoints have three for each expert."""
    mixtral = tiny.name == "mixtral"
    name = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
    prefix, _, kind = name.rpartition(".")
    if not prefix.endswith(".experts"):
        yield name, gradient
        return
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for expert, one in enumerate(gradient):
        if kind == "down_proj":
            yield f"{prefix}.{expert}.{down}.weight", one
        else:
            assert kind == "gate_up_proj"
            yield f"{prefix}.{expert}.{gate}.weight", one.chunk(2)[0]
            yield f"{prefix}.{expert}.{up}.weight", one.chunk(2)[1]


def cases_of(oracle: dict, variants: list[dict[str, Any]], **more: Any) -> tuple[list[str], list[Case]]:
    names, cases = [], []
    for name, (path, windows, _, _) in oracle.items():
        for variant in variants:
            names.append(name)
            config = TrainingConfig(batch_size=len(windows), length=LENGTH, **variant)
            cases.append(Case(path, windows, config, **more))
    return names, cases


def errors(ranks: list[dict[str, Any]], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest relative error of each tensor's parts over the ranks; every rank's part of a tensor is compared."""
    found: dict[str, float] = {}
    for rank in ranks:
        for name, dim, part, gradient in rank["gradients"]:
            whole = expected[name]
            own = whole if part is None else whole.transpose(0, dim)[part].transpose(0, dim)
            error = float((gradient.double() - own).norm() / own.norm())
            found[name] = max(error, found.get(name, 0.0))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equal_transformers(size: int, oracle: dict) -> None:
    names, cases = cases_of(oracle, VARIANTS)
    per_rank = launch(gradients, size, "shared_memory", args=(cases,))
    for index, (name, case) in enumerate(zip(names, cases, strict=True)):
        ranks = [found[index] for found in per_rank]
        _, _, loss, expected = oracle[name]
        where = f"{name}, {size} ranks, {case.config}"
        assert all(rank["loss"] == ranks[0]["loss"] and rank["norm"] == ranks[0]["norm"] for rank in ranks), where
        found = errors(ranks, expected)
        assert set(found) == set(expected), where
        worst = max(found, key=found.__getitem__)
        assert found[worst] <= TOLERANCE, f"{where}: {worst} is off by {found[worst]:.1e}"
        assert ranks[0]["loss"] == pytest.approx(loss, rel=1e-6), where
        norm = float(torch.stack([g.norm() for g in expected.values()]).norm())
        assert ranks[0]["norm"] == pytest.approx(norm, rel=TOLERANCE), where


def test_over_sockets(oracle: dict) -> None:
    """The other collective."""
    names, cases = cases_of({"llama-bias": oracle["llama-bias"]}, VARIANTS[:2])
    for ranks in zip(*launch(gradients, 2, "distributed", args=(cases,)), strict=True):
        assert max(errors(list(ranks), oracle[names[0]][3]).values()) <= TOLERANCE


@pytest.mark.parametrize(
    ("fault", "name", "sees"),
    [
        ("routers not summed", "mixtral", "gate.weight"),
        ("norms not summed", "llama", "layernorm"),
        ("sharers not summed", "llama-bias", "k_proj"),
        ("copies counted", "llama-bias", ""),
        ("no sum in front of a stage", "llama", "embed_tokens"),
    ],
)
def test_a_fault_is_seen(fault: str, name: str, sees: str, oracle: dict) -> None:
    variant = {"sequence_parallel": fault != "no sum in front of a stage"}
    _, cases = cases_of({name: oracle[name]}, [variant], fault=fault)
    ranks = [found[0] for found in launch(gradients, 2, "shared_memory", args=(cases,))]
    found = errors(ranks, oracle[name][3])
    norm = float(torch.stack([g.norm() for g in oracle[name][3].values()]).norm())
    if sees:
        assert any(error > 1e-2 for tensor, error in found.items() if sees in tensor)
    assert ranks[0]["norm"] != pytest.approx(norm, rel=1e-4)
