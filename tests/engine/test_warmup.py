"""Kernels are ready after preparation, and only a long one is told."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenweave.engine import warmup
from tokenweave.layers.batch import Batch
from tokenweave.layers.cache import KVCache
from tokenweave.plan.step import StepPlan


def test_long_preparation_is_told_by_rank_0_alone(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "NOTICE_SECONDS", 0.01)
    prepared = []

    def take_long(dtype: torch.dtype) -> None:
        prepared.append(dtype)
        time.sleep(0.3)

    monkeypatch.setattr(warmup, "warm_up", take_long)
    warmup.prepare_kernels(torch.float32, 1)
    assert capfd.readouterr().err == ""
    warmup.prepare_kernels(torch.float16, 0)
    assert "compiling" in capfd.readouterr().err
    assert prepared == [torch.float32, torch.float16]


def test_quick_preparation_is_not_told(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "NOTICE_SECONDS", 0.2)
    monkeypatch.setattr(warmup, "warm_up", lambda dtype: None)
    warmup.prepare_kernels(torch.float32, 0)
    time.sleep(0.4)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "max_tokens, blocks, block_size, expected",
    [(2048, 8, 16, [1, 3]), (2, 8, 16, [1, 2]), (1, 8, 16, [1, 1]), (2048, 2, 1, [1, 1]), (2048, 1, 1, [1])],
)
def test_what_a_gpu_runs_first_fits_its_engine(
    max_tokens: int, blocks: int, block_size: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ran: list[tuple[int, list[int], str]] = []

    def forward(batch: Batch, plan: StepPlan) -> torch.Tensor:
        ran.append((batch.num_tokens, batch.context_lengths.tolist(), plan.mode))
        return torch.zeros(batch.num_tokens, 4)

    model = SimpleNamespace(config=SimpleNamespace(vocab_size=11), head=lambda rows: rows)
    executor: Any = SimpleNamespace(max_tokens=max_tokens, forward=forward, model=model)
    warmup.run_once(executor, KVCache.zeros(1, blocks, block_size, 1, 4, torch.float32, "cpu"), "auto")
    assert [tokens for tokens, _, mode in ran if mode == "fused"] == expected
    assert [entry[:2] for entry in ran[::2]] == [entry[:2] for entry in ran[1::2]]
    assert all(contexts == [tokens] for tokens, contexts, _ in ran[:2])
    assert all(contexts == [tokens + 1] for tokens, contexts, _ in ran[2:])
