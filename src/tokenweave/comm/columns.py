"""Column slices of every rank side by side on every rank, two ways.

By all-gather each element crosses a link once. Some systems all-reduce a buffer instead in which each rank has filled
its own columns and zeroed the others': no packing and no uneven widths to think of, but every rank's zeros move too,
and are added. For [n, W] over N ranks, in elements that one rank receives:

    all-gather              (N - 1) / N * n * W
    zero-filled all-reduce  2 * (N - 1) / N * n * W, and n * W written as zeros first
"""

import torch

from tokenweave.comm.collective import Collective


def all_gather_columns(collective: Collective, columns: torch.Tensor, widths: list[int], rank: int) -> torch.Tensor:
    """[n, widths[rank]] of each rank to [n, sum(widths)] on all, by all-gather.

    collective: open for rows of any width H; a rank's slice goes as ceil(n * max(widths) / H) of them, all ranks' must
    fit its max_tokens.
    """
    count, size = columns.shape[0], len(widths)
    hidden = collective.buffer(0, 0).shape[1]
    rows = -(-count * max(widths) // hidden)
    packed = columns.new_zeros(rows * hidden)
    packed[: columns.numel()] = columns.flatten()
    gathered = collective.all_gather(packed.view(rows, hidden), rows * size).view(size, -1)
    slices = [gathered[r, : count * width].view(count, width) for r, width in enumerate(widths)]
    return torch.cat(slices, dim=1)


def all_reduce_columns(collective: Collective, columns: torch.Tensor, widths: list[int], rank: int) -> torch.Tensor:
    """The same by a zero-filled all-reduce. The collective's rows are of sum(widths); returns its own memory."""
    left = sum(widths[:rank])
    whole = collective.buffer(0, columns.shape[0]).zero_()
    whole[:, left : left + widths[rank]] = columns
    return collective.all_reduce(whole)


def bytes_received(way: str, count: int, width: int, size: int, element: int) -> int:
    """What crosses a rank's link one way, of [count, width] over `size` ranks."""
    passes = {"all-gather": 1, "zero-filled all-reduce": 2}[way]
    return round(passes * (size - 1) / size * count * width * element)
