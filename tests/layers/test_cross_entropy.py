"""Vocabulary-parallel cross entropy against torch's own over the whole logits, in float64."""

import math
from collections.abc import Callable

import pytest
import torch
from layers.thread_ranks import ThreadCollective, ThreadGroup, as_one
from torch.autograd import gradcheck
from torch.nn import functional as F

from tokenweave.comm import Group, launch
from tokenweave.config import partition
from tokenweave.layers.cross_entropy import LossOptions, Vocabulary, vocab_parallel_cross_entropy

IGNORED = -100


def oracle(logits: torch.Tensor, targets: torch.Tensor, smoothing: float, z_loss: float) -> torch.Tensor:
    """Losses of the whole logits."""
    losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing, ignore_index=IGNORED)
    return losses + z_loss * logits.logsumexp(1).square() * (targets != IGNORED)


def losses_and_gradient(
    logits: torch.Tensor, targets: torch.Tensor, size: int, options: LossOptions, grad: torch.Tensor, chunk: int = 5
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Every rank's losses, and the ranks' gradients side by side."""
    vocab = logits.shape[1]

    def one(collective: ThreadCollective, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = partition(vocab, size, rank)
        own = logits[:, rows].clone().requires_grad_()
        vocabulary = Vocabulary(vocab, rows, size, collective, chunk)  # type: ignore[arg-type]
        losses = vocab_parallel_cross_entropy(own * 1, targets, vocabulary, options)
        losses.backward(grad.to(losses.dtype))
        assert own.grad is not None
        return losses.detach(), own.grad

    found = ThreadGroup(size).run(one, range(size))
    return [losses for losses, _ in found], torch.cat([grads for _, grads in found], 1)


def case(vocab: int, tokens: int = 13, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(vocab)
    logits = torch.randn(tokens, vocab) * scale
    targets = torch.randint(vocab, (tokens,))
    targets[0], targets[-1] = 0, vocab - 1  # the first and the last rank's
    targets[tokens // 2] = IGNORED
    return logits, targets


@pytest.mark.parametrize("scale", [1.0, 1000.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("vocab", [7, 32001, 151936])
def test_equals_torch(vocab: int, size: int, smoothing: float, scale: float) -> None:
    logits, targets = case(vocab, scale=scale)
    grad = torch.rand(len(targets)) + 0.5
    for z_loss in (0.0, 1e-4):
        options = LossOptions(label_smoothing=smoothing, z_loss=z_loss)
        ranks, gradient = losses_and_gradient(logits, targets, size, options, grad)
        wide = logits.double().requires_grad_()
        expected = oracle(wide, targets, smoothing, z_loss)
        expected.backward(grad.double())
        assert all(torch.equal(ranks[0], other) for other in ranks)
        torch.testing.assert_close(ranks[0].double(), expected.detach(), rtol=2e-6, atol=2e-6)
        assert wide.grad is not None
        assert float((gradient.double() - wide.grad).norm() / wide.grad.norm()) <= 2e-6


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_eight_tokens_of_vocabulary_on_two_ranks(scale: float) -> None:
    """Smoothing over the local vocabulary is off by a factor, a local maximum or sum by log(ranks)."""
    logits, targets = case(8, tokens=64, scale=scale)
    ranks, _ = losses_and_gradient(logits, targets, 2, LossOptions(label_smoothing=0.1), torch.ones(64))
    torch.testing.assert_close(ranks[0].double(), oracle(logits.double(), targets, 0.1, 0.0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_one_rank_has_every_target(owner: int) -> None:
    logits, _ = case(9)
    targets = torch.full((13,), 3 * owner + 1)
    ranks, gradient = losses_and_gradient(logits, targets, 3, LossOptions(), torch.ones(13))
    wide = logits.double().requires_grad_()
    expected = oracle(wide, targets, 0.0, 0.0)
    expected.sum().backward()
    torch.testing.assert_close(ranks[0].double(), expected.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), wide.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_computed_wide(dtype: torch.dtype) -> None:
    logits, targets = case(577, scale=8.0)
    logits = logits.to(dtype)
    ranks, gradient = losses_and_gradient(logits, targets, 2, LossOptions(label_smoothing=0.1), torch.ones(13))
    wide = logits.double().requires_grad_()
    expected = oracle(wide, targets, 0.1, 0.0)
    expected.sum().backward()
    assert gradient.dtype == dtype
    torch.testing.assert_close(ranks[0].double(), expected.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), wide.grad, rtol=8e-3, atol=2e-6)  # one rounding to the narrow type


@pytest.mark.parametrize(("top", "kind"), [(3e38, "huge"), (-math.inf, "masked")])
def test_logits_at_the_end_of_float32(top: float, kind: str) -> None:
    """A whole rank's columns are huge and negative, or masked out."""
    logits, targets = case(8)
    targets = torch.where(targets == IGNORED, targets, targets % 4)
    logits[:, 4:] = -abs(top)
    ranks, gradient = losses_and_gradient(logits, targets, 2, LossOptions(), torch.ones(13))
    expected = oracle(logits.double(), targets, 0.0, 0.0)
    torch.testing.assert_close(ranks[0].double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.isfinite(gradient).all() and not gradient[:, 4:].any()


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int) -> None:
    logits, targets = torch.randn(tokens, 7), torch.zeros(tokens, dtype=torch.int64)
    ranks, gradient = losses_and_gradient(logits, targets, 2, LossOptions(), torch.ones(tokens))
    torch.testing.assert_close(ranks[0].double(), oracle(logits.double(), targets, 0, 0), rtol=1e-6, atol=1e-6)
    assert gradient.shape == (tokens, 7)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"z_loss": 0.3}])
