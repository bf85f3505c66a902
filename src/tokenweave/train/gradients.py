"""Gradients of one step: accumulated, summed over the ranks that hold the same weights, their norm taken once."""

from collections.abc import Sequence

import torch
from torch import nn

from tokenweave.comm.collective import Collective
from tokenweave.models.decoder import Decoder
from tokenweave.train.parts import Part, Shared, norms_between_stages
from tokenweave.train.pieces import in_pieces


class Gradients:
    """One tensor for each parameter: its `.grad`, or a float32 sum beside it where narrow gradients accumulate.

    Inside a stage each rank has the gradient of its own partial sum, so what several ranks hold alike (KV heads, norms
    of heads) has the sum of theirs. Norms between stages see all rows on every rank, and only with sequence parallelism
    are their gradients parts of a sum.
    collective: for float32 rows of any size, as small as 1 row.
    """

    def __init__(
        self,
        model: Decoder,
        parts: Sequence[Part],
        shared: Sequence[Shared],
        collective: Collective,
        *,
        rank: int,
        rows: int,
        sequence_parallel: bool,
        wide: bool,
    ) -> None:
        self.parameters: list[nn.Parameter] = list(model.parameters())
        self._parts, self._collective, self._rank, self._rows = parts, collective, rank, rows
        whole = set() if sequence_parallel else norms_between_stages(model)
        names = {part.name for part in parts if id(part.parameter) in whole}
        self._summed = [item for item in shared if item.key[0] not in names]
        self._wide = [torch.zeros_like(p, dtype=torch.float32) for p in self.parameters] if wide else None
        self._index = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        # made here and not by the first backward pass, which would strew them among activations: what those leave
        # would be gaps that later steps do not fit into, 45 MB more of 250
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)

    @property
    def tensors(self) -> list[torch.Tensor]:
        if self._wide is not None:
            return self._wide
        return [p.grad for p in self.parameters if p.grad is not None]

    def accumulate(self) -> None:
        """After each backward pass."""
        if self._wide is None:
            return  # autograd adds to .grad by itself
        for total, parameter in zip(self._wide, self.parameters, strict=True):
            if parameter.grad is not None:
                for part, term in zip(in_pieces(total), in_pieces(parameter.grad), strict=True):
                    part += term
                parameter.grad.zero_()

    def reduce(self) -> float:
        """After the last backward pass of a step: sum over ranks; returns the norm of the whole model's gradient."""
        tensors = self.tensors
        for item in self._summed:
            region = None if item.part is None else item.part.of(tensors[self._index[id(item.part.parameter)]])
            self._sum(item.count, region)
        squares = 0.0
        for part in self._parts:
            if part.holders[0] == self._rank:
                own = part.of(tensors[self._index[id(part.parameter)]])
                squares += sum(float(piece.double().square().sum()) for piece in in_pieces(own))
        return self.total(squares) ** 0.5

    def total(self, value: float) -> float:
        """Every rank's value, summed."""
        row = self._collective.buffer(0, 1).zero_()
        row[0, 0] = value
        return float(self._collective.all_reduce(row)[0, 0])

    def clear(self) -> None:
        """For the next step."""
        for tensor in self.tensors:
            tensor.zero_()

    def _sum(self, count: int, region: torch.Tensor | None) -> None:
        """Sum over the ranks in place; a rank without the region adds zeros."""
        flat = torch.zeros(count) if region is None else region.float().flatten()
        width = self._collective.buffer(0, 1).shape[1]
        for piece in flat.split(self._rows * width):
            rows = self._collective.buffer(0, -(-len(piece) // width)).zero_()
            rows.view(-1)[: len(piece)] = piece
            piece.copy_(self._collective.all_reduce(rows).view(-1)[: len(piece)])
        if region is not None:
            region.copy_(flat.view_as(region))
