"""How a model is trained: everything that its losses depend on, besides the model and the text."""

import math
from dataclasses import dataclass, fields

DTYPES = ("float32", "bfloat16")
CHUNK_LOGITS = 1 << 20  # of a chunk of tokens over all ranks: 4 MB, at which the exchange is 1 % of the head's time


def head_chunk(tokens: int, vocabulary: int) -> int:
    """Tokens whose logits exist at once, the same on every rank."""
    return min(tokens, max(16, CHUNK_LOGITS // vocabulary))


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """steps: of the optimizer. A step takes `batch_size` windows of `length` tokens, in `accumulation` parts.

    dtype: of weights and activations; the optimizer holds float32. learning_rate: rises linearly over warmup_steps,
    then falls as a cosine to final_learning_rate. weight_decay: of matrices only. clip_norm: of the gradient of all
    ranks. sequence_parallel: norms and residual on 1/N of the tokens. recompute: keep each stage's input alone and
    compute the rest of it again in the backward pass.
    """

    steps: int = 1000
    batch_size: int = 32
    accumulation: int = 1
    length: int = 128
    learning_rate: float = 3e-4
    final_learning_rate: float = 3e-5
    warmup_steps: int = 50
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip_norm: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    dtype: str = "float32"
    sequence_parallel: bool = True
    recompute: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if field.type is float):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be finite, got {getattr(self, name)}")
        for name in ("steps", "batch_size", "accumulation", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.batch_size % self.accumulation:
            raise ValueError(f"batch_size {self.batch_size} must be a multiple of accumulation, {self.accumulation}")
        for name in ("learning_rate", "epsilon", "clip_norm"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("final_learning_rate", "warmup_steps", "weight_decay", "z_loss", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("beta1", "beta2", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")

    @property
    def windows(self) -> int:
        """Computed at once."""
        return self.batch_size // self.accumulation

    @property
    def tokens(self) -> int:
        """Computed at once."""
        return self.windows * self.length
