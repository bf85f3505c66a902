"""What a caller asks of one request."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    max_tokens: at most this many new tokens; 0 asks for none. temperature: 0 takes the most likely token.
    top_p: in (0, 1], the smallest set of most likely tokens whose probability reaches it. top_k: the k most likely
    tokens; 0 or -1 leaves it off. seed: of the random numbers, which depend on it and a token's place alone, so the
    same seed and prompt give the same tokens whatever else runs, but for rounding (see README); None draws one.
    stop: strings that end the answer and are not part of its text. stop_token_ids: ids that end it.
    ignore_eos: go on past the model's own end-of-text tokens.
    logprobs: how many of the most likely tokens to report at each place, next to the chosen one; None for nothing.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name in ("max_tokens", "top_k", "seed", "logprobs"):
            value = getattr(self, name)
            if value is not None or name in ("max_tokens", "top_k"):
                object.__setattr__(self, name, _integer(name, value))
        if self.max_tokens < 0:
            raise ValueError(f"max_tokens must not be negative, got {self.max_tokens}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < -1:
            raise ValueError(f"top_k must be positive, or 0 or -1 for off, got {self.top_k}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be in [0, 2**63), got {self.seed}")
        if self.logprobs is not None and self.logprobs < 0:
            raise ValueError(f"logprobs must not be negative, got {self.logprobs}")
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop must hold strings that are not empty, got {stop!r}")
        if any(_integer("stop_token_ids", token) < 0 for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids must not be negative, got {self.stop_token_ids}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1


def _integer(name: str, value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {value!r}") from None
