"""Which part of a model a rank holds: the one rule that layers and checkpoint loading share."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenweave.config.model import ModelConfig

HEAVIEST = 1.1  # times the mean: up to here unequal heads are left to be, see `deal`


def partition(count: int, size: int, rank: int) -> slice:
    """Slice of `count` things that `rank` of `size` owns: contiguous, in rank order, sizes differing by at most one."""
    return slice(rank * count // size, (rank + 1) * count // size)


def deal(columns: int, work: float, others: Sequence[float]) -> list[int]:
    """How many of `columns`, of `work` each, every rank gets beside the work others[rank] that it has anyway.

    As even as can be while no rank has over HEAVIEST times the mean. Evening out more would not pay: ranks wait for
    each other after every block, so a step takes the slowest attention plus the slowest MLP, and columns that make up
    for heads lengthen the second without shortening the first. At least one column a rank.
    """
    size = len(others)
    most = HEAVIEST * (columns * work + sum(others)) / size
    caps = [max(1, int((most - other) / work)) for other in others]
    spare = columns - sum(caps)
    if spare > 0:  # rounded away, or heads alone are too much for some rank
        lightest = min(range(size), key=lambda rank: others[rank])
        caps[lightest] += spare
    level = next(n for n in range(-(-columns // size), columns + 1) if sum(min(n, cap) for cap in caps) >= columns)
    counts = [min(level, cap) for cap in caps]
    for rank in range(sum(counts) - columns):
        counts[[r for r in range(size) if caps[r] >= level][rank]] -= 1
    return counts


@dataclass(frozen=True)
class Shard:
    """One rank's slices of every sharded dimension, in units of heads, columns and rows.

    expert_columns: of every expert; empty without experts.
    """

    query_heads: slice
    kv_heads: slice
    mlp_columns: slice
    expert_columns: slice
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
    and its query heads are dealt out among them. Columns of MLP and experts are dealt evenly, or so that they make up
    for unequal heads, see `deal`.
    Raises ValueError if there are more ranks than query heads, columns of an MLP or expert, or vocabulary rows.
    """
    if size < 1:
        raise ValueError(f"tensor parallel size must be at least 1, got {size}")
    if not 0 <= rank < size:
        raise ValueError(f"rank must be in [0, {size}), got {rank}")
    expert_columns = config.experts.intermediate_size if config.experts else 0
    for name, count in (
        ("num_attention_heads", config.num_attention_heads),
        ("intermediate_size", config.intermediate_size),
        ("experts' intermediate size", expert_columns or size),
        ("vocab_size", config.vocab_size),
    ):
        if size > count:
            raise ValueError(
                f"tensor parallel size {size} is more than the model's {name} ({count}); use at most {count}"
            )
    heads = [_heads(config, size, other) for other in range(size)]
    attention = [layer_work(config, *own, 0) for own in heads]
    queries, kv = heads[rank]
    per_token = config.experts.per_token if config.experts else 1
    return Shard(
        query_heads=queries,
        kv_heads=kv,
        mlp_columns=_own(_dealt(config.intermediate_size, column_work(config), attention), rank),
        expert_columns=_own(_dealt(expert_columns, per_token * column_work(config), attention), rank),
        vocab_rows=partition(config.vocab_size, size, rank),
        rank=rank,
        size=size,
    )


def column_work(config: ModelConfig) -> int:
    """Multiplications per token of one column of an MLP or expert."""
    return config.hidden_size * (3 if config.gated_mlp else 2)


def layer_work(config: ModelConfig, queries: slice, kv: slice, columns: int) -> int:
    """Multiplications per token of one rank's part of a layer, those of attention to its context apart."""
    heads = 2 * (queries.stop - queries.start) + 2 * (kv.stop - kv.start)
    return config.hidden_size * config.head_dim * heads + columns * column_work(config)


def rank_work(config: ModelConfig, part: Shard) -> int:
    """Multiplications per token of one rank's part of all layers."""
    dense, sparse = part.mlp_columns.stop - part.mlp_columns.start, 0
    layers_with_experts = 0
    if config.experts is not None:
        layers_with_experts = sum(config.experts.layers)
        sparse = config.experts.per_token * (part.expert_columns.stop - part.expert_columns.start)
    per_kind = ((config.num_hidden_layers - layers_with_experts, dense), (layers_with_experts, sparse))
    return sum(n * layer_work(config, part.query_heads, part.kv_heads, columns) for n, columns in per_kind)


def _heads(config: ModelConfig, size: int, rank: int) -> tuple[slice, slice]:
    """Query and KV heads of a rank."""
    groups, per_group = config.num_key_value_heads, config.queries_per_group
    if size <= groups:
        kv = partition(groups, size, rank)
        return slice(kv.start * per_group, kv.stop * per_group), kv
    group = next(g for g in range(groups) if rank < partition(size, groups, g).stop)
    sharers = partition(size, groups, group)
    own = partition(per_group, sharers.stop - sharers.start, rank - sharers.start)
    return slice(group * per_group + own.start, group * per_group + own.stop), slice(group, group + 1)


def _dealt(columns: int, work: int, others: Sequence[int]) -> list[int]:
    """`deal` by bundles of columns: a power of two, so that on a GPU rows of weights begin where it reads fast (16
    bytes), and matmuls end with a tile. At most 64, and so that the last bundle is no more than 1/32 of a rank's part.
    """
    bundle = 64
    while bundle > 1 and (columns % bundle or columns < 32 * bundle * len(others)):
        bundle //= 2
    return (
        [bundle * count for count in deal(columns // bundle, bundle * work, others)] if columns else [0] * len(others)
    )


def _own(counts: Sequence[int], rank: int) -> slice:
    start = sum(counts[:rank])
    return slice(start, start + counts[rank])
