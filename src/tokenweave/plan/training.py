"""What training takes of a rank's memory: states from `plan.memory`, and what forward and backward keep."""

from dataclasses import dataclass

from tokenweave.config import ModelConfig, Shard, shard
from tokenweave.plan.analytical import DTYPE_BYTES
from tokenweave.plan.memory import TrainingMemory, rank_parameters, training_memory


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Bytes of the heaviest rank. activations: kept for the backward pass. head: the gradients of the head's weight and
    of its rows, and a chunk of logits. backward: what the backward pass of one stage holds besides. buffers:
    communication.
    """

    memory: TrainingMemory
    activations: int
    head: int
    backward: int
    buffers: int

    @property
    def states(self) -> int:
        """Weights, gradients and optimizer."""
        return self.memory.total

    @property
    def peak(self) -> int:
        """Activations are all there when the head is done, and when the last stage's backward pass begins."""
        return self.states + self.activations + max(self.head, self.backward) + self.buffers


def plan_training(
    config: ModelConfig,
    size: int,
    *,
    tokens: int,
    head_tokens: int,
    dtype: str = "float32",
    sequence_parallel: bool = True,
    recompute: bool = False,
    wide_gradients: bool = False,
) -> TrainingPlan:
    """Of the heaviest of `size` ranks, for `tokens` tokens at once, the head in chunks of `head_tokens`.

    wide_gradients: narrow gradients accumulate in float32. Counts dense models; a rank's part of experts is not known
    beforehand. Buffers are those of ranks that share memory: each maps every rank's.
    """
    element = DTYPE_BYTES[dtype]
    parts = [shard(config, size, rank) for rank in range(size)]
    heaviest = max(parts, key=lambda part: rank_parameters(config, part))
    widths = _Widths.of(config, heaviest)
    own = -(-tokens // size) if sequence_parallel else tokens
    residual = own * (config.hidden_size * element + 4)  # a norm's input, and one number a row
    normed = tokens * config.hidden_size * element
    attention = tokens * (widths.attention * element + 4 * widths.query_heads)
    mlp = tokens * widths.mlp * element
    stages = 2 * config.num_hidden_layers
    last = max(attention, mlp) + normed  # of one stage that is computed again
    if recompute:
        activations = stages * own * config.hidden_size * element + residual + normed
    else:
        activations = (stages + 1) * (residual + normed) + config.num_hidden_layers * (attention + mlp)
    logits = head_tokens * widths.vocabulary * element * (1 if element == 4 else 3)
    head = normed + widths.vocabulary * config.hidden_size * 4 + 2 * logits
    backward = tokens * max(widths.attention_backward, widths.mlp_backward) * element + 2 * normed
    return TrainingPlan(
        memory=training_memory(config, size, element=element, float32_gradients=wide_gradients),
        activations=activations,
        head=head,
        backward=backward + (last if recompute else 0),
        buffers=size * normed if size > 1 else normed,
    )


@dataclass(frozen=True)
class _Widths:
    """Numbers a token on one rank."""

    attention: int  # qkv (its values are attended to), turned queries and keys, attended values twice (by head, by row)
    attention_backward: int
    mlp: int  # gate and up, silu(gate), their product
    mlp_backward: int
    query_heads: int
    vocabulary: int

    @staticmethod
    def of(config: ModelConfig, part: Shard) -> "_Widths":
        queries, kv = part.num_query_heads * config.head_dim, part.num_kv_heads * config.head_dim
        columns = part.mlp_columns.stop - part.mlp_columns.start
        return _Widths(
            attention=(queries + 2 * kv) + (queries + kv) + 2 * queries,
            attention_backward=2 * (queries + 2 * kv) + 2 * queries,
            mlp=4 * columns,
            mlp_backward=5 * columns,
            query_heads=part.num_query_heads,
            vocabulary=part.vocab_rows.stop - part.vocab_rows.start,
        )
