"""Every head, column and row is held once, whatever divides or does not; KV heads by every rank that needs them."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenweave.config import ModelConfig, Shard, partition, shard


def model(**changes: Any) -> ModelConfig:
    dimensions: dict[str, Any] = dict(
        architecture="x", vocab_size=31, hidden_size=8, intermediate_size=13, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=2, max_position_embeddings=8,
    )  # fmt: skip
    return ModelConfig(**dimensions | changes)


def shards(config: ModelConfig, size: int) -> list[Shard]:
    return [shard(config, size, rank) for rank in range(size)]


def covers(parts: list[slice], count: int) -> bool:
    """Whether the slices lie side by side in rank order, from 0 to count, none of them empty."""
    edges = [0, *(part.stop for part in parts)]
    return edges[-1] == count and all(part.start == a < part.stop for part, a in zip(parts, edges, strict=False))


@given(st.integers(0, 1000), st.integers(1, 16))
def test_partition_deals_evenly(count: int, size: int) -> None:
    parts = [partition(count, size, rank) for rank in range(size)]
    lengths = [part.stop - part.start for part in parts]
    assert parts[0].start == 0 and parts[-1].stop == count and max(lengths) - min(lengths) <= 1
    assert all(a.stop == b.start for a, b in zip(parts, parts[1:], strict=False))


@settings(max_examples=300)
@given(st.data())
def test_everything_is_held_by_one_rank(data: st.DataObject) -> None:
    groups, per_group = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    size = data.draw(st.integers(1, min(groups * per_group, 16)))
    columns, vocabulary = data.draw(st.integers(size, 100)), data.draw(st.integers(size, 200_000))
    config = model(num_attention_heads=groups * per_group, num_key_value_heads=groups, intermediate_size=columns,
                   vocab_size=vocabulary)  # fmt: skip
    dealt = shards(config, size)
    assert covers([own.query_heads for own in dealt], groups * per_group)
    assert covers([own.mlp_columns for own in dealt], columns)
    assert covers([own.vocab_rows for own in dealt], vocabulary)
    for rank, own in enumerate(dealt):
        assert (own.rank, own.size) == (rank, size)
        queries = range(own.query_heads.start, own.query_heads.stop)
        needed = sorted({query // per_group for query in queries})
        assert list(range(own.kv_heads.start, own.kv_heads.stop)) == needed
        # the layers share a rank's queries out evenly over its KV heads
        assert own.num_query_heads == len(queries) and len(queries) % own.num_kv_heads == 0
        assert all(query // per_group == needed[i // (len(queries) // len(needed))] for i, query in enumerate(queries))


@pytest.mark.parametrize(
    "heads, kv_heads, size, queries, kv",
    [
        (4, 2, 4, [(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (4, 1, 2, [(0, 2), (2, 4)], [(0, 1), (0, 1)]),
        (9, 3, 4, [(0, 3), (3, 6), (6, 7), (7, 9)], [(0, 1), (1, 2), (2, 3), (2, 3)]),
        (9, 3, 2, [(0, 3), (3, 9)], [(0, 1), (1, 3)]),
    ],
)
def test_more_ranks_than_kv_heads(heads: int, kv_heads: int, size: int, queries: list, kv: list) -> None:
    dealt = shards(model(num_attention_heads=heads, num_key_value_heads=kv_heads), size)
    assert [(own.query_heads.start, own.query_heads.stop) for own in dealt] == queries
    assert [(own.kv_heads.start, own.kv_heads.stop) for own in dealt] == kv


@pytest.mark.parametrize("vocabulary, size", [(32001, 2), (32064, 5), (151552, 6)])
def test_vocabularies_that_do_not_divide(vocabulary: int, size: int) -> None:
    config = model(vocab_size=vocabulary, num_attention_heads=6)
    assert covers([own.vocab_rows for own in shards(config, size)], vocabulary)


@pytest.mark.parametrize(
    "changes, size, rank, message",
    [
        ({}, 0, 0, "tensor parallel size must be at least 1, got 0"),
        ({}, 2, 2, r"rank must be in \[0, 2\), got 2"),
        ({}, 2, -1, r"rank must be in \[0, 2\), got -1"),
        ({}, 5, 0, r"5 is more than the model's num_attention_heads \(4\); use at most 4"),
        ({"intermediate_size": 3}, 4, 0, r"4 is more than the model's intermediate_size \(3\)"),
        ({"vocab_size": 3}, 4, 0, r"4 is more than the model's vocab_size \(3\)"),
    ],
)
def test_refused(changes: dict[str, Any], size: int, rank: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard(model(**changes), size, rank)
