"""Kernels are ready after preparation, and only a long one is told."""

import time

import pytest
import torch

from tokenweave.engine import warmup


def test_long_preparation_is_told_by_rank_0_alone(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "NOTICE_SECONDS", 0.01)
    monkeypatch.setattr(warmup, "warm_up", lambda dtype: time.sleep(0.3))
    warmup.prepare_kernels(torch.float32, 1)
    assert capfd.readouterr().err == ""
    warmup.prepare_kernels(torch.float32, 0)
    assert "compiling" in capfd.readouterr().err


def test_every_dtype_can_be_prepared() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        warmup.prepare_kernels(dtype, 0)
