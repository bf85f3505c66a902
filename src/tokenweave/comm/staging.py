"""gather and broadcast through memory that every rank can reach, a piece at a time."""

from collections.abc import Callable, Sequence

import torch

from tokenweave.comm.operations import Operation, dtype_code
from tokenweave.comm.shape import check_columns, check_root

# (operation word, rows, columns): waits until every rank has come with the same
Meet = Callable[[int, int, int], None]


def gather(
    columns: torch.Tensor, widths: list[int], *, rank: int, size: int, staging: Sequence[torch.Tensor], meet: Meet
) -> torch.Tensor | None:
    """See `Collective.gather`. staging: bytes of each rank, all of one length."""
    check_columns(columns, widths, rank, size)
    count, total, widest = columns.shape[0], sum(widths), max(widths)
    operation = Operation.GATHER | dtype_code(columns.dtype) << 8
    gathered = columns.new_empty(count, total) if rank == 0 else None
    staging = [memory.view(columns.dtype) for memory in staging]
    # Pieces of `rows` x `width`, the same on every rank, that fit the staging memory.
    width = max(1, min(widest, staging[0].numel()))
    rows = max(1, min(count, staging[0].numel() // width))
    for top in range(0, count, rows):
        for left in range(0, widest, width):
            piece = columns[top : top + rows, left : left + width]
            if rank != 0:
                staging[rank][: piece.numel()].view(piece.shape).copy_(piece)
            meet(operation, count, total)
            if gathered is not None:
                for peer, columns_of_peer in enumerate(gathered.split(widths, dim=1)):
                    part = columns_of_peer[top : top + rows, left : left + width]
                    part.copy_(piece if peer == 0 else staging[peer][: part.numel()].view(part.shape))
            meet(operation, count, total)
    return gathered


def broadcast(
    tensor: torch.Tensor, root: int, *, rank: int, size: int, staging: Sequence[torch.Tensor], meet: Meet
) -> torch.Tensor:
    """See `Collective.broadcast`."""
    check_root(root, size)
    if not tensor.is_contiguous():
        return tensor.copy_(broadcast(tensor.contiguous(), root, rank=rank, size=size, staging=staging, meet=meet))
    flat = tensor.detach().view(-1).view(torch.uint8)
    memory = staging[root]
    operation = Operation.BROADCAST | dtype_code(tensor.dtype) << 8 | root << 16
    for piece in flat.split(memory.numel()):
        if rank == root:
            memory[: piece.numel()].copy_(piece)
        meet(operation, flat.numel(), 1)
        if rank != root:
            piece.copy_(memory[: piece.numel()])
        meet(operation, flat.numel(), 1)
    return tensor
