"""Made-up steps."""

import pytest
import torch

from tokenweave.execute.steps import made_up_step
from tokenweave.layers.cache import KVCache


def cache(blocks: int) -> KVCache:
    return KVCache.zeros(1, blocks, 4, 1, 2, torch.float32)


def test_positions_slots_and_contexts() -> None:
    batch = made_up_step(cache(9), [5, 1, 3], [0, 9, 3], vocab_size=50)
    assert batch.query_offsets.tolist() == [0, 5, 6, 9]
    assert batch.context_lengths.tolist() == [5, 10, 6]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 9, 3, 4, 5]
    assert batch.block_tables.tolist() == [[0, 1, 0], [2, 3, 4], [5, 6, 0]]
    assert batch.slot_mapping.tolist() == [0, 1, 2, 3, 4, 4 * 4 + 1, 5 * 4 + 3, 6 * 4, 6 * 4 + 1]
    assert 0 <= int(batch.token_ids.min()) and int(batch.token_ids.max()) < 50
    assert [t.dtype for t in (batch.token_ids, batch.positions, batch.slot_mapping)] == [torch.int64] * 3
    assert [t.dtype for t in (batch.query_offsets, batch.context_lengths, batch.block_tables)] == [torch.int32] * 3


def test_no_two_tokens_share_a_slot() -> None:
    batch = made_up_step(cache(40), [13, 1, 33, 1], [3, 0, 7, 31], vocab_size=50)
    assert len(set(batch.slot_mapping.tolist())) == 48


@pytest.mark.parametrize(
    ("counts", "starts", "words"),
    [
        ([9, 1], [0, 4], "need 5 blocks, the cache has 4"),
        ([0], [3], "positive"),
        ([1], [-1], "not negative"),
        ([1, 1], [0], "as many"),
    ],
)
def test_refuses(counts: list[int], starts: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        made_up_step(cache(4), counts, starts, vocab_size=50)
