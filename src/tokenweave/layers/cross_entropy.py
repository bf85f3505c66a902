"""Cross entropy of logits whose vocabulary is dealt out over the ranks (Megatron-LM, arXiv 1909.08053, section 3).

Each rank reduces its own columns to four numbers a token, ranks exchange these, and everything else is local: the
logits never travel. One exchange is one all-gather of [tokens, 4] float32 from each rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from tokenweave.comm.collective import Collective
from tokenweave.comm.group import Group
from tokenweave.config import Shard

MAX, SUM, TARGET, MEAN = range(
    4
)  # the largest logit, sum of exp(x - largest), the target's logit, sum of x / vocabulary
STATISTICS = 4
PIECE = 1 << 18  # logits that the CPU works on at once: 1 MB in float32, so that its temporaries stay in the cache


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """ignore_index: a target that counts for nothing. label_smoothing: the share of the target's probability that is
    dealt to the whole vocabulary, as torch's. z_loss: times the squared log of the softmax's denominator, added to each
    loss.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1), got {self.label_smoothing}")
        if self.z_loss < 0:
            raise ValueError(f"z_loss must not be negative, got {self.z_loss}")


DEFAULT = LossOptions()


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary over the ranks. rows: this rank's. collective: for rows of STATISTICS numbers, ranks * chunk of
    them. chunk: the tokens exchanged at once.
    """

    size: int
    rows: slice
    ranks: int
    collective: Collective
    chunk: int

    @staticmethod
    def open(group: Group, size: int, shard: Shard, chunk: int) -> "Vocabulary":
        """With a collective of its own. Every rank opens it with the same chunk."""
        collective = group.open_collective(STATISTICS, max(1, chunk) * group.size, torch.float32)
        return Vocabulary(size, shard.vocab_rows, group.size, collective, max(1, chunk))

    @property
    def own(self) -> int:
        return self.rows.stop - self.rows.start

    def gathered(self, statistics: torch.Tensor) -> torch.Tensor:
        """Every rank's [tokens, STATISTICS]: [ranks, tokens, STATISTICS]. Memory of the collective."""
        tokens = statistics.shape[0]
        return self.collective.all_gather(statistics, tokens * self.ranks).view(self.ranks, tokens, STATISTICS)


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    vocabulary: Vocabulary,
    options: LossOptions = DEFAULT,
    *,
    reduction: str = "none",
) -> torch.Tensor:
    """The losses of all tokens, [tokens], or their mean, alike on every rank; in float32 (float64 for float64 logits).

    logits: [tokens, own vocabulary rows], contiguous. targets: int64 [tokens], the same on every rank. reduction:
    "none", or "mean" over the targets that are not ignored (NaN if all are, as torch's). The backward pass writes the
    gradient over the logits, so it can run once, and the logits must not be used after it. Raises ValueError for shapes
    that do not fit and, on the CPU, for targets outside the vocabulary; on CUDA, where asking would wait for the
    device, such a target's loss is NaN.
    """
    check(logits, targets, vocabulary, options)
    if reduction not in ("none", "mean"):
        raise ValueError(f"reduction must be none or mean, got {reduction!r}")
    losses = cast(torch.Tensor, _CrossEntropy.apply(logits, targets, vocabulary, options))
    if reduction == "none":
        return losses
    return losses.sum() / (targets != options.ignore_index).sum()


def check(logits: torch.Tensor, targets: torch.Tensor, vocabulary: Vocabulary, options: LossOptions) -> None:
    """Raises ValueError as `vocab_parallel_cross_entropy` does."""
    if logits.dim() != 2 or logits.shape[1] != vocabulary.own:
        raise ValueError(f"logits must be [tokens, {vocabulary.own}], got {list(logits.shape)}")
    check_targets(targets, logits.shape[0], vocabulary, options)


def check_targets(targets: torch.Tensor, tokens: int, vocabulary: Vocabulary, options: LossOptions) -> None:
    if targets.shape != (tokens,) or targets.dtype != torch.int64:
        raise ValueError(f"targets must be int64 [{tokens}], got {targets.dtype} {list(targets.shape)}")
    if targets.is_cpu and bool((outside := _outside(targets, vocabulary, options)).any()):
        raise ValueError(f"targets must be in [0, {vocabulary.size}), got {int(targets[outside][0])}")


def _outside(targets: torch.Tensor, vocabulary: Vocabulary, options: LossOptions) -> torch.Tensor:
    return ((targets < 0) | (targets >= vocabulary.size)) & (targets != options.ignore_index)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, vocabulary: Vocabulary, options: LossOptions
    ) -> torch.Tensor:
        chunks = range(0, max(len(targets), 1), vocabulary.chunk)
        parts = [
            losses_of(logits[i : i + vocabulary.chunk], targets[i : i + vocabulary.chunk], vocabulary, options)
            for i in chunks
        ]
        losses, denominators = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        ctx.save_for_backward(logits, targets, denominators)
        ctx.vocabulary, ctx.options = vocabulary, options
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, targets, denominators = ctx.saved_tensors
        gradient_in_place(logits, targets, denominators, grads[0], ctx.vocabulary, ctx.options)
        return logits, None, None, None