def test_gradcheck(options: dict[str, float]) -> None:
    vocab, size, targets = 7, 3, torch.tensor([0, 3, IGNORED, 6])

    def loss(collective: ThreadCollective, own: torch.Tensor) -> torch.Tensor:
        rows = partition(vocab, size, collective.rank)
        vocabulary = Vocabulary(vocab, rows, size, collective, 3)  # type: ignore[arg-type]
        return vocab_parallel_cross_entropy(own, targets, vocabulary, LossOptions(**options))

    widths = [partition(vocab, size, rank) for rank in range(size)]
    inputs = [torch.randn(4, w.stop - w.start, dtype=torch.float64, requires_grad=True) for w in widths]
    assert gradcheck(as_one(ThreadGroup(size), loss, shared_input=False, alike=True), inputs)


def alone(vocab: int) -> Vocabulary:
    return Vocabulary(vocab, slice(0, vocab), 1, ThreadCollective(ThreadGroup(1), 0), 64)  # type: ignore[arg-type]


def test_the_mean_is_over_what_counts() -> None:
    logits, targets = case(7)
    for smoothing in (0.0, 0.1):
        options = LossOptions(label_smoothing=smoothing)
        found = vocab_parallel_cross_entropy(logits, targets, alone(7), options, reduction="mean")
        expected = F.cross_entropy(logits.double(), targets, label_smoothing=smoothing)
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    assert vocab_parallel_cross_entropy(logits, torch.full((13,), IGNORED), alone(7), reduction="mean").isnan()


def test_the_gradient_takes_the_place_of_the_logits() -> None:
    logits, targets = case(33)
    logits.requires_grad_()
    own = logits * 1
    seen: list[int] = []
    logits.register_hook(lambda grad: seen.append(grad.data_ptr()))
    loss = vocab_parallel_cross_entropy(own, targets, alone(33)).sum()
    loss.backward(retain_graph=True)
    assert torch.equal(own.detach(), logits.grad)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: LossOptions(label_smoothing=1.0), "label_smoothing"),
    (lambda: LossOptions(z_loss=-1.0), "z_loss"),
    (lambda: vocab_parallel_cross_entropy(torch.zeros(2, 6), torch.zeros(2).long(), alone(7)), "logits"),
    (lambda: vocab_parallel_cross_entropy(torch.zeros(2, 7), torch.zeros(3).long(), alone(7)), "targets"),
    (lambda: vocab_parallel_cross_entropy(torch.zeros(2, 7), torch.zeros(2), alone(7)), "int64"),
    (lambda: vocab_parallel_cross_entropy(torch.zeros(1, 7), torch.tensor([7]), alone(7)), "got 7"),
    (lambda: vocab_parallel_cross_entropy(torch.zeros(1, 7), torch.tensor([-1]), alone(7)), "got -1"),
    (lambda: vocab_parallel_cross_entropy(torch.zeros(1, 7), torch.tensor([0]), alone(7), reduction="sum"), "sum"),
]


@pytest.mark.parametrize(("call", "word"), REFUSED)
def test_what_is_refused(call: Callable[[], object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        call()


def losses_on_a_rank(group: Group, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    rows = partition(logits.shape[1], group.size, group.rank)
    with group.open_collective(4, 5 * group.size, torch.float32) as collective:
        vocabulary = Vocabulary(logits.shape[1], rows, group.size, collective, 5)
        return vocab_parallel_cross_entropy(logits[:, rows].contiguous(), targets, vocabulary)


@pytest.mark.parametrize("collective", ["shared_memory", "distributed"])
def test_over_real_collectives(collective: str) -> None:
    logits, targets = case(577)
    ranks = launch(losses_on_a_rank, 2, collective, args=(logits, targets))
    assert torch.equal(ranks[0], ranks[1])
    torch.testing.assert_close(ranks[0].double(), oracle(logits.double(), targets, 0, 0), rtol=1e-6, atol=1e-6)
