"""The head and its loss by chunks: value and gradients against torch over the whole vocabulary, in float64."""

import pytest
import torch
from layers.thread_ranks import ThreadCollective, ThreadGroup
from torch.nn import functional as F

from tokenweave.config import partition
from tokenweave.layers.cross_entropy import LossOptions, Vocabulary
from tokenweave.layers.head_loss import head_loss

HIDDEN = 6


def run(
    rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, size: int, chunk: int, **more: object
) -> tuple:
    """Loss, gradient of rows (summed over ranks) and of the whole weight."""
    vocab = weight.shape[0]

    def one(collective: ThreadCollective, rank: int) -> tuple[torch.Tensor, ...]:
        own = partition(vocab, size, rank)
        leaf, part = rows.clone().requires_grad_(), weight[own].clone().requires_grad_()
        vocabulary = Vocabulary(vocab, own, size, collective, chunk)  # type: ignore[arg-type]
        options = LossOptions(label_smoothing=0.1)
        loss = head_loss(leaf, part, targets, vocabulary, options, **more)  # type: ignore[arg-type]
        (3 * loss).backward()
        assert leaf.grad is not None and part.grad is not None
        return loss.detach(), leaf.grad, part.grad

    found = ThreadGroup(size).run(one, range(size))
    assert all(torch.equal(found[0][0], other[0]) for other in found)
    return found[0][0], torch.stack([f[1] for f in found]).sum(0), torch.cat([f[2] for f in found])


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)]
)
def test_equals_torch(size: int, chunk: int, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(13, HIDDEN).to(dtype), torch.randn(33, HIDDEN).to(dtype)
    targets = torch.randint(33, (13,))
    targets[4] = -100
    found = run(rows, weight, targets, size, chunk)
    wide, wide_weight = (t.double().requires_grad_() for t in (rows, weight))
    loss = F.cross_entropy(wide @ wide_weight.t(), targets, label_smoothing=0.1)
    expected = loss, *torch.autograd.grad(3 * loss, (wide, wide_weight))
    for one, other in zip(found, expected, strict=True):
        other = other.detach()
        assert float((one.double() - other).norm() / other.norm()) <= tolerance


def test_a_count_makes_parts_of_a_mean() -> None:
    rows, weight = torch.randn(8, HIDDEN), torch.randn(9, HIDDEN)
    targets = torch.randint(9, (8,))
    whole = run(rows, weight, targets, 2, 3)
    parts = [run(rows[i : i + 4], weight, targets[i : i + 4], 2, 3, count=8) for i in (0, 4)]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0])
    torch.testing.assert_close(parts[0][2] + parts[1][2], whole[2])


def test_no_gradient_no_work_for_one() -> None:
    vocabulary = Vocabulary(9, slice(0, 9), 1, ThreadCollective(ThreadGroup(1), 0), 3)  # type: ignore[arg-type]
    rows, weight, targets = torch.randn(8, HIDDEN), torch.randn(9, HIDDEN, requires_grad=True), torch.randint(9, (8,))
    with torch.no_grad():
        loss = head_loss(rows, weight, targets, vocabulary)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, F.cross_entropy(rows @ weight.detach().t(), targets))
    assert head_loss(rows, weight, torch.full((8,), -100), vocabulary).isnan()
    with pytest.raises(ValueError, match="must fit"):
        head_loss(rows[:, :3], weight, targets, vocabulary)
    with pytest.raises(ValueError, match="targets"):
        head_loss(rows, weight, targets + 9, vocabulary)
