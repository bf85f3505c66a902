"""Batches brought to sizes that recur, so that a step which was captured for one serves many."""

from dataclasses import replace

import torch

from tokenweave.layers.batch import Batch, Limits

LEAST_CONTEXT = 256


def bucket(tokens: int) -> int:
    """The size that a step of so many tokens is brought to: less than a quarter more from 32 on."""
    for most, step in ((4, 1), (64, 8), (256, 16), (1024, 64)):
        if tokens <= most:
            return -(-tokens // step) * step
    return -(-tokens // 128) * 128


def pad_tokens(batch: Batch, tokens: int) -> Batch:
    """The batch with padding up to `tokens` tokens: each a request of its own where all requests have one new token,
    else one request of them all. They attend to themselves, have no slot and disturb nobody. The batch is on the CPU.
    """
    more = tokens - batch.num_tokens
    if not more:
        return batch
    assert more > 0 and batch.slot_mapping is not None and batch.block_tables is not None
    lengths = [1] * more if batch.limits.single else [more]
    ends = torch.tensor(lengths).cumsum(0) + batch.num_tokens
    positions = torch.cat([torch.arange(length) for length in lengths])
    return replace(
        batch,
        token_ids=_joined(batch.token_ids, torch.zeros(more)),
        positions=_joined(batch.positions, positions),
        query_offsets=_joined(batch.query_offsets, ends),
        context_lengths=_joined(batch.context_lengths, torch.tensor(lengths)),
        slot_mapping=_joined(batch.slot_mapping, torch.full((more,), -1)),
        block_tables=_joined(batch.block_tables, torch.zeros(len(lengths), batch.block_tables.shape[1])),
        prompt_lengths=_joined_or_none(batch.prompt_lengths, torch.tensor(lengths)),
    )


def pad_requests(batch: Batch, *, context_limit: int) -> Batch:
    """The batch with empty requests and wider block tables, up to sizes that recur, and with `limits_given`.

    The batch is on the CPU. context_limit: the model's.
    """
    assert batch.block_tables is not None
    limits, tokens, requests = batch.limits, batch.num_tokens, batch.num_requests
    context = min(max(power_of_two(limits.context), LEAST_CONTEXT), context_limit)
    block_size = 1 if batch.cache is None else batch.cache.block_size
    rows = tokens if limits.single else min(power_of_two(requests), max(tokens, 1))
    table = torch.zeros(max(rows, requests), -(-context // block_size), dtype=torch.int32)
    kept = min(table.shape[1], batch.block_tables.shape[1])
    table[:requests, :kept] = batch.block_tables[:, :kept]
    empty = len(table) - requests
    return replace(
        batch,
        query_offsets=_joined(batch.query_offsets, torch.full((empty,), tokens)),
        context_lengths=_joined(batch.context_lengths, torch.zeros(empty)),
        block_tables=table,
        prompt_lengths=_joined_or_none(batch.prompt_lengths, torch.zeros(empty)),
        limits_given=Limits(context, limits.single),
    )


def _joined(tensor: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    return torch.cat((tensor, more.to(tensor.dtype)))


def _joined_or_none(tensor: torch.Tensor | None, more: torch.Tensor) -> torch.Tensor | None:
    return None if tensor is None else _joined(tensor, more)


def power_of_two(count: int) -> int:
    """The least that is not below `count`."""
    return 1 << max(count - 1, 0).bit_length()
