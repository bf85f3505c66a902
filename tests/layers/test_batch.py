import random

import pytest
import torch
from layer_cases import EVERYTHING, Paged, distance, fill, paged, tensors

from tokenweave.config import shard
from tokenweave.layers.attention import Attention
from tokenweave.layers.batch import Batch
from tokenweave.layers.rotary import Rope


def random_requests(seed: int) -> list[tuple[int, int]]:
    """(new tokens, context) of a few requests: decodes, prompts, chunks."""
    draw = random.Random(seed)
    news = [draw.choice([1, 1, 1, 2, 3, 13, draw.randint(1, 40)]) for _ in range(draw.randint(1, 6))]
    return [(new, new + draw.choice([0, 1, draw.randint(0, 60)])) for new in news]


def tokens(batch: Batch) -> list[tuple[int, int, int, int, tuple[int, ...]]]:
    """What each token is and sees: id, position, slot, number of visible keys, and the blocks that these lie in."""
    found = []
    assert batch.slot_mapping is not None and batch.block_tables is not None and batch.cache is not None
    for request in range(batch.num_requests):
        begin, end = batch.query_offsets_host[request : request + 2]
        for token in range(begin, end):
            visible = int(batch.context_lengths[request]) - (end - 1 - token)
            blocks = batch.block_tables[request, : -(-visible // batch.cache.block_size)]
            found.append((int(batch.token_ids[token]), int(batch.positions[token]), int(batch.slot_mapping[token]),
                          visible, tuple(blocks.tolist())))  # fmt: skip
    return found


@pytest.mark.parametrize("seed", range(40))
def test_halves_describe_the_same_tokens_at_every_cut(seed: int) -> None:
    batch = paged(EVERYTHING, random_requests(seed), block_size=random.Random(seed).choice([1, 3, 16]), seed=seed).batch
    whole = tokens(batch)
    assert len(whole) == batch.num_tokens
    for cut in range(batch.num_tokens + 1):
        first, second = batch.split(cut)
        assert (first.num_tokens, second.num_tokens) == (cut, batch.num_tokens - cut)
        assert tokens(first) + tokens(second) == whole
        for half in (first, second):
            assert half.cache is batch.cache
            assert half.query_offsets.dtype == half.context_lengths.dtype == torch.int32
            assert half.query_offsets.tolist() == half.query_offsets_host and half.query_offsets_host[0] == 0


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_halves_run_in_order_equal_the_whole_at_every_cut(seed: int, kernels: bool) -> None:
    case: Paged = paged(EVERYTHING, random_requests(seed), block_size=5, seed=seed)
    attention = Attention(EVERYTHING, shard(EVERYTHING, 1, 0), 0, Rope(EVERYTHING), dtype=torch.float32)
    fill(attention.pieces("a"), tensors(EVERYTHING), "a")
    x = torch.randn(case.batch.num_tokens, EVERYTHING.hidden_size)
    with torch.set_grad_enabled(not kernels):
        whole = attention(x, case.rank(slice(0, 2)), None)
        for cut in range(case.batch.num_tokens + 1):
            first, second = case.rank(slice(0, 2)).split(cut)
            halves = torch.cat((attention(x[:cut], first, None), attention(x[cut:], second, None)))
            assert distance(halves, whole.double()) < 1e-5


def test_a_half_may_be_cut_again() -> None:
    batch = paged(EVERYTHING, [(7, 20), (1, 3), (9, 9)], block_size=4).batch
    first, rest = batch.split(5)
    second, third = rest.split(6)
    assert tokens(first) + tokens(second) + tokens(third) == tokens(batch)


def test_without_a_cache_cuts_fall_between_requests_only() -> None:
    batch = Batch.prompts([[1, 2, 3], [4], [5, 6]])
    for cut in (0, 3, 4, 6):
        first, second = batch.split(cut)
        assert first.token_ids.tolist() + second.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
        assert first.context_lengths_host + second.context_lengths_host == [3, 1, 2]
    for cut in (1, 2, 5):
        with pytest.raises(ValueError, match=f"cut {cut} falls inside request"):
            batch.split(cut)


@pytest.mark.parametrize("cut", [-1, 7])
def test_a_cut_outside_the_batch_is_refused(cut: int) -> None:
    with pytest.raises(ValueError, match=rf"cut must be in \[0, 6\], got {cut}"):
        Batch.prompts([[1, 2, 3], [4, 5, 6]]).split(cut)


def test_prompts() -> None:
    batch = Batch.prompts([[9, 8], [7]])
    assert batch.token_ids.tolist() == [9, 8, 7] and batch.positions.tolist() == [0, 1, 0]
    assert batch.query_offsets.tolist() == [0, 2, 3] and batch.max_context_length == 2
    empty = Batch.prompts([])
    assert (empty.num_tokens, empty.num_requests, empty.max_context_length) == (0, 0, 0)
    assert [half.num_tokens for half in empty.split(0)] == [0, 0]


def test_arrays_are_contiguous_and_typed_whatever_the_tables_are_cut_from() -> None:
    batch = paged(EVERYTHING, [(2, 30), (1, 9)], block_size=4).batch
    wide = torch.cat((batch.block_tables, batch.block_tables), 1).long()
    cut = Batch(batch.token_ids, batch.positions, batch.query_offsets, batch.context_lengths, batch.slot_mapping,
                wide[:, : batch.block_tables.shape[1]], batch.cache)  # fmt: skip
    for array, same in zip(cut.arrays, batch.arrays, strict=True):
        assert array.flags.c_contiguous and array.dtype == same.dtype and (array == same).all()
