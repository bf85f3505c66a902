"""Steps that nobody asked for, to measure and to show: requests of given lengths over a cache."""

from collections.abc import Sequence

import torch

from tokenweave.layers.batch import Batch
from tokenweave.layers.cache import KVCache


def made_up_step(cache: KVCache, counts: Sequence[int], starts: Sequence[int], *, vocab_size: int) -> Batch:
    """A step, on the CPU, of requests with counts[i] new tokens after starts[i] that the cache is taken to hold.

    Each request has blocks of its own, one after another. Raises ValueError if the cache has too few.
    """
    if len(counts) != len(starts) or min(counts, default=1) < 1 or min(starts, default=0) < 0:
        raise ValueError(f"counts must be positive and starts not negative, as many, got {counts} and {starts}")
    size = cache.block_size
    contexts = [start + count for start, count in zip(starts, counts, strict=True)]
    blocks = [-(-context // size) for context in contexts]
    if sum(blocks) > cache.num_blocks:
        raise ValueError(f"requests of {contexts} tokens need {sum(blocks)} blocks, the cache has {cache.num_blocks}")
    tables = torch.zeros(len(counts), max(blocks, default=0), dtype=torch.int32)
    first = 0
    for request, count in enumerate(blocks):
        tables[request, :count] = torch.arange(first, first + count)
        first += count
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts, dtype=torch.int64))
    offsets = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    positions = torch.arange(len(owner)) + (torch.tensor(starts, dtype=torch.int64) - offsets[:-1])[owner]
    return Batch(
        token_ids=((torch.arange(len(owner)) * 7919 + 13) % vocab_size),
        positions=positions,
        query_offsets=offsets,
        context_lengths=torch.tensor(contexts, dtype=torch.int32),
        slot_mapping=(tables[owner, positions // size].long() * size + positions % size),
        block_tables=tables,
        cache=cache,
    )
