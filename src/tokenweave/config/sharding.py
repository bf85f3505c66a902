"""Which part of a model a rank holds: the one rule that layers and checkpoint loading share."""

from dataclasses import dataclass

from tokenweave.config.model import ModelConfig


def partition(count: int, size: int, rank: int) -> slice:
    """Slice of `count` things that `rank` of `size` owns: contiguous, in rank order, sizes differing by at most one."""
    return slice(rank * count // size, (rank + 1) * count // size)


@dataclass(frozen=True)
class Shard:
    """One rank's slices of every sharded dimension, in units of heads, columns and rows."""

    query_heads: slice
    kv_heads: slice
    mlp_columns: slice
    vocab_rows: slice
    rank: int
    size: int

    @property
    def num_query_heads(self) -> int:
        return self.query_heads.stop - self.query_heads.start

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads.stop - self.kv_heads.start


def shard(config: ModelConfig, size: int, rank: int) -> Shard:
    """The slices of `config` that `rank` of `size` holds.

    Heads go by KV group. With more ranks than groups a group's KV head is replicated over the ranks that share it
    and its query heads are dealt out among them.
    Raises ValueError if there are more ranks than query heads, MLP columns or vocabulary rows.
    """
    if size < 1:
        raise ValueError(f"tensor parallel size must be at least 1, got {size}")
    if not 0 <= rank < size:
        raise ValueError(f"rank must be in [0, {size}), got {rank}")
    for name in ("num_attention_heads", "intermediate_size", "vocab_size"):
        if size > getattr(config, name):
            raise ValueError(
                f"tensor parallel size {size} is more than the model's {name} ({getattr(config, name)}); "
                f"use at most {getattr(config, name)}"
            )
    groups, per_group = config.num_key_value_heads, config.queries_per_group
    if size <= groups:
        kv = partition(groups, size, rank)
        queries = slice(kv.start * per_group, kv.stop * per_group)
    else:
        group = next(g for g in range(groups) if rank < partition(size, groups, g).stop)
        sharers = partition(size, groups, group)
        own = partition(per_group, sharers.stop - sharers.start, rank - sharers.start)
        kv = slice(group, group + 1)
        queries = slice(group * per_group + own.start, group * per_group + own.stop)
    return Shard(
        query_heads=queries,
        kv_heads=kv,
        mlp_columns=partition(config.intermediate_size, size, rank),
        vocab_rows=partition(config.vocab_size, size, rank),
        rank=rank,
        size=size,
    )
