"""A function that keeps its input alone and runs again in the backward pass."""

from collections.abc import Callable
from typing import Any, cast

import torch

Run = Callable[[torch.Tensor], torch.Tensor]


def recomputed(run: Run, x: torch.Tensor) -> torch.Tensor:
    """run(x), and its gradients, of x and of the parameters it uses, from a second run.

    run must do the same again. torch.utils.checkpoint has more options, and imports a compiler on its first
    call: 100 MB and 2 s.
    """
    if not torch.is_grad_enabled():
        return run(x)
    return cast(torch.Tensor, _Recomputed.apply(x, run))


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: Run) -> torch.Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with (
            torch.enable_grad()
        ):  # as the second time: without gradients layers take other kernels, which round otherwise
            return run(x.detach()).detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        (x,) = ctx.saved_tensors
        again = x.detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.run(again), grads[0])
        return again.grad, None
