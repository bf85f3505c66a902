"""Kernels are ready after preparation, and only a long one is told."""

import time

import pytest
import torch

from tokenweave.engine import warmup


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
