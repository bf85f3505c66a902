"""The head and its cross entropy by chunks of tokens, so that the logits of all tokens never exist."""

from typing import Any, cast

import torch

from tokenweave.layers.cross_entropy import (
    DEFAULT,
    LossOptions,
    Vocabulary,
    check_targets,
    gradient_in_place,
    losses_of,
)

ADDED = 1 << 20  # numbers: 4 MB in float32


def head_loss(
    rows: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    vocabulary: Vocabulary,
    options: LossOptions = DEFAULT,
    *,
    count: int | None = None,
) -> torch.Tensor:
    """The sum of the targets' losses divided by `count`, by default the number of targets that are not ignored.

    rows: [tokens, hidden], the same on every rank. weight: [own vocabulary rows, hidden]. targets: int64 [tokens].
    count: what a mean over several calls divides by, when gradients accumulate.
    The gradient is made with the loss, chunk by chunk (the logits of a chunk become its gradient in place), so that the
    backward pass has only to scale it: three matrix products, not the four of a pass that computes the logits again.
    Each rank's gradient of rows is that of its own logits: `copy_to_ranks` or `gather_rows` in front of it sums them.
    """
    if rows.dim() != 2 or rows.shape[1] != weight.shape[1] or weight.shape[0] != vocabulary.own:
        raise ValueError(
            f"rows [tokens, hidden] and weight [{vocabulary.own}, hidden] must fit, got {list(rows.shape)} and "
            f"{list(weight.shape)}"
        )
    check_targets(targets, len(rows), vocabulary, options)
    if count is None:
        count = int((targets != options.ignore_index).sum())
    wanted = torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)
    return cast(torch.Tensor, _HeadLoss.apply(rows, weight, targets, vocabulary, options, count, wanted))


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        vocabulary: Vocabulary,
        options: LossOptions,
        count: int,
        wanted: bool,
    ) -> torch.Tensor:
        kind = torch.float64 if rows.dtype == torch.float64 else torch.float32
        total = rows.new_zeros((), dtype=kind)
        grad_rows = torch.empty_like(rows) if wanted else None
        grad_weight = torch.zeros_like(weight, dtype=kind) if wanted else None
        unit = rows.new_full((min(len(rows), vocabulary.chunk),), 1 / max(count, 1), dtype=kind)
        for start in range(0, len(rows), vocabulary.chunk):
            piece = slice(start, start + vocabulary.chunk)
            own, aims = rows[piece], targets[piece]
            logits = own @ weight.t()
            losses, denominators = losses_of(logits, aims, vocabulary, options)
            total += losses.sum()
            if grad_rows is not None and grad_weight is not None:
                gradient_in_place(logits, aims, denominators, unit[: len(own)], vocabulary, options)
                torch.mm(logits, weight, out=grad_rows[piece])
                if grad_weight.dtype == weight.dtype:
                    grad_weight.addmm_(logits.t(), own)
                else:
                    _add(grad_weight, logits.t() @ own)
        ctx.save_for_backward(*(t for t in (grad_rows, grad_weight) if t is not None))
        ctx.weight_dtype = weight.dtype
        return total / count if count else total * torch.nan

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_rows, grad_weight = ctx.saved_tensors
        grad_rows *= grads[0].to(grad_rows.dtype)  # in place: the pass can run once
        grad_weight *= grads[0]
        return grad_rows, grad_weight.to(ctx.weight_dtype), None, None, None, None, None


def _add(total: torch.Tensor, narrow: torch.Tensor) -> None:
    """total += narrow, by rows: torch on the CPU first makes a float32 copy of a narrow term."""
    rows = max(1, ADDED // total.shape[1])
    for part, term in zip(total.split(rows), narrow.split(rows), strict=True):
        part += term
