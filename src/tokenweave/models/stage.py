"""The unit that executors run."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenweave.layers.batch import Batch
from tokenweave.layers.norm import RMSNorm


@dataclass(frozen=True)
class Stage:
    """A block whose result the ranks must sum, and the norm that follows the sum.

    compute(normed, batch, out): this rank's partial sum, [tokens, hidden]. `normed` is the previous stage's result
    (None for the embedding). `out`, where given, receives the partial and may be the very memory of `normed`: it is
    written only after the last read of `normed`. With out=None a fresh tensor is returned.
    """

    name: str
    compute: Callable[[torch.Tensor | None, Batch, torch.Tensor | None], torch.Tensor]
    norm: RMSNorm
