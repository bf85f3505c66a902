"""AdamW against torch's own in float64, and narrow weights with float32 masters."""

import torch
from torch import nn

from tokenweave.train.adamw import AdamW
from tokenweave.train.config import TrainingConfig

CONFIG = TrainingConfig(weight_decay=0.2, beta1=0.8, beta2=0.95, epsilon=1e-6)


def trained(dtype: torch.dtype, start: list[torch.Tensor], grads: list[list[torch.Tensor]]) -> AdamW:
    optimizer = AdamW([nn.Parameter(t.to(dtype)) for t in start], CONFIG)
    for step, gradients in enumerate(grads):
        optimizer.step([g.to(dtype) for g in gradients], step, learning_rate=0.01 * (step + 1), scale=0.5)
    return optimizer


def drawn() -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    torch.manual_seed(0)
    start = [torch.randn(3, 5).bfloat16(), torch.randn(7).bfloat16()]
    return start, [[torch.randn(3, 5).bfloat16(), torch.randn(7).bfloat16()] for _ in range(20)]


def test_equals_torch() -> None:
    start, grads = drawn()
    wide = [t.double().requires_grad_() for t in start]
    groups = [{"params": wide[:1], "weight_decay": 0.2}, {"params": wide[1:], "weight_decay": 0.0}]
    oracle = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-6)
    for step, gradients in enumerate(grads):
        for tensor, gradient in zip(wide, gradients, strict=True):
            tensor.grad = gradient.double() * 0.5
        for group in oracle.param_groups:
            group["lr"] = 0.01 * (step + 1)
        oracle.step()
    for dtype in (torch.float32, torch.bfloat16):
        optimizer = trained(dtype, start, grads)
        for master, parameter, expected in zip(optimizer.masters, optimizer.parameters, wide, strict=True):
            torch.testing.assert_close(master.double(), expected.detach(), rtol=1e-5, atol=1e-6)
            assert torch.equal(parameter.data, master.to(dtype))


def test_float32_weights_are_their_own_masters() -> None:
    start, _ = drawn()
    for dtype in (torch.float32, torch.bfloat16):
        optimizer = trained(dtype, start, [])
        shared = [m.data_ptr() == p.data_ptr() for m, p in zip(optimizer.masters, optimizer.parameters, strict=True)]
        assert shared == [dtype == torch.float32] * 2
        assert all(m.dtype == s.dtype == torch.float32 for m, s in zip(optimizer.first, optimizer.second, strict=True))


def test_steps_too_small_for_bfloat16_add_up() -> None:
    """1 + 100 steps of 1e-4: bfloat16 alone would stay at 1."""
    optimizer = AdamW([nn.Parameter(torch.ones(1, dtype=torch.bfloat16))], CONFIG)
    for step in range(100):
        optimizer.step([torch.full((1,), -1.0, dtype=torch.bfloat16)], step, learning_rate=1e-4, scale=1.0)
    assert abs(optimizer.masters[0].item() - 1.01) < 1e-5
    assert optimizer.parameters[0].item() == 1.0078125
