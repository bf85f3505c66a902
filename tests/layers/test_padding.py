"""Padded batches and their way to a device: nothing that a real token reads may change."""

from dataclasses import replace

import pytest
import torch

from tokenweave.execute.steps import made_up_step
from tokenweave.layers.batch import Batch
from tokenweave.layers.cache import KVCache
from tokenweave.layers.padding import bucket, pad_requests, pad_tokens
from tokenweave.layers.transfer import anew, bytes_of, sent

CASES = [([1], [0]), ([1, 1, 1], [5, 0, 33]), ([13], [0]), ([3, 1, 33], [0, 9, 7]), ([577], [3])]
CACHE = KVCache.zeros(1, 64, 16, 1, 2, torch.float32)


def step(counts: list[int], starts: list[int]) -> Batch:
    return made_up_step(CACHE, counts, starts, vocab_size=50)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 13, 33, 63, 64, 65, 256, 577, 1024, 1025, 8192, 32768])
def test_buckets_are_few_and_near(tokens: int) -> None:
    size = bucket(tokens)
    assert tokens <= size == bucket(size)
    assert size - tokens <= max(7, tokens // 4)
    assert bucket(tokens + 1) >= size


@pytest.mark.parametrize(("counts", "starts"), CASES)
@pytest.mark.parametrize("more", [0, 1, 7, 40])
def test_padding_tokens_are_requests_of_their_own(counts: list[int], starts: list[int], more: int) -> None:
    batch = step(counts, starts)
    total, requests = batch.num_tokens, batch.num_requests
    padded = pad_tokens(batch, total + more)
    assert padded.num_tokens == total + more and padded.query_offsets_host[-1] == total + more
    for name in ("token_ids", "positions", "slot_mapping"):
        assert getattr(padded, name)[:total].equal(getattr(batch, name)) and getattr(padded, name).dtype == torch.int64
    assert padded.slot_mapping is not None and (padded.slot_mapping[total:] == -1).all()
    assert padded.query_offsets_host[: requests + 1] == batch.query_offsets_host
    assert padded.context_lengths_host[:requests] == batch.context_lengths_host
    assert padded.block_tables is not None and batch.block_tables is not None
    assert padded.block_tables[:requests].equal(batch.block_tables)
    assert padded.limits.single == batch.limits.single  # decodes stay decodes
    for request in range(requests, padded.num_requests):  # they attend to themselves only
        first, stop = padded.query_offsets_host[request : request + 2]
        assert padded.context_lengths_host[request] == stop - first
        assert padded.positions[first:stop].tolist() == list(range(stop - first))


@pytest.mark.parametrize(("counts", "starts"), CASES)
def test_limits_hold_and_recur(counts: list[int], starts: list[int]) -> None:
    batch = step(counts, starts)
    padded = pad_requests(batch, context_limit=4096)
    true, given = batch.limits, padded.limits
    assert given.context >= true.context and given.single == true.single
    assert padded.block_tables is not None and padded.block_tables.shape[1] * 16 >= given.context
    assert padded.num_requests == len(padded.block_tables) == len(padded.query_offsets) - 1
    assert set(padded.query_offsets_host[batch.num_requests :]) == {batch.num_tokens}
    assert not any(padded.context_lengths_host[batch.num_requests :])
    longer = step(counts, [start + 1 if start else 0 for start in starts])
    like = pad_requests(longer, context_limit=4096)
    assert (
        like.limits == given and like.block_tables is not None and like.block_tables.shape == padded.block_tables.shape
    )


def test_a_context_is_not_padded_beyond_the_model() -> None:
    assert pad_requests(step([3], [5]), context_limit=100).limits.context == 100


def test_batches_arrive_whole_and_at_the_same_places() -> None:
    first, second = step([3, 1, 33], [0, 9, 7]).split(20)
    second = replace(second, prompt_lengths=torch.tensor([50, 60], dtype=torch.int32)[: second.num_requests])
    memory = torch.full((bytes_of([first, second]),), 255, dtype=torch.uint8)
    device = torch.device("cpu")
    there = sent([first, second], device, memory)
    names = ("token_ids", "positions", "query_offsets", "context_lengths", "slot_mapping", "block_tables")
    for batch, arrived in zip((first, second), there, strict=True):
        for name in (*names, *(["prompt_lengths"] if batch.prompt_lengths is not None else [])):
            tensor, copy = getattr(batch, name), getattr(arrived, name)
            assert copy.equal(tensor) and copy.dtype == tensor.dtype
            assert memory.data_ptr() <= copy.data_ptr() < memory.data_ptr() + len(memory)
            assert copy.data_ptr() % 16 == memory.data_ptr() % 16
    again = sent([first, second], device, memory)
    assert [b.block_tables.data_ptr() for b in again] == [b.block_tables.data_ptr() for b in there]


def test_what_a_batch_computed_of_itself_is_computed_anew() -> None:
    batch = step([3, 1], [4, 0])
    before = batch.owners
    fresh = anew(batch)
    assert "owners" not in fresh.__dict__ and fresh.query_offsets_host == batch.query_offsets_host
    assert fresh.owners.equal(before)
