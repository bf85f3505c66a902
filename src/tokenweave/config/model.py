"""What a decoder-only model is: its dimensions, and nothing about how it is run."""

from dataclasses import dataclass, field

from tokenweave.config.rope import RopeConfig

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts in place of an MLP (Shazeer et al., arXiv 1701.06538; top-k as in arXiv 2401.04088).

    A token's experts are the `per_token` most likely of a softmax over all `count`; their results are weighted with
    those probabilities, made to sum to one where `normalised`. intermediate_size: of one expert.
    layers: which of the model's layers have experts; the others have an MLP.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalised: bool
    layers: tuple[bool, ...]

    def __post_init__(self) -> None:
        if self.intermediate_size < 1:
            raise ValueError(f"the experts' intermediate size must be at least 1, got {self.intermediate_size}")
        if not 1 <= self.per_token <= self.count:
            raise ValueError(f"experts per token must be from 1 to the {self.count} there are, got {self.per_token}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Dimensions of one decoder. Built from a checkpoint's own config by `config.foreign`, checked here."""

    architecture: str  # the checkpoint's name for it, e.g. "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int  # with the rope's stretching
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    windows: tuple[int | None, ...] = ()  # per layer: keys that a token attends to, itself among them; None: all
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head's dimensions, before rope
    activation: str = "silu"  # one of ACTIVATIONS
    gated_mlp: bool = True  # down(activation(gate(x)) * up(x)); else down(activation(up(x)))
    experts: ExpertsConfig | None = None
    tie_word_embeddings: bool = False
    dtype: str = "float32"  # what the checkpoint stores: "float32", "bfloat16" or "float16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.rms_norm_eps < 1:
            raise ValueError(f"rms_norm_eps must be in [0, 1), got {self.rms_norm_eps}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embedding, got {self.head_dim}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}")
        layers = self.num_hidden_layers
        if self.windows and (len(self.windows) != layers or any(w is not None and w < 1 for w in self.windows)):
            raise ValueError(f"windows must be one for each of {layers} layers, at least 1 or None, got {self.windows}")
        if self.experts is not None and len(self.experts.layers) != layers:
            raise ValueError(f"experts.layers must be one for each of {layers} layers, got {len(self.experts.layers)}")

    @property
    def queries_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_attention_heads // self.num_key_value_heads

    def window(self, layer: int) -> int | None:
        """Keys that a token of this layer attends to, itself among them; None: all."""
        return self.windows[layer] if self.windows else None

    def layer_experts(self, layer: int) -> ExpertsConfig | None:
        """The experts of a layer that has some."""
        return self.experts if self.experts is not None and self.experts.layers[layer] else None
