"""What training takes of a rank's memory: states from `plan.memory`, and what forward and backward keep."""

from dataclasses import dataclass

from tokenweave.config import ModelConfig, Shard, shard
from tokenweave.plan.analytical import DTYPE_BYTES
from tokenweave.plan.memory import TrainingMemory, rank_parameters, training_memory

SYSTEM_BLOCK = 4 << 20  # bytes from which on a CPU rank's blocks come from the system itself, see train.heap
HEAP_GAPS = 0.1  # of smaller ones, which share a heap: those that come and go leave gaps, 0 to 16 MB beside 50
SMALL_THINGS = 4 << 20  # bytes: graphs, kernels' arrays, the interpreter; a tiny model takes 3 to 4 MB over its plan
NARROW_PRODUCTS = 11 << 20  # bytes of what oneDNN compiles for bfloat16 products of a decoder's dozen shapes
EXPERT_PRODUCTS = 10 << 20  # bytes more where experts get other numbers of rows at every step, see train.heap


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Bytes of the heaviest rank. activations: kept for the backward pass. gaps: of the heap between them. head: the
    gradients of the head's weight and of its rows, and a chunk of logits. backward: what the backward pass of one stage
    holds besides. buffers: communication.
    """

    memory: TrainingMemory
    activations: int
    gaps: int
    head: int
    backward: int
    libraries: int
    buffers: int

    @property
    def states(self) -> int:
        """Weights, gradients and optimizer."""
        return self.memory.total

    @property
    def peak(self) -> int:
        """Activations are all there when the head is done, and when the last stage's backward pass begins."""
        passing = max(self.head, self.backward)
        return self.states + self.activations + self.gaps + passing + self.libraries + self.buffers


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
    device: str = "cpu",
) -> TrainingPlan:
    """Of the heaviest of `size` ranks, for `tokens` tokens at once, the head in chunks of `head_tokens`.

    wide_gradients: narrow gradients accumulate in float32. Buffers are those of ranks that share memory: each maps
    every rank's. On "cuda" there are neither these nor gaps nor libraries: what torch's allocator hands out is counted.
    """
    element = DTYPE_BYTES[dtype]
    parts = [shard(config, size, rank) for rank in range(size)]
    heaviest = max(parts, key=lambda part: rank_parameters(config, part))
    hidden, layers = config.hidden_size, config.num_hidden_layers
    own = -(-tokens // size) if sequence_parallel else tokens
    front = [own * hidden * element, own * 4, tokens * hidden * element]  # a norm's input, a number a row, the normed
    sparse = sum(config.experts.layers) if config.experts else 0
    attention, mlp = _attention(config, heaviest, tokens, element), _mlp(heaviest, tokens, element)
    experts = _experts(config, heaviest, tokens, element) if sparse else []
    mlps = (layers - sparse) * mlp + sparse * experts
    # the residual in front of every stage, and the last norm; or all of every stage
    kept = 2 * layers * front[:1] + front if recompute else (2 * layers + 1) * front + layers * attention + mlps
    vocabulary = heaviest.vocab_rows.stop - heaviest.vocab_rows.start
    narrow = element < 4
    logits = head_tokens * vocabulary * element * (3 if narrow else 1)
    product = vocabulary * hidden * element if narrow else 0  # of a chunk, before it is added to the float32 sum
    again = (
        [*max(attention, mlp if sparse < layers else [], experts, key=sum), front[2]] if recompute else []
    )  # a stage
    norm = (5 if narrow else 4) * own * hidden * 4 + front[2]  # float32 rows
    sums = _expert_gradients(config, heaviest) * element if sparse else 0
    gaps = int(HEAP_GAPS * sum(block for block in kept + again if block < SYSTEM_BLOCK))
    libraries = SMALL_THINGS + (NARROW_PRODUCTS if narrow else 0) + (EXPERT_PRODUCTS if narrow and sparse else 0)
    process = device == "cpu"
    return TrainingPlan(
        memory=training_memory(config, size, element=element, float32_gradients=wide_gradients),
        activations=sum(kept),
        gaps=gaps if process else 0,
        head=front[2] + vocabulary * hidden * 4 + product + 2 * logits,
        backward=max(norm, tokens * _backward(config, heaviest) * element + 2 * front[2] + sum(again) + sums),
        libraries=libraries if process else 0,
        buffers=size * front[2] if process else 0,
    )


def _attention(config: ModelConfig, part: Shard, tokens: int, element: int) -> list[int]:
    """Bytes of what an attention stage keeps, tensor by tensor."""
    queries, kv = part.num_query_heads * config.head_dim, part.num_kv_heads * config.head_dim
    widths = (queries + 2 * kv, queries, kv, queries, queries)  # qkv, turned queries and keys, attended by head, by row
    angles = 4 * [tokens * config.head_dim * 2]  # float32 cosines and sines of half a head, for queries and for keys
    return [tokens * width * element for width in widths] + angles + [4 * tokens * part.num_query_heads]


def _mlp(part: Shard, tokens: int, element: int) -> list[int]:
    """The same of an MLP: gate and up, silu(gate), their product."""
    columns = part.mlp_columns.stop - part.mlp_columns.start
    return [tokens * width * element for width in (2 * columns, columns, columns)]


def _experts(config: ModelConfig, part: Shard, tokens: int, element: int) -> list[int]:
    """The same of experts, each row once for every expert of its token: the rows, gate and up, silu(gate), their
    product, the results, which narrow ones are weighted in float32."""
    assert config.experts is not None
    rows, columns = tokens * config.experts.per_token, part.expert_columns.stop - part.expert_columns.start
    widths = (config.hidden_size, 2 * columns, columns, columns)
    return [rows * width * element for width in widths] + [rows * config.hidden_size * 4]


def _backward(config: ModelConfig, part: Shard) -> int:
    """Numbers a token that the backward pass of a stage holds at most, beyond what it has freed of those kept."""
    queries, kv = part.num_query_heads * config.head_dim, part.num_kv_heads * config.head_dim
    widest = 3 * (part.mlp_columns.stop - part.mlp_columns.start)
    if config.experts:
        columns = part.expert_columns.stop - part.expert_columns.start
        experts = config.experts.per_token * (3 * columns + 2 * config.hidden_size)
        widest = experts if all(config.experts.layers) else max(widest, experts)
    return max(2 * (queries + 2 * kv) + 2 * queries, widest)


def _expert_gradients(config: ModelConfig, part: Shard) -> int:
    """Numbers of the gradients of a layer's experts before they are added: by expert, and gates and ups stacked."""
    assert config.experts is not None
    own = part.expert_columns.stop - part.expert_columns.start
    return config.experts.count * config.hidden_size * own * 5
