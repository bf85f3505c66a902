"""Loss curves over 50 steps at every rank count against transformers' model under torch's own AdamW and clipping."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import FAMILIES, build
from train.train_ranks import Case, losses

from tokenweave.comm import launch
from tokenweave.train.config import TrainingConfig

STEPS, BATCH, LENGTH = 50, 4, 13
CONFIG = dict(
    steps=STEPS, batch_size=BATCH, length=LENGTH, learning_rate=2e-3, final_learning_rate=2e-4, warmup_steps=5,
    clip_norm=0.7,
)  # fmt: skip


def transformers_curve(model: torch.nn.Module, windows: np.ndarray) -> list[float]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    curve = []
    for step in range(STEPS):
        rate = 2e-3 * (step + 1) / 6
        if step >= 5:
            rate = 2e-4 + 0.5 * (1 + math.cos(math.pi * (step - 5) / (STEPS - 6))) * (2e-3 - 2e-4)
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids = torch.from_numpy(windows[step * BATCH : (step + 1) * BATCH])
        logits = model(ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        optimizer.step()
        curve.append(float(loss.detach()))
    return curve


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, np.ndarray, list[float]]]:
    directory, made = tmp_path_factory.mktemp("curves"), {}
    for tiny in FAMILIES:
        if tiny.name in ("llama-bias", "qwen3-tied"):  # one KV head and biases; tied, three KV heads, norms of heads
            model = build(tiny).train()
            model.save_pretrained(directory / tiny.name)
            draw = np.random.default_rng(7)
            text = draw.choice(
                40, p=(weights := draw.random(40) ** 4) / weights.sum(), size=(STEPS * BATCH, LENGTH + 1)
            )
            made[tiny.name] = (directory / tiny.name, text, transformers_curve(model, text))
    return made


@pytest.mark.parametrize("size", [2, 3, 4])
def test_equal_transformers(size: int, oracle: dict) -> None:
    variants = [{}, {"sequence_parallel": False, "recompute": True, "accumulation": 2}]
    names = [name for name in oracle for _ in variants]
    cases = [
        Case(oracle[name][0], oracle[name][1], TrainingConfig(**(CONFIG | variant)))  # type: ignore[arg-type]
        for name in oracle
        for variant in variants
    ]
    for rank in launch(losses, size, "shared_memory", args=(cases,)):
        for name, curve in zip(names, rank, strict=True):
            expected = oracle[name][2]
            assert expected[-1] < 0.8 * expected[0]  # it learns
            assert np.abs(np.array(curve) - np.array(expected)).max() <= 1e-4, name
