"""Columns that make up for unequal heads."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenweave.config import ExpertsConfig, ModelConfig, shard
from tokenweave.config.sharding import HEAVIEST, deal, rank_work


def best(columns: int, others: list[int], most: float) -> int | None:
    """The least most columns that a rank can have with no rank over `most`, by trying all deals; work 1 a column."""
    size = len(others)
    deals = (counts for counts in product(range(1, columns + 1), repeat=size) if sum(counts) == columns)
    fair = (max(counts) for counts in deals if all(c + o <= most for c, o in zip(counts, others, strict=True)))
    return min(fair, default=None)


@given(st.integers(3, 12), st.lists(st.integers(0, 9), min_size=2, max_size=3))
@settings(max_examples=300, deadline=None)
def test_as_even_as_the_bound_allows(columns: int, others: list[int]) -> None:
    counts = deal(columns, 1, others)
    assert sum(counts) == columns and min(counts) >= 1
    most = HEAVIEST * (columns + sum(others)) / len(others)
    possible = best(columns, others, most)
    if possible is not None:
        assert max(counts) == possible
        assert all(count + other <= most for count, other in zip(counts, others, strict=True))


def test_equal_heads_leave_columns_even() -> None:
    assert sorted(deal(13, 3, [7, 7, 7])) == [4, 4, 5]
    assert deal(5, 1, [0] * 5) == [1] * 5


MODELS = {  # query heads, KV heads, hidden, columns, head_dim
    "demo": (9, 3, 576, 1536, 64),
    "llama 8b": (32, 8, 4096, 14336, 128),
    "llama 70b": (64, 8, 8192, 28672, 128),
    "qwen 7b": (28, 4, 3584, 18944, 128),
    "qwen 0.5b": (14, 2, 896, 4864, 64),
    "mha": (32, 32, 2048, 8192, 64),
}


def model(heads: int, kv_heads: int, hidden: int, columns: int, size: int, experts: bool) -> ModelConfig:
    mixture = ExpertsConfig(count=8, per_token=2, intermediate_size=columns, normalised=True, layers=(True,))
    return ModelConfig(
        architecture="x", vocab_size=999, hidden_size=hidden, intermediate_size=columns, num_hidden_layers=1,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=size, max_position_embeddings=9,
        experts=mixture if experts else None,
    )  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("experts", [False, True])
def test_no_rank_has_over_a_tenth_more_work_than_the_mean(name: str, experts: bool) -> None:
    config, columns = model(*MODELS[name], experts), MODELS[name][3]
    uneven = 0
    for size in range(1, min(14, config.num_attention_heads) + 1):
        parts = [shard(config, size, rank) for rank in range(size)]
        works = [rank_work(config, part) for part in parts]
        assert max(works) <= HEAVIEST * sum(works) / size, f"{size} ranks"
        widths = [p.expert_columns if experts else p.mlp_columns for p in parts]
        assert all((p.stop - p.start) % (64 if columns >= 14336 else 8) == 0 for p in widths if size <= 6)
        uneven += len({part.stop - part.start for part in widths}) > 2
    if name in ("demo", "llama 8b") and not experts:  # control: some of these needed it
        assert uneven > 0


def test_heads_that_columns_cannot_make_up_for() -> None:
    config = model(9, 3, 72, 8, 64, False)
    counts = [part.stop - part.start for part in (shard(config, 4, rank).mlp_columns for rank in range(4))]
    assert sum(counts) == 8 and counts[0] == counts[1] == 1  # those with three heads
