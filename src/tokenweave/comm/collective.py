"""What every collective offers, and how it fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # the caller's process needs the error alone, and starts a second faster without torch
    import torch


class CommunicationError(RuntimeError):
    """A collective could not finish: a peer died, came late or came with another shape. The group is closed."""


class Collective(Protocol):
    """The operations of one group over `lanes` independent channels. T is at most max_tokens; T = 0 is fine.

    Rows of rank r of a lane of T tokens: [r*T//N, (r+1)*T//N). Sums run over ranks 0..N-1 in that order, in fp32.
    Calls on one lane come in the same order on every rank. Every wait has a deadline; past it, or when a peer has died
    or came with other shapes, CommunicationError names rank, operation and lane on every rank, and the group is closed.
    """

    rank: int
    size: int
    copies: int  # partials that were not in a communication buffer and had to be copied in

    def buffer(self, lane: int, tokens: int) -> torch.Tensor:
        """This rank's [tokens, hidden] communication buffer of the lane; the same memory at every call."""
        ...

    def all_reduce_add_rms_norm(
        self,
        partial: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        lane: int = 0,
        budget: int | None = None,
    ) -> torch.Tensor:
        """The fused operation (arXiv 2505.11329, section 3.2).

        partial: [T, hidden], this rank's partial sum; the returned tensor, [T, hidden], holds the normed rows on every
        rank. It is `partial` itself when that is the lane's buffer, else the lane's buffer (the copy in is counted).
        residual: [own rows, hidden], updated in place. weight: [hidden], of partial's dtype or float32.
        Equals, per row: y = (sum of partials in rank order, fp32) + residual, rounded to the dtype and stored as the
        residual; then x = (weight_fp32 * (y * rsqrt(mean(y*y) + eps)) rounded to the dtype) rounded to the dtype.
        """
        ...

    def all_reduce(self, partial: torch.Tensor, *, lane: int = 0) -> torch.Tensor:
        """Sum [T, hidden] over the ranks; returned in the lane's buffer on every rank."""
        ...

    def reduce_scatter(self, partial: torch.Tensor, *, lane: int = 0) -> torch.Tensor:
        """Sum [T, hidden] over the ranks; returns this rank's rows, [own rows, hidden], private memory."""
        ...

    def all_gather(self, rows: torch.Tensor, tokens: int, *, lane: int = 0) -> torch.Tensor:
        """Every rank's rows, [own rows, hidden] each, as [tokens, hidden] in the lane's buffer on every rank."""
        ...

    def gather(self, columns: torch.Tensor, widths: list[int], *, lane: int = 0) -> torch.Tensor | None:
        """Column slices [n, widths[rank]] side by side, [n, sum(widths)], on rank 0; None on the others.

        Any n and widths: what does not fit the buffers goes in pieces."""
        ...

    def broadcast(self, tensor: torch.Tensor, root: int = 0, *, lane: int = 0) -> torch.Tensor:
        """Root's tensor, in place, on every rank. Any shape and dtype, the same on every rank."""
        ...

    def barrier(self, *, lane: int = 0) -> None: ...

    def check(self) -> None:
        """Raise CommunicationError if the group has ended. On a GPU an operation returns before it has run, and what it
        finds wrong is raised by the next call, or here once the GPU has been waited for."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Collective: ...

    def __exit__(self, *exc: object) -> None: ...
