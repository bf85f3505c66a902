"""How a layer says which parts of which checkpoint tensors make up its own parameters."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Piece:
    """One part of one checkpoint tensor, to be copied into `target`, a view of a layer's parameter.

    name: the tensor's full name in a Hugging Face checkpoint. shape: of the whole tensor.
    part: the slice of its first or second dimension (`dim`) that this rank holds; None for all of it.
    """

    name: str
    shape: tuple[int, ...]
    target: torch.Tensor
    dim: int = 0
    part: slice | None = None


Pieces = Iterator[Piece]