def losses_of(
    logits: torch.Tensor, targets: torch.Tensor, vocabulary: Vocabulary, options: LossOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses, [tokens], and the softmax's denominators, of at most `chunk` tokens.

    denominators: [tokens, 2], the largest logit and the log of the sum of exp(x - largest). Of logits near 1000 their
    sum would keep four digits less.
    """
    smoothing = options.label_smoothing
    statistics = _statistics(logits, targets, vocabulary, smoothed=smoothing > 0)
    ranks = vocabulary.gathered(statistics)
    top = ranks[..., MAX]
    largest = top.amax(0)
    base = _finite(largest)
    log_sum = ((top - base).exp() * ranks[..., SUM]).sum(0).log()
    losses = log_sum + (base - ranks[..., TARGET].sum(0))
    if smoothing:
        losses = (1 - smoothing) * losses + smoothing * (log_sum + (base - ranks[..., MEAN].sum(0)))
    if options.z_loss:
        losses = losses + options.z_loss * (base + log_sum).square()
    losses = losses.masked_fill(targets == options.ignore_index, 0.0)
    if not targets.is_cpu:
        losses = losses.masked_fill(_outside(targets, vocabulary, options), float("nan"))
    return losses, torch.stack((base, log_sum), 1)


def gradient_in_place(
    logits: torch.Tensor,
    targets: torch.Tensor,
    denominators: torch.Tensor,
    grad_losses: torch.Tensor,
    vocabulary: Vocabulary,
    options: LossOptions,
) -> None:
    """Write each token's gradient, times grad_losses [tokens], over its logits."""
    grads = grad_losses.masked_fill(targets == options.ignore_index, 0.0)
    smoothing = options.label_smoothing
    scales = grads if not options.z_loss else grads * (1 + 2 * options.z_loss * denominators.sum(1))
    spread, hit = smoothing / vocabulary.size, 1 - smoothing
    if logits.is_cuda:
        from tokenweave.layers.kernels.cross_entropy_triton import (
            write_gradient,
        )  # Triton is not there on every machine

        write_gradient(logits, targets, denominators, scales, grads, vocabulary.rows.start, spread, hit)
        return
    local, foreign = _local(targets, vocabulary)
    hits = (grads * -hit).masked_fill(foreign, 0.0).unsqueeze(1)
    for piece in _pieces(logits):
        wide = _wide(logits[piece])  # of float32 logits the very memory
        wide.sub_(denominators[piece, :1]).sub_(denominators[piece, 1:]).exp_().mul_(scales[piece].unsqueeze(1))
        if smoothing:
            wide.sub_((grads[piece] * spread).unsqueeze(1))
        wide.scatter_add_(1, local[piece], hits[piece])
        if wide.dtype != logits.dtype:
            logits[piece] = wide


def _statistics(logits: torch.Tensor, targets: torch.Tensor, vocabulary: Vocabulary, *, smoothed: bool) -> torch.Tensor:
    """This rank's four numbers of each token, [tokens, STATISTICS]; MEAN is 0 unless `smoothed`."""
    kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
    found = logits.new_zeros(len(logits), STATISTICS, dtype=kind)
    if logits.is_cuda:
        from tokenweave.layers.kernels.cross_entropy_triton import write_statistics

        write_statistics(logits, targets, found, vocabulary.rows.start, vocabulary.size, smoothed)
        return found
    local, foreign = _local(targets, vocabulary)
    for piece in _pieces(logits):
        wide = _wide(logits[piece])
        top = wide.amax(1)
        found[piece, MAX] = top
        found[piece, SUM] = (wide - _finite(top).unsqueeze(1)).exp_().sum(1)
        found[piece, TARGET] = wide.gather(1, local[piece]).squeeze(1).masked_fill(foreign[piece], 0.0)
        if smoothed:
            found[piece, MEAN] = (wide / vocabulary.size).sum(1)  # a sum of logits first could overflow
    return found


def _local(targets: torch.Tensor, vocabulary: Vocabulary) -> tuple[torch.Tensor, torch.Tensor]:
    """The targets' columns on this rank, [tokens, 1], 0 for those of other ranks; and which these are, [tokens]."""
    local = targets - vocabulary.rows.start
    foreign = (local < 0) | (local >= vocabulary.own)
    return local.masked_fill(foreign, 0).unsqueeze(1), foreign


def _finite(top: torch.Tensor) -> torch.Tensor:
    """What to subtract before exp: the largest logit, or 0 where all are -inf."""
    return top.masked_fill(top == -torch.inf, 0.0)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _pieces(logits: torch.Tensor) -> Iterator[slice]:
    rows = max(1, PIECE // logits.shape[1])
    for start in range(0, len(logits), rows):
        yield slice(start, start + rows)
