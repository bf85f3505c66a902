"""Parameters a piece at a time, for what follows the backward pass."""

import torch

CPU, GPU = 1 << 18, 1 << 24  # numbers


def in_pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A contiguous tensor, flat, in views of at most so many numbers.

    On the CPU temporaries of 1 MB stay in the cache, and none is as large as a table of embeddings; on a GPU a piece
    has to be worth its launches.
    """
    return tensor.view(-1).split(GPU if tensor.is_cuda else CPU)
