"""Batches on their way to a GPU: all their arrays in one copy."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tokenweave.layers.batch import Batch

_ALIGNMENT = 16  # bytes
_TENSORS = (
    "token_ids", "positions", "slot_mapping", "query_offsets", "context_lengths", "block_tables", "prompt_lengths",
)  # fmt: skip


def sent(batches: Sequence[Batch], device: torch.device, memory: torch.Tensor | None = None) -> list[Batch]:
    """The batches with their tensors on `device`, by one copy of what is on the CPU: six small ones take 15 µs each.

    memory: uint8 on the device, of `bytes_of(batches)`, where the tensors are put; where batches of the same shapes are
    sent there again they are at the same places. By default new memory.
    """
    if all(batch.token_ids.device == device for batch in batches) and memory is None:
        return list(batches)
    size = bytes_of(batches)
    staging = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    memory = torch.empty(size, dtype=torch.uint8, device=device) if memory is None else memory
    start, moved = 0, []
    for batch in batches:
        changed: dict[str, Any] = {}
        for name in _TENSORS:
            tensor = getattr(batch, name)
            if tensor is None:
                continue
            end = start + tensor.numel() * tensor.element_size()
            staging[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            changed[name] = memory[start:end].view(tensor.dtype).view(tensor.shape)
            start = _aligned(end)
        moved.append(_with_lengths(batch, changed))
    memory[:size].copy_(staging, non_blocking=True)
    return moved


def anew(batch: Batch) -> Batch:
    """The same batch without what it has computed of itself on its device, which a capture then records."""
    return _with_lengths(batch, {})


def bytes_of(batches: Sequence[Batch]) -> int:
    """What `sent` needs for them."""
    return sum(
        _aligned(tensor.numel() * tensor.element_size())
        for batch in batches
        for tensor in (getattr(batch, name) for name in _TENSORS)
        if tensor is not None
    )


def _with_lengths(batch: Batch, changed: dict[str, Any]) -> Batch:
    """What the host knows of a batch it need not ask the device for."""
    copy = replace(batch, **changed)
    copy.__dict__["query_offsets_host"] = batch.query_offsets_host
    copy.__dict__["context_lengths_host"] = batch.context_lengths_host
    return copy


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
