"""Where a rank's memory goes, in inference and in training."""

from dataclasses import dataclass

from tokenweave.config import ModelConfig, Shard, shard

# Allowances, not accounts: what a CUDA process holds before its first tensor (context, cuBLAS, NCCL), and what the
# graphs of a decoder of 80 layers at a few dozen sizes hold.
CONTEXT_BYTES = 600 * 2**20
GRAPH_BYTES = 2**30
# PyTorch's allocator hands out large blocks in steps of 2 MiB, so a weight loses 1 MiB on the mean; activations that
# come and go in many sizes leave gaps of about a fifth.
LOST_PER_TENSOR = 2**20
ACTIVATION_GAPS = 0.2
TENSORS_PER_LAYER = 6  # qkv, output, gate_up, down and two norms
LANES = 2


@dataclass(frozen=True, kw_only=True)
class InferenceMemory:
    """Bytes on the heaviest rank."""

    weights: int
    kv_cache: int
    activations: int
    communication_buffers: int
    graphs: int
    cuda_context: int
    fragmentation: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Bytes on the heaviest rank, without activations: Adam, in mixed precision or all in float32."""

    weights: int  # bf16: 2 bytes a parameter
    gradients: int  # bf16 2, or float32 4 more beside them
    master_weights: int  # float32: 4, or none beside float32 weights
    adam_first_moment: int  # float32: 4
    adam_second_moment: int  # float32: 4

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def rank_parameters(config: ModelConfig, part: Shard) -> int:
    """Parameters that a rank holds: its slices, and the norms, which every rank holds whole."""
    hidden, dim = config.hidden_size, config.head_dim
    queries, kv = part.num_query_heads * dim, part.num_kv_heads * dim
    rows = part.vocab_rows.stop - part.vocab_rows.start
    first = part.rank == 0  # a partial sum's bias is added once
    attention = hidden * (queries + 2 * kv) + queries * hidden
    attention += config.qkv_bias * (queries + 2 * kv) + (config.output_bias and first) * hidden
    attention += config.qk_norm * 2 * dim
    vocabulary = rows * hidden * (1 if config.tie_word_embeddings else 2)
    return config.num_hidden_layers * (attention + 2 * hidden) + _mlps(config, part) + hidden + vocabulary


def _mlps(config: ModelConfig, part: Shard) -> int:
    """Parameters of the MLPs and experts of all layers. Routers are whole on every rank."""
    hidden, wide, experts = config.hidden_size, 2 if config.gated_mlp else 1, config.experts
    columns = part.mlp_columns.stop - part.mlp_columns.start
    mlp = (wide + 1) * hidden * columns + config.mlp_bias * (wide * columns + (part.rank == 0) * hidden)
    if experts is None:
        return config.num_hidden_layers * mlp
    own = part.expert_columns.stop - part.expert_columns.start
    sparse = sum(experts.layers)
    return (config.num_hidden_layers - sparse) * mlp + sparse * experts.count * hidden * ((wide + 1) * own + 1)


def kv_bytes_per_token(config: ModelConfig, size: int, element: int) -> int:
    """Keys and values of one token in all layers, on the rank with the most KV heads."""
    heads = max(shard(config, size, rank).num_kv_heads for rank in range(size))
    return 2 * config.num_hidden_layers * heads * config.head_dim * element


def inference_memory(
    config: ModelConfig, size: int, *, element: int, step_tokens: int, kv_tokens: int
) -> InferenceMemory:
    """Memory of the heaviest of `size` ranks for steps of `step_tokens` over a cache of `kv_tokens`.

    element: bytes of a weight or activation. Activations are the larger of the two stages' intermediate tensors, and
    the residual, of which a rank keeps 1/size.
    """
    parts = [shard(config, size, rank) for rank in range(size)]
    queries = max(part.num_query_heads for part in parts) * config.head_dim
    kv = max(part.num_kv_heads for part in parts) * config.head_dim
    attention = 3 * queries + 3 * kv  # projected, rotated and attended
    mlp = 4 * max(part.mlp_columns.stop - part.mlp_columns.start for part in parts)  # gate_up, activation and product
    if config.experts:
        columns = max(part.expert_columns.stop - part.expert_columns.start for part in parts)
        experts = config.experts.per_token * (4 * columns + 2 * config.hidden_size)  # and the rows, there and back
        mlp = experts if all(config.experts.layers) else max(mlp, experts)
    residual = -(-step_tokens // size) * config.hidden_size
    activations = (step_tokens * max(attention, mlp) + residual) * element
    return InferenceMemory(
        weights=max(rank_parameters(config, part) for part in parts) * element,
        kv_cache=kv_tokens * kv_bytes_per_token(config, size, element),
        activations=activations,
        communication_buffers=LANES * step_tokens * config.hidden_size * element if size > 1 else 0,
        graphs=GRAPH_BYTES,
        cuda_context=CONTEXT_BYTES,
        fragmentation=int(ACTIVATION_GAPS * activations)
        + config.num_hidden_layers * TENSORS_PER_LAYER * LOST_PER_TENSOR,
    )


def training_memory(
    config: ModelConfig, size: int, *, element: int = 2, float32_gradients: bool = False
) -> TrainingMemory:
    """2 + 2 + 4 + 4 + 4 bytes a parameter on the heaviest of `size` ranks; 4 more with float32 gradients.

    element: bytes of a weight. Float32 weights are their own masters: 4 + 4 + 4 + 4.
    """
    parameters = max(rank_parameters(config, shard(config, size, rank)) for rank in range(size))
    narrow = element < 4
    return TrainingMemory(
        weights=element * parameters,
        gradients=(element + (4 if float32_gradients and narrow else 0)) * parameters,
        master_weights=(4 if narrow else 0) * parameters,
        adam_first_moment=4 * parameters,
        adam_second_moment=4 * parameters,
    )
