"""Rotary position embedding of a model: which kind, and its numbers."""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """`kind` is one of KINDS; the other fields belong to the kinds named behind them.

    Sources: linear, Chen et al., arXiv 2306.15595; dynamic, the NTK-aware base of a request's length; llama3, the
    Llama 3.1 release; yarn, Peng et al., arXiv 2309.00071, sections 3.2 to 3.4.
    """

    KINDS = ("default", "linear", "dynamic", "llama3", "yarn")

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0  # all but default: by how much the context is stretched
    original_max_position_embeddings: int = 0  # dynamic, llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn: turns over the original context from which a dimension is left as it is
    beta_slow: float = 1.0  # yarn: turns below which it is stretched whole
    truncate: bool = True  # yarn: the range between those is widened to whole dimensions
    attention_factor: float = 1.0  # yarn: cos and sin are multiplied by it

    def __post_init__(self) -> None:
        if self.kind not in self.KINDS:
            raise ValueError(f"rope type {self.kind!r} is not supported; supported: {', '.join(self.KINDS)}")
        if not all(0 < value < inf for value in (self.theta, self.factor, self.attention_factor)):
            raise ValueError(
                "rope theta, factor and attention_factor must be positive and finite, got "
                f"{self.theta}, {self.factor} and {self.attention_factor}"
            )
        if self.kind in ("dynamic", "llama3", "yarn") and self.original_max_position_embeddings < 1:
            raise ValueError(f"original_max_position_embeddings must be at least 1 for rope type {self.kind!r}")
